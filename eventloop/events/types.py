"""Define the events of a run, as immutable records that can be encoded.

An event holds numbers, strings, paths and bytes, never a live object such as a tensor, so that it can be sent
to another thread or process. Counters follow MMEngine: `iter` and `epoch` are the 0-based indices of the
current train iteration and epoch. In `after_train_iter` both are those of the completed iteration. In
`after_train_epoch`, `epoch` is the completed epoch and `iter` the next iteration. In a validation after an
epoch, `epoch` is the number of completed epochs. `step` is the number of completed train iterations.

    before_run
      before_train
        before_train_epoch
          before_train_iter -> forward -> after_train_iter     (per batch; within it, from the optimizer hook:
          ...                             after_backward, before_optimizer_step, after_optimizer_step)
        after_train_epoch
        before_val  before_val_epoch  (before_val_iter  after_val_iter) ...  after_val_epoch  after_val
      after_train
    after_run

A subclass of `Event` is a new event, and handlers subscribe to it by its snake_case name. A class with a
field for a tensor, an array or a module is refused when it is defined.

    class LunchServed(Event):
        dish: str

    @bus.on("lunch_served")
    def eat(event): ...
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from eventloop.events.base import Counter, Event

Mode = Literal["train", "val", "test", "predict"]
COMPLETED = "completed"
"""The `reason` of a closing event, such as `after_train`, whose phase reached its end."""
BY_COMMAND = "command"
"""The `reason` of a complete validation by the command `validate`: hooks that compare scores ignore it."""


class _LoopEvent(Event, kw_only=True):
    """The base class of events with the counters of the loop, which the module docstring explains."""

    iter: int = 0
    epoch: int = 0
    max_iters: int | None = None
    max_epochs: int | None = None


class _TrainEvent(_LoopEvent, kw_only=True):
    mode: ClassVar[Mode] = "train"


class _IterEvent(_TrainEvent, kw_only=True):
    counter: ClassVar[Counter] = "iter"


class _ValEvent(_LoopEvent, kw_only=True):
    mode: ClassVar[Mode] = "val"


class _TestEvent(_LoopEvent, kw_only=True):
    mode: ClassVar[Mode] = "test"


class _PredictEvent(_LoopEvent, kw_only=True):
    mode: ClassVar[Mode] = "predict"


class _ValIter(_ValEvent, kw_only=True):
    counter: ClassVar[Counter] = "batch"
    batch_idx: int = 0
    loader: str = ""


class _TestIter(_TestEvent, kw_only=True):
    counter: ClassVar[Counter] = "batch"
    batch_idx: int = 0
    loader: str = ""


class _PredictIter(_PredictEvent, kw_only=True):
    counter: ClassVar[Counter] = "batch"
    batch_idx: int = 0


# --- run ---------------------------------------------------------------------------------------------------


class BeforeRun(_LoopEvent, kw_only=True):
    """A call of `train`, `val`, `test`, `run` or `predict` begins."""


class AfterRun(_LoopEvent, kw_only=True):
    """A call of `train`, `val`, `test`, `run` or `predict` has ended, and `reason` says why.

    `error` is the text of the exception that ended it, or None. `signal` is the name of the signal that ended
    it, such as "SIGTERM", or None; any rank may have received the signal.
    """

    reason: str = COMPLETED
    error: str | None = None
    signal: str | None = None


# --- phases ------------------------------------------------------------------------------------------------


class BeforeTrain(_TrainEvent, kw_only=True):
    """Training begins. In a resumed run the checkpoint was loaded before."""


class AfterTrain(_TrainEvent, kw_only=True):
    """Training ends: `reason` is "completed", the reason given to `trainer.stop`, "rollback" or "error"."""

    reason: str = COMPLETED


class BeforeVal(_ValEvent, kw_only=True):
    """A validation begins."""


class AfterVal(_ValEvent, kw_only=True):
    """A validation ends, with the metrics of `after_val_epoch`."""

    reason: str = COMPLETED
    metrics: dict[str, float] = {}


class BeforeTest(_TestEvent, kw_only=True):
    """A test begins."""


class AfterTest(_TestEvent, kw_only=True):
    """A test ends, with the metrics of `after_test_epoch`."""

    reason: str = COMPLETED
    metrics: dict[str, float] = {}


class BeforePredict(_PredictEvent, kw_only=True):
    """A prediction begins."""


class AfterPredict(_PredictEvent, kw_only=True):
    """A prediction ends."""

    reason: str = COMPLETED


# --- epochs ------------------------------------------------------------------------------------------------


class BeforeTrainEpoch(_TrainEvent, kw_only=True):
    """An epoch of training begins. An iteration-based run is one epoch, as in MMEngine."""

    counter: ClassVar[Counter] = "epoch"


class AfterTrainEpoch(_TrainEvent, kw_only=True):
    """An epoch of training ends. If it was cut short, `reason` says why, and the epoch is not counted."""

    counter: ClassVar[Counter] = "epoch"
    reason: str = COMPLETED


class BeforeValEpoch(_ValEvent, kw_only=True):
    """A pass over the validation loaders begins: one, or several one after the other."""

    counter: ClassVar[Counter] = "val_epoch"


class AfterValEpoch(_ValEvent, kw_only=True):
    """A pass over the validation loaders ends. It has `metrics` if `reason` is "completed" or "command"."""

    counter: ClassVar[Counter] = "val_epoch"
    metrics: dict[str, float] = {}
    reason: str = COMPLETED


class BeforeTestEpoch(_TestEvent, kw_only=True):
    """A pass over the test loaders begins: one, or several one after the other."""

    counter: ClassVar[Counter] = "val_epoch"


class AfterTestEpoch(_TestEvent, kw_only=True):
    """A pass over the test loaders ends, with the metrics of the test."""

    counter: ClassVar[Counter] = "val_epoch"
    metrics: dict[str, float] = {}
    reason: str = COMPLETED


# --- iterations --------------------------------------------------------------------------------------------


class BeforeTrainIter(_IterEvent, kw_only=True):
    """A batch is on the device (`trainer.batch`); raise `SkipIteration` to skip it."""

    batch_idx: int = 0


class AfterTrainIter(_IterEvent, kw_only=True):
    """The forward pass is done (`trainer.outputs`); at priority 30 the optimizer hook makes its step."""

    batch_idx: int = 0


class BeforeValIter(_ValIter, kw_only=True):
    """A validation batch is on the device; `loader` names its loader if there are several (`NAME/loss`)."""


class AfterValIter(_ValIter, kw_only=True):
    """A validation batch was run; `loader` names its loader if there are several (`NAME/loss`)."""


class BeforeTestIter(_TestIter, kw_only=True):
    """A test batch is on the device; `loader` names its loader if there are several (`NAME/loss`)."""


class AfterTestIter(_TestIter, kw_only=True):
    """A test batch was run; `loader` names its loader if there are several (`NAME/loss`)."""


class BeforePredictIter(_PredictIter, kw_only=True):
    """A batch of a prediction is on the device."""


class AfterPredictIter(_PredictIter, kw_only=True):
    """A batch of a prediction was run (`trainer.outputs`)."""


class BatchPredicted(_PredictIter, kw_only=True):
    """The outputs of a batch: `outputs_of(event)` decodes `data`; `indices` are the samples' positions."""

    indices: tuple[int, ...] = ()
    data: bytes = b""


