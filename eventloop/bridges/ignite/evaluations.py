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
"""Samplers that give all samples of a data set, over all ranks."""


class EvaluatorHandlers:
    """The bridge's handlers on an evaluator.

    A run over the data that the engine trains on is no validation: its metrics are logged under the mode
    "train_data". Of several runs at one step only the first is, and the metrics of the others are logged
    under "val_2" and so on, so that each mode, name and step has one value.

    Args:
        evaluator: the engine that evaluates.
        mode: "val", "test", or another name for its metrics.
        engine: the engine that trains.
        attachment: holds the trainer.
    """

    def __init__(self, evaluator: Engine, mode: str, engine: Engine, attachment: Attachment) -> None:
        self._mode, self._engine, self._attachment = mode, ref(engine), attachment
        self._at: tuple[object, int] | None = None  # the engine's run, by its state, and the step
        self._runs = 0  # runs over other data than the training's at this step
        self._logs_as = ""  # the mode of the evaluator's present run; "" between runs
        self._named: set[str] = set()
        evaluator.add_event_handler(Events.STARTED, self._begin)
        evaluator.add_event_handler(Events.ITERATION_STARTED, self._begin_iter)
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._end_iter)
        evaluator.add_event_handler(Events.COMPLETED, self._end)

    @property
    def _trainer(self) -> HostedTrainer | None:
        """The trainer of the bridge while its engine runs; evaluators may also run before or after that."""
        trainer = self._attachment.trainer
        return trainer if trainer is not None and trainer.running else None

    def _begin(self, evaluator: Engine) -> None:
        self._logs_as = ""
        if (trainer := self._trainer) is None:
            return
        self._logs_as = self._mode_of_run(evaluator, trainer)
        if self._logs_as in MODES:
            trainer.begin_val("val" if self._logs_as == "val" else "test")

    def _mode_of_run(self, evaluator: Engine, trainer: HostedTrainer) -> str:
        engine = self._engine()
        if self._mode in MODES and engine is not None and _same_data(evaluator, engine):
            self._warn_once(TRAIN_DATA, "over the data of the training")
            return TRAIN_DATA
        step = trainer.iter + (trainer.within == "iter")
        run = engine.state if engine is not None else None
        again = self._at is not None and self._at[0] is run and self._at[1] == step
        self._runs = self._runs + 1 if again else 1
        self._at = run, step
        if self._runs == 1:
            return self._mode
        self._warn_once(mode := f"{self._mode}_{self._runs}", f"{self._runs} times at step {step}")
        return mode

    def _warn_once(self, mode: str, what: str) -> None:
        if mode not in self._named:
            self._named.add(mode)
            logger.warning(
                "the evaluator of %r ran %s: these metrics are logged under the mode %r, without the events "
                "of a validation; attach(evaluators={...}) with one evaluator for each data set names them",
                self._mode,
                what,
                mode,
            )

    def _validates(self, evaluator: Engine) -> HostedTrainer | None:
        """Return the trainer in a validation or test; an interrupted one goes on without `STARTED`."""
        if (trainer := self._trainer) is None:
            return None
        if not self._logs_as or (self._logs_as in MODES and trainer.mode == "train"):
            self._begin(evaluator)
        return trainer if self._logs_as in MODES else None

    def _begin_iter(self, evaluator: Engine) -> None:
        if (trainer := self._validates(evaluator)) is not None:
            trainer.begin_val_iter(evaluator.state.batch, _batch_idx(evaluator))

    def _end_iter(self, evaluator: Engine) -> None:
        if (trainer := self._validates(evaluator)) is not None:
            trainer.end_val_iter(outputs_of(evaluator.state.output), _batch_idx(evaluator))

    def _end(self, evaluator: Engine) -> None:
        mode, self._logs_as = self._logs_as, ""
        if not mode or (trainer := self._trainer) is None:
            return
        if mode not in MODES:
            numbers = numbers_of(evaluator.state.metrics)
            trainer.log(apart(numbers, trainer, "evaluated") if mode == "train" else numbers, mode=mode)
        elif trainer.mode == mode:
            trainer.end_val(read_numbers(evaluator.state.metrics))
            if trainer.stopping and (engine := self._engine()) is not None:
                engine.terminate()  # several ranks agree later: not all of them need evaluate


def outputs_of(output: Any) -> Any:
    """Return what an ignite engine's step returned, as a mapping: a single number is its "loss".

    None if it is neither a mapping nor a single number.
    """
    if isinstance(output, Mapping):
        return output
    return {"loss": output} if is_single(output) else None


def apart(numbers: Mapping[str, Any], trainer: HostedTrainer, prefix: str) -> dict[str, Any]:
    """Return numbers for the training's log, with a prefix for names that outputs of the steps have."""
    taken = trainer.outputs if isinstance(trainer.outputs, Mapping) else ()
    return {f"{prefix}/{name}" if name in taken else name: value for name, value in numbers.items()}


def _same_data(evaluator: Engine, engine: Engine) -> bool:
    """Return whether two engines read the same loader, or two loaders that give all samples of one data set.

    Loaders with samplers of the program's own may give two parts of one data set, such as a random split.
    """
    first, second = evaluator.state.dataloader, engine.state.dataloader
    if first is None or second is None:
        return False
    if first is second:
        return True
    if getattr(first, "dataset", first) is not getattr(second, "dataset", second):
        return False
    return _gives_all(first) and _gives_all(second)


def _gives_all(loader: object) -> bool:
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return type(getattr(loader, "sampler", None)) in _WHOLE
    return type(batches) is BatchSampler and type(batches.sampler) in _WHOLE


def _batch_idx(evaluator: Engine) -> int:
    state = evaluator.state
    return int((state.iteration - 1) % state.epoch_length) if state.epoch_length else int(state.iteration - 1)
