"""Emit the events of evaluators' runs within the run of an ignite engine, and log their metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any
from weakref import ref

from ignite.engine import Engine, Events
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from eventloop.bridges.attachment import Attachment
from eventloop.bridges.host_numbers import numbers_of, read_numbers
from eventloop.bridges.hosted import HostedTrainer
from eventloop.evaluation.schedule import Evaluate
from eventloop.metrics.scalar_value import is_single

logger = logging.getLogger("eventloop")

MODES: tuple[Evaluate, ...] = ("val", "test")
TRAIN_DATA = "train_data"
"""The mode of metrics of a "val" or "test" evaluator that runs over the data of the training."""
_WHOLE = frozenset({SequentialSampler, RandomSampler, DistributedSampler})
"""Samplers that yield every sample of a data set, all ranks taken together."""


class EvaluatorHandlers:
    """Emit the events of an evaluator's runs, or log their metrics.

    Only the first run at a step, over other data than the training's, has the events of a validation. A run
    over the data of the training only logs its metrics, under the mode "train_data". Further runs at the same
    step log them under "val_2" and so on, so that each mode, name and step has one value.

    Args:
        evaluator: the engine that evaluates.
        mode: "val", "test", or another name for its metrics.
        engine: the engine that trains.
        attachment: holds the trainer.
    """

    def __init__(self, evaluator: Engine, mode: str, engine: Engine, attachment: Attachment) -> None:
        self._mode, self._engine, self._attachment = mode, ref(engine), attachment
        self._last_run: tuple[object, int] | None = None  # the engine's state object and the step
        self._runs_at_step = 0  # over other data than the training's
        self._mode_of_present_run = ""  # "" between runs
        self._warned_modes: set[str] = set()
        evaluator.add_event_handler(Events.STARTED, self._begin)
        evaluator.add_event_handler(Events.ITERATION_STARTED, self._begin_iter)
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._end_iter)
        evaluator.add_event_handler(Events.COMPLETED, self._end)

    @property
    def _trainer(self) -> HostedTrainer | None:
        """The bridge's trainer; None if the evaluator runs before or after the run of the training engine."""
        trainer = self._attachment.trainer
        return trainer if trainer is not None and trainer.running else None

    def _begin(self, evaluator: Engine) -> None:
        """Begin an evaluation of our trainer when the evaluator starts, if this run of it has a mode."""
        self._mode_of_present_run = ""
        if (trainer := self._trainer) is None:
            return
        self._mode_of_present_run = self._mode_of_run(evaluator, trainer)
        if self._mode_of_present_run in MODES:
            trainer.begin_val("val" if self._mode_of_present_run == "val" else "test")

    def _mode_of_run(self, evaluator: Engine, trainer: HostedTrainer) -> str:
        """Return the mode under which the metrics of the run that begins are logged; see the class."""
        engine = self._engine()
        if self._mode in MODES and engine is not None and _same_data(evaluator, engine):
            self._warn_once(TRAIN_DATA, "over the data of the training")
            return TRAIN_DATA
        step = trainer.iter + (trainer.within == "iter")
        state = engine.state if engine is not None else None  # ignite makes another one for each run
        same_step = self._last_run is not None and self._last_run[0] is state and self._last_run[1] == step
        self._runs_at_step = self._runs_at_step + 1 if same_step else 1
        self._last_run = state, step
        if self._runs_at_step == 1:
            return self._mode
        self._warn_once(
            mode := f"{self._mode}_{self._runs_at_step}", f"{self._runs_at_step} times at step {step}"
        )
        return mode

    def _warn_once(self, mode: str, how: str) -> None:
        """Warn that a run is no validation; `how` says how the evaluator ran, such as "2 times at step 5"."""
        if mode not in self._warned_modes:
            self._warned_modes.add(mode)
            logger.warning(
                "the evaluator of %r ran %s: these metrics are logged under the mode %r, without the events "
                "of a validation; attach(evaluators={...}) with one evaluator for each data set names them",
                self._mode,
                how,
                mode,
            )

    def _validates(self, evaluator: Engine) -> HostedTrainer | None:
        """Return the trainer if this run has the events of a validation or test, else None.

        Begin the run first if needed: ignite continues an interrupted run without `STARTED`.
        """
        if (trainer := self._trainer) is None:
            return None
        if not self._mode_of_present_run or (self._mode_of_present_run in MODES and trainer.mode == "train"):
            self._begin(evaluator)
        return trainer if self._mode_of_present_run in MODES else None

    def _begin_iter(self, evaluator: Engine) -> None:
        if (trainer := self._validates(evaluator)) is not None:
            trainer.begin_val_iter(evaluator.state.batch, _batch_idx(evaluator))

    def _end_iter(self, evaluator: Engine) -> None:
        if (trainer := self._validates(evaluator)) is not None:
            trainer.end_val_iter(outputs_of(evaluator.state.output), _batch_idx(evaluator))

    def _end(self, evaluator: Engine) -> None:
        """Log the metrics of the run that ends, or end the validation or test with them."""
        mode, self._mode_of_present_run = self._mode_of_present_run, ""
        if not mode or (trainer := self._trainer) is None:
            return
        if mode not in MODES:
            numbers = numbers_of(evaluator.state.metrics)
            trainer.log(
                without_collisions(numbers, trainer, "evaluated") if mode == "train" else numbers, mode=mode
            )
        elif trainer.mode == mode:
            trainer.end_val(read_numbers(evaluator.state.metrics))
            if trainer.stopping and (engine := self._engine()) is not None:
                # of several ranks perhaps only some evaluate, so these agree on a stop at a later iteration
                engine.terminate()


def outputs_of(output: Any) -> Any:
    """Return an ignite engine's output as a mapping: a single number becomes `{"loss": number}`.

    Return None if the output is neither a mapping nor a single number.
    """
    if isinstance(output, Mapping):
        return output
    return {"loss": output} if is_single(output) else None


def without_collisions(numbers: Mapping[str, Any], trainer: HostedTrainer, prefix: str) -> dict[str, Any]:
    """Return numbers with `prefix/` before each name that is also an output of the training steps."""
    output_names = trainer.outputs if isinstance(trainer.outputs, Mapping) else ()
    return {f"{prefix}/{name}" if name in output_names else name: value for name, value in numbers.items()}


def _same_data(evaluator: Engine, engine: Engine) -> bool:
    """Return whether two engines read the same loader, or loaders that yield all samples of one data set.

    With samplers of the program's own, two loaders may yield different parts of one data set: return False.
    """
    first, second = evaluator.state.dataloader, engine.state.dataloader
    if first is None or second is None:
        return False
    if first is second:
        return True
    if getattr(first, "dataset", first) is not getattr(second, "dataset", second):
        return False
    return _yields_all_samples(first) and _yields_all_samples(second)


def _yields_all_samples(loader: object) -> bool:
    """Return whether the loader has PyTorch's own samplers, which yield all samples of a data set."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None:
        return type(getattr(loader, "sampler", None)) in _WHOLE
    return type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _WHOLE


def _batch_idx(evaluator: Engine) -> int:
    state = evaluator.state
    return int((state.iteration - 1) % state.epoch_length) if state.epoch_length else int(state.iteration - 1)
