"""Run one pass over a validation, test or prediction loader, with its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from eventloop.checkpoint.weights import save_modes
from eventloop.data.limits import first
from eventloop.data.loader_info import check_loader, named_loaders, of_loader, to_device
from eventloop.data.side_pass import open_aside
from eventloop.evaluation.batch_sizes import samples_of
from eventloop.evaluation.compiled_outputs import run_step
from eventloop.evaluation.evaluation import Evaluation, before_drawing
from eventloop.evaluation.other_weights import merged, name_of_pass, other_weights
from eventloop.evaluation.prediction import Prediction, begin_prediction
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

T = TypeVar("T")


class Evaluations(LoopTrainer):
    """The methods of `Trainer` that evaluate and predict."""

    autocast: Callable[[], AbstractContextManager[Any]]
    _predict_step: Callable[[Any, Any], Any] | None

    @knowing_calls
    def val(self) -> dict[str, float]:
        """Validate once and return the metrics.

        Called by a handler of `after_train_iter` it runs within that iteration: `iter` of its events is the
        one of the iteration, while a validation of the schedule comes after it, and has the next one. Both
        are logged, and saved, at the same step, the number of completed iterations.
        """
        return _within_run(self, lambda: evaluate(self, "val"))

    def val_aside(self) -> dict[str, float]:
        """Validate once within a training and return the metrics; the training goes on as without it.

        The metrics are logged. The closing events have the reason "command", by which hooks that act on
        scores know that this one does not count. Random states are restored.

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

        Tensors and arrays are concatenated along dimension 0, or listed by sample if their other dimensions
        differ. Mappings and tuples are joined by field, lists one after the other; of any other object there
        is a list with one for each batch. Every rank returns the outputs of all ranks, and some ranks may
        have no batch. The samples of a `DataLoader` over a map-style data set have the order of the data set,
        each once, whatever its sampler and the padding of a `DistributedSampler`; those of any other loader
        have its order, rank after rank, or once if all ranks have the same data (`data_ranks` is 1).

        The model is in eval mode, without gradients, and has the weights that a validation would have, such
        as the average of an `EMAHook`. Modes and random states are restored.

        Args:
            loader: an iterable of batches: inputs alone, or `(inputs, target)`, else give `predict_step` to
                the Trainer.
            to: a function `(outputs)`, or a coroutine function, that receives the outputs of each batch in
                the background, in the order of the loader. Each rank passes on its own batches. Or a writer
                that receives `batch_predicted`. Nothing is kept then. At most 256 MiB of outputs wait for it.

        Returns:
            The outputs; None with `to`, after it has received everything, or if a stop cut the pass short.

        Raises:
            TypeError, ValueError: `loader` is not an iterable of batches, such as a data set without a
                `DataLoader`, or is empty on all ranks, or has no indices while some ranks share their data,
                or `to` is neither a function of the outputs nor a writer of `batch_predicted`.
            Exception: `to` has raised it.
            RuntimeError: a writer did not receive all batches.
        """
        check_loader("loader", loader, may_be_empty=has_other_ranks())
        return _within_run(self, lambda: predict(self, loader, to))

    def predict_step(self, batch: Any) -> Any:
        """Return the outputs for one batch.

        Raises:
            TypeError: there is no `predict_step=...`, and the batch is a tuple of more than two.
        """
        with self.autocast():
            if self._predict_step is not None:
                return self._predict_step(self, batch)
            return outputs_of_inputs(self.model, batch)


def _within_run(trainer: LoopTrainer, work: Callable[[], T]) -> T:
    """Return what `work` returns in a run that only evaluates, and end the run wherever Ctrl-C comes."""
    scope, undo = run_scope(trainer, trains=False)
    with undo, undo, scope:  # undo twice: an interrupt may skip one of the two exits
        return work()


def check_loaders(trainer: LoopTrainer, mode: str) -> dict[str, Iterable[Any]]:
    """Return the loaders of a mode by name; the name of a single one is ""."""
    loaders = {"train": trainer.train_loader, "val": trainer.val_loader, "test": trainer.test_loader}
    if (given := loaders[mode]) is None:
        does = "train" if mode == "train" else "evaluate"
        raise ValueError(f"the trainer has no {mode}_loader to {does} on: pass {mode}_loader=...")
    return named_loaders(given)


def evaluate(
    trainer: LoopTrainer, mode: Evaluate, *, scheduled: bool = False, reason: str = COMPLETED
) -> dict[str, float]:
    """Validate or test once, with all events, and return the metrics; {} if a stop cut the pass short.

    Args:
        mode: "val" or "test".
        scheduled: True if the training loop calls this function, False if the user does. A complete scheduled
            evaluation is noted in the checkpoints, so that a resumed run does not repeat it.
        reason: the reason of the closing events of a complete evaluation.

    Raises:
        ValueError: the trainer has no loader for `mode`, or the loader is empty.
    """
    loaders = check_loaders(trainer, mode)
    undo = Undo()
    _save_place(undo, trainer)
    with undo, undo, trainer.clock.excluding():  # undo twice: an interrupt may skip one of the two exits
        put_back = before_drawing(trainer.model, trainer.loader, loaders.values()) if scheduled else None
        with EvalScope(trainer, mode) as scope:
            scope.reason = reason
            _evaluate(trainer, mode, loaders, scope, counts=scheduled)
        if put_back is not None and not scope.complete:  # it runs again, and must draw the same numbers
            put_back()
    return scope.metrics


def _save_place(undo: Undo, trainer: LoopTrainer) -> None:
    """Let `undo` restore what the scope and the clock of an evaluation set, which an interrupt may leave."""
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
    """Return the metrics of the model's weights, then of other weights on the same batches.

    The other weights get the random numbers that the model's own got. Return None if a stop cut the passes
    short.
    """
    others = other_weights(trainer.hooks)
    put_back = before_drawing(trainer.model, trainer.loader, loaders.values()) if others else lambda: None
    metrics = _metrics_of(trainer, mode, loaders, "")
    for prefix, hook in others.items():
        if metrics is None or trainer.stopping:
            return None
        put_back()
        with hook.in_model(trainer, mode):
            more = _metrics_of(trainer, mode, loaders, prefix)
        metrics = None if more is None else merged(metrics, more)
    return metrics


def _metrics_of(
    trainer: LoopTrainer, mode: str, loaders: Mapping[str, Iterable[Any]], weights: str
) -> dict[str, float] | None:
    """Return the metrics of all loaders, one after the other; None if a stop cut the passes short.

    Args:
        weights: the prefix of the weights that the model has; "" for its own.
    """
    metrics: dict[str, float] = {}
    for number, (name, loader) in enumerate(loaders.items()):
        if number and trainer.stopping:  # a stop was requested in the last batch of the former loader
            return None
        evaluation = Evaluation(trainer.evaluator, trainer.ignored_outputs, trainer.device)

        def add(outputs: Any, evaluation: Evaluation = evaluation) -> None:
            evaluation.add(outputs, samples_of(outputs, trainer.batch, trainer.ignored_outputs))

        label = name_of_pass(weights, name)
        if not _run_pass(trainer, mode, loader, trainer.val_step, add, {"loader": label}):
            return None
        metrics |= {of_loader(label, metric): value for metric, value in evaluation.compute().items()}
    return metrics


def predict(trainer: Evaluations, loader: Iterable[Any], to: Any) -> Any:
    """Predict on a loader as `Trainer.predict`, with all events, within a run."""
    undo = Undo()
    _save_place(undo, trainer)
    # each undo twice: an interrupt may skip one of the two exits
    with undo, undo, trainer.clock.excluding(), EvalScope(trainer, "predict") as scope:
        changed = Undo()
        with changed, changed:
            prediction = begin_prediction(changed, trainer, loader, to)
            return _predict(trainer, prediction, scope)


def _predict(trainer: Evaluations, prediction: Prediction, scope: EvalScope) -> Any:
    try:
        step = trainer.predict_step
        scope.complete = _run_pass(trainer, "predict", prediction.loader, step, prediction.add, {})
        return prediction.end(complete=scope.complete)
    except Exception:  # not after an interrupt, because `close` waits for the subscriber
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
    """Give the outputs of `step` for each batch to `receive`; return False if a stop cut the pass short.

    Args:
        fields: fields of the events around an iteration.
    """
    before, after = EVAL_ITERATIONS[mode]
    bus = trainer.bus
    passing, batches = Pass(trainer.stops, trainer.limits.length(mode, loader)), 0
    reading = first(open_aside(trainer.loader, loader), trainer.limits.cut(mode, loader))
    for batch_idx, batch in enumerate(reading):
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
            retain_until_end(trainer, reading)
            return False
    if not passing.end(batches):
        return False
    # a rank without a batch still takes part when the ranks gather their outputs
    if not any(gather(batches) if mode == "predict" else [batches]):
        name = f" {fields['loader']!r}" if fields.get("loader") else ""
        raise ValueError(f"the {mode} loader{name} is empty: a pass over it gave no batch")
    return True