# --- the optimizer's step ----------------------------------------------------------------------------------


class AfterBackward(_IterEvent, kw_only=True):
    """The backward pass is done; the gradients are not clipped yet."""


class BeforeOptimizerStep(_IterEvent, kw_only=True):
    """The gradients are clipped; the optimizer is about to change the parameters."""


class AfterOptimizerStep(_IterEvent, kw_only=True):
    """The optimizer has changed the parameters."""


class OptimizerStepSkipped(_IterEvent, kw_only=True):
    """The optimizer made no step, for `reason`. Schedulers that count iterations do not advance."""

    reason: str = ""


# --- checkpoints -------------------------------------------------------------------------------------------


class BeforeSaveCheckpoint(_LoopEvent, kw_only=True):
    """`trainer.checkpoint` is about to be saved. Handlers may change this mapping. Emitted on all ranks."""

    path: str = ""


class CheckpointSaved(_LoopEvent, kw_only=True):
    """A checkpoint is durable at `path`. `seconds` is the time from the snapshot to the last fsync."""

    path: str = ""
    bytes: int = 0
    seconds: float = 0.0


class CheckpointFailed(_LoopEvent, kw_only=True):
    """A checkpoint could not be saved at `path`, and no older one was removed."""

    path: str = ""
    seconds: float = 0.0
    error: str = ""


