"""Run one pass over a validation, test or prediction loader, with its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from eventloop.checkpoint.weights import save_modes
from eventloop.data.limits import first
from eventloop.data.loader_info import check_loader, named_loaders, of_loader, to_device
from eventloop.data.side_pass import open_aside
from eventloop.evaluation.batch_sizes import samples_of
from eventloop.evaluation.compiled_outputs import run_step
from eventloop.evaluation.evaluation import Evaluation, before_drawing
from eventloop.evaluation.other_weights import merged, name_of_pass, other_weights
from eventloop.evaluation.schedule import Evaluate
from eventloop.events import BY_COMMAND, COMPLETED
from eventloop.migration.names import knowing_calls
from eventloop.model.forward import outputs_of_inputs
from eventloop.state.exchange import gather, has_other_ranks
from eventloop.state.undo import Undo
from eventloop.stops.stopping import Pass
from eventloop.training.loop_steps import EVAL_ITERATIONS
from eventloop.training.protocols import LoopTrainer
from eventloop.training.scopes import EpochScope, EvalScope, retain_until_end, run_scope

if TYPE_CHECKING:
    from eventloop.evaluation.prediction import Prediction

T = TypeVar("T")


class Evaluations(LoopTrainer):
    """The methods of `Trainer` that evaluate and predict."""

    autocast: Callable[[], AbstractContextManager[Any]]
    _predict_step: Callable[[Any, Any], Any] | None

    @knowing_calls
    def val(self) -> dict[str, float]:
        """Validate once and return the metrics.

        If a handler of `after_train_iter` calls this, the validation runs within the iteration, and `iter` of
        its events is the index of this iteration. A scheduled validation comes after the iteration, and
        `iter` is the index of the next one. Both log their metrics at the same step, the number of completed
        iterations.
        """
        return _within_run(self, lambda: evaluate(self, "val"))

    def val_aside(self) -> dict[str, float]:
        """Validate once within a training without an effect on it, and return the metrics.

        The metrics are logged. The closing events have the reason "command", so that hooks for best
        checkpoints and early stopping ignore them. Random states are restored.

        Raises:
            ValueError: the trainer has no val loader, or it is empty.
        """
        undo = Undo()
        with undo, undo:  # twice: an interrupt may skip one of the two exits
            undo.attributes(self, "failure")  # an error of the validation does not end the training
            loaders = check_loaders(self, "val").values()
            undo.step(before_drawing(self.model, self.loader, loaders))
            return evaluate(self, "val", reason=BY_COMMAND)

    @knowing_calls
    def test(self) -> dict[str, float]:
        """Test once and return the metrics."""
        return _within_run(self, lambda: evaluate(self, "test"))

    @knowing_calls
    def predict(self, loader: Iterable[Any], *, to: Any = None) -> Any:
        """Return the outputs of the model for all batches of a loader, on the CPU.

        Tensors and arrays are concatenated along dimension 0, or become a list of samples if their other
        dimensions differ. Mappings and tuples are joined by field, and lists are concatenated. Other objects
        become a list with one for each batch. Every rank returns the outputs of all ranks, and some ranks may
        have no batch. With a `DataLoader` over a map-style data set, each sample occurs once, in the order of
        the data set, whatever the sampler. The samples of any other loader have its order, those of one rank
        after another, or once if all ranks have the same data (`data_ranks` is 1).

        The model is in eval mode, without gradients, and has the weights that a validation would have, such
        as the average of an `EMAHook`. Modes and random states are restored.

        Args:
            loader: an iterable of batches: inputs alone, or `(inputs, target)`, else give `predict_step` to
                the Trainer.
            to: a function `(outputs)`, or a coroutine function, that receives the outputs of each batch in
                the background, in the order of the loader; or a writer that receives `batch_predicted`. Each
                rank passes on its own batches. No outputs are returned then. At most 256 MiB of outputs wait
                for `to`.

        Returns:
            The outputs; None with `to`, after it has received everything, or if a stop cut the pass short.

        Raises:
            TypeError, ValueError: `loader` is not an iterable of batches, such as a data set without a
                `DataLoader`, or is empty on all ranks, or has no indices while some ranks share their data,
                or `to` is neither a function of the outputs nor a writer of `batch_predicted`.
            Exception: the error that `to` has raised.
            RuntimeError: a writer did not receive all batches.
        """
        check_loader("loader", loader, may_be_empty=has_other_ranks())
        return _within_run(self, lambda: predict(self, loader, to))

    def predict_step(self, batch: Any) -> Any:
        """Return the outputs for one batch, by the `predict_step` of the trainer or by its model.

        Raises:
            TypeError: the trainer has no `predict_step`, and the batch is a tuple of more than two.
        """
        with self.autocast():
            if self._predict_step is not None:
                return self._predict_step(self, batch)
            return outputs_of_inputs(self.model, batch)


def _within_run(trainer: LoopTrainer, work: Callable[[], T]) -> T:
    """Call `work` in a run that only evaluates, and return its result; Ctrl-C ends the run at any point."""
    scope, undo = run_scope(trainer, trains=False)
    with undo, undo, scope:  # undo twice: an interrupt may skip one of the two exits
        return work()


def check_loaders(trainer: LoopTrainer, mode: str) -> dict[str, Iterable[Any]]:
    """Return the loaders of a mode by name; a single loader has the name "".

    Raises:
        ValueError: the trainer has no loader for `mode`.
    """
    loaders = {"train": trainer.train_loader, "val": trainer.val_loader, "test": trainer.test_loader}
    if (loader := loaders[mode]) is None:
        verb = "train" if mode == "train" else "evaluate"
        raise ValueError(f"the trainer has no {mode}_loader to {verb} on: pass {mode}_loader=...")
    return named_loaders(loader)


def evaluate(
    trainer: LoopTrainer, mode: Evaluate, *, scheduled: bool = False, reason: str = COMPLETED
) -> dict[str, float]:
    """Validate or test once, with all events, and return the metrics; {} if a stop cut the pass short.

    Args:
        mode: "val" or "test".
        scheduled: True if the training loop calls this function, False if the user does. Checkpoints record
            a complete scheduled evaluation, so that a resumed run does not repeat it.
        reason: the reason of the closing events of a complete evaluation.

    Raises:
        ValueError: the trainer has no loader for `mode`, or the loader is empty.
    """
    loaders = check_loaders(trainer, mode)
    undo = Undo()
    _save_attributes(undo, trainer)
    with undo, undo, trainer.clock.excluding():  # undo twice: an interrupt may skip one of the two exits
        restore = before_drawing(trainer.model, trainer.loader, loaders.values()) if scheduled else None
        with EvalScope(trainer, mode) as scope:
            scope.reason = reason
            _evaluate(trainer, mode, loaders, scope, counts=scheduled)
        # a resumed run repeats an incomplete evaluation with the same random numbers
        if restore is not None and not scope.complete:
            restore()
    return scope.metrics


def _save_attributes(undo: Undo, trainer: LoopTrainer) -> None:
    """Let `undo` restore the attributes that an evaluation sets, for an interrupt that prevents its end."""
    undo.attributes(trainer, "mode")
    undo.attributes(trainer.clock.waits, "place")


def _evaluate(
    trainer: LoopTrainer,
    mode: Evaluate,
    loaders: Mapping[str, Iterable[Any]],
    scope: EvalScope,
    *,
    counts: bool,
) -> None:
    """Run the pass of an evaluation in eval mode, and set the metrics of `scope`.

    Args:
        counts: whether to count the evaluation, if it is complete, as one of the schedule.
    """
    undo = Undo()
    with undo, undo:  # twice: an interrupt may skip one of the two exits
        undo.attributes(trainer, "batch", "outputs")
        save_modes(undo, trainer.model)
        trainer.model.eval()
        with EpochScope(trainer, mode) as epoch:
            epoch.reason = scope.reason
            metrics = _metrics(trainer, mode, loaders)
            if metrics is not None:
                epoch.metrics = scope.metrics = metrics
                epoch.complete = scope.complete = True
                trainer.position.evaluated += counts


def _metrics(
    trainer: LoopTrainer, mode: str, loaders: Mapping[str, Iterable[Any]]
) -> dict[str, float] | None:
    """Return the metrics of the model's weights, and of other weights that a hook provides, such as averages.

    A second pass with the other weights has the same batches and random numbers. Return None if a stop cut
    the passes short.
    """
    hooks = other_weights(trainer.hooks)
    restore = before_drawing(trainer.model, trainer.loader, loaders.values()) if hooks else lambda: None
    metrics = _metrics_of(trainer, mode, loaders, "")
    for prefix, hook in hooks.items():
        if metrics is None or trainer.stopping:
            return None
        restore()
        with hook.in_model(trainer, mode):
            metrics_of_hook = _metrics_of(trainer, mode, loaders, prefix)
        metrics = None if metrics_of_hook is None else merged(metrics, metrics_of_hook)
    return metrics


def _metrics_of(
    trainer: LoopTrainer, mode: str, loaders: Mapping[str, Iterable[Any]], prefix: str
) -> dict[str, float] | None:
    """Return the metrics of all loaders, one after the other; None if a stop cut the passes short.

    Args:
        prefix: the prefix of the metrics' names, which tells what weights the model has now: such as "ema",
            or "" for its own weights.
    """
    metrics: dict[str, float] = {}
    for number, (name, loader) in enumerate(loaders.items()):
        if number and trainer.stopping:  # a stop was requested in the last batch of the previous loader
            return None
        evaluation = Evaluation(trainer.evaluator, trainer.ignored_outputs, trainer.device)

        def add(outputs: Any, evaluation: Evaluation = evaluation) -> None:
            evaluation.add(outputs, samples_of(outputs, trainer.batch, trainer.ignored_outputs))

        pass_name = name_of_pass(prefix, name)  # such as "ema/clean"; "" for one loader and its own weights
        if not _run_pass(trainer, mode, loader, trainer.val_step, add, {"loader": pass_name}):
            return None
        metrics |= {of_loader(pass_name, metric): value for metric, value in evaluation.compute().items()}
    return metrics


def predict(trainer: Evaluations, loader: Iterable[Any], to: Any) -> Any:
    """Predict on a loader, with all events, within a run; `Trainer.predict` has the arguments and result."""
    from eventloop.evaluation.prediction import begin_prediction  # imports four modules that few runs need

    undo = Undo()
    _save_attributes(undo, trainer)
    # each undo twice: an interrupt may skip one of the two exits
    with undo, undo, trainer.clock.excluding(), EvalScope(trainer, "predict") as scope:
        undo_changes = Undo()
        with undo_changes, undo_changes:
            prediction = begin_prediction(undo_changes, trainer, loader, to)
            return _predict(trainer, prediction, scope)


def _predict(trainer: Evaluations, prediction: Prediction, scope: EvalScope) -> Any:
    """Run the pass of a prediction, and return its result."""
    try:
        step = trainer.predict_step
        scope.complete = _run_pass(trainer, "predict", prediction.loader, step, prediction.add, {})
        return prediction.end(complete=scope.complete)
    except Exception:  # not a KeyboardInterrupt, because `close` waits for the subscriber
        prediction.close()
        raise


def _run_pass(
    trainer: LoopTrainer,
    mode: str,
    loader: Iterable[Any],
    step: Callable[[Any], Any],
    receive: Callable[[Any], None],
    fields: Mapping[str, str],
) -> bool:
    """Run one pass over a loader, with the events around each batch; return False if a stop cut it short.

    Args:
        mode: "val", "test" or "predict".
        step: returns the outputs of a batch.
        receive: called with the outputs of each batch.
        fields: additional fields of the events.

    Raises:
        ValueError: the loader is empty.
    """
    before, after = EVAL_ITERATIONS[mode]
    bus = trainer.bus
    passing, batches = Pass(trainer.stops, trainer.limits.length(mode, loader)), 0
    batches_of_pass = first(open_aside(trainer.loader, loader), trainer.limits.cut(mode, loader))
    for batch_idx, batch in enumerate(batches_of_pass):
        trainer.batch = to_device(batch, trainer.device)
        if bus.wants(before):
            trainer.announce(before, batch_idx=batch_idx, **fields)
        trainer.outputs = run_step(step, trainer.batch, compiled=trainer.compiled)
        receive(trainer.outputs)
        if bus.wants(after):
            trainer.announce(after, batch_idx=batch_idx, **fields)
        batches += 1
        bus.poll(trainer)
        if passing.stops(batches):
            retain_until_end(trainer, batches_of_pass)
            return False
    if not passing.end(batches):
        return False
    # a rank without a batch takes part in the gather as well, because all ranks must call it
    if not any(gather(batches) if mode == "predict" else [batches]):
        name = f" {fields['loader']!r}" if fields.get("loader") else ""
        raise ValueError(f"the {mode} loader{name} is empty: a pass over it gave no batch")
    return True