class AfterLoadCheckpoint(_LoopEvent, kw_only=True):
    """`trainer.checkpoint` was read from `path`. Nothing is loaded yet, and handlers may change it."""

    path: str = ""


# --- logging (created in the background, which may wait for values on a device) ----------------------------


class _LogEvent(_LoopEvent, kw_only=True):
    background_born: ClassVar[bool] = True
    mode: str = "train"
    step: int = 0


class ScalarsLogged(_LogEvent, kw_only=True):
    """Numbers of one iteration, or their means over the logging interval that ends with it."""

    scalars: dict[str, float] = {}


class ImageLogged(_LogEvent, kw_only=True):
    """An image. `data` is its bytes in C order, of `shape` (height, width, channels) and numpy `dtype`."""

    name: str = ""
    data: bytes = b""
    shape: tuple[int, ...] = ()
    dtype: str = "uint8"


class HistogramLogged(_LogEvent, kw_only=True):
    """The values for a histogram. `data` is their bytes in C order, of `shape` and numpy `dtype`."""

    name: str = ""
    data: bytes = b""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


class TextLogged(_LogEvent, kw_only=True):
    """A text that was logged under a name."""

    name: str = ""
    text: str = ""


class RunInfo(_LogEvent, kw_only=True):
    """Facts of the run, its `Trainer(config=...)` and its parts' options. Emitted once, when it starts."""

    info: dict[str, str] = {}
    config: dict[str, Any] = {}
    options: dict[str, Any] = {}


# --- a run that is steered --------------------------------------------------------------------------------


class CommandApplied(_LoopEvent, kw_only=True):
    """A command was applied at this iteration boundary, on all ranks.

    `source` says who sent it, such as "anna@login1" for `eventloop tell`. `result` is what the command
    returned, such as the path of a checkpoint.
    """

    command: str = ""
    arguments: dict[str, Any] = {}
    source: str = ""
    result: dict[str, Any] = {}


class CommandRefused(_LoopEvent, kw_only=True):
    """A command was refused, for `reason`, and no part of it was applied."""

    command: str = ""
    arguments: dict[str, Any] = {}
    source: str = ""
    reason: str = ""


class CheckpointEvaluated(_LoopEvent, kw_only=True):
    """Another process has validated the checkpoint at `path`, with these `metrics`.

    The counters are those of the checkpoint, not those of the training at this moment.
    """

    path: str = ""
    metrics: dict[str, float] = {}


class RolledBack(_LoopEvent, kw_only=True):
    """The run went back to the checkpoint at `path`, for `reason`, and skips `skipped` batches from there.

    The counters are those of the checkpoint.
    """

    path: str = ""
    reason: str = ""
    skipped: int = 0


# --- control ----------------------------------------------------------------------------------------------


class StopRequested(_LoopEvent, kw_only=True):
    """The run was asked to stop, as by `trainer.stop(reason)`. It ends at this iteration boundary."""

    reason: str = ""


class PreemptionRequested(_LoopEvent, kw_only=True):
    """The process received a signal that asks it to end, and the run will stop at an iteration boundary."""

    reason: str = ""
