"""The catalogue of events: immutable, encodable facts about a run.

An event holds numbers, strings, paths and bytes, never a live object, so it can cross a thread, a process,
a file or a network. Counters follow MMEngine: `iter` is the 0-based index of the current train iteration and
`epoch` of the current epoch. In `after_train_iter` both name what just ran; in `after_train_epoch` `epoch` is
the one just run and `iter` the next one; in a validation after an epoch `epoch` counts the completed epochs.
`step` is the number of completed train iterations.

    before_run
      before_train
        before_train_epoch
          before_train_iter -> forward -> after_train_iter     (per batch; within it, from the optimizer hook:
          ...                             after_backward, before_optimizer_step, after_optimizer_step)
        after_train_epoch
        before_val  before_val_epoch  (before_val_iter  after_val_iter) ...  after_val_epoch  after_val
      after_train
    after_run

Subclassing `Event` declares a new event, at once usable by its snake_case name. A field whose type is that of
live objects, a tensor, an array or a module, is refused there:

    class LunchServed(Event):
        dish: str

    @bus.on("lunch_served")
    def eat(event): ...
"""

from __future__ import annotations

from typing import ClassVar, Literal

from eventloop.events.base import Counter, Event

Mode = Literal["train", "val", "test"]
COMPLETED = "completed"
"""The `reason` of a closing event whose phase ran to its end."""


class _LoopEvent(Event, kw_only=True):
    """The counters every event of the loop carries; see the module's docstring for what each means where."""

    iter: int = 0
    epoch: int = 0
    max_iters: int | None = None
    max_epochs: int | None = None


class _TrainEvent(_LoopEvent, kw_only=True):
    mode: ClassVar[Mode] = "train"


class _ValEvent(_LoopEvent, kw_only=True):
    mode: ClassVar[Mode] = "val"


class _TestEvent(_LoopEvent, kw_only=True):
    mode: ClassVar[Mode] = "test"


# --- run ---------------------------------------------------------------------------------------------------


class BeforeRun(_LoopEvent, kw_only=True):
    """A call of `train`, `val`, `test` or `run` begins."""


class AfterRun(_LoopEvent, kw_only=True):
    """The call ends, however it ends: `reason` says why, `error` is the exception as text, or None."""

    reason: str = COMPLETED
    error: str | None = None


# --- phases ------------------------------------------------------------------------------------------------


class BeforeTrain(_TrainEvent, kw_only=True):
    """Training begins, after a checkpoint was loaded."""


class AfterTrain(_TrainEvent, kw_only=True):
    """Training ends: `reason` is "completed", the reason given to `trainer.stop`, or "error"."""

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


# --- epochs ------------------------------------------------------------------------------------------------


class BeforeTrainEpoch(_TrainEvent, kw_only=True):
    """An epoch of training begins. An iteration-based run is one epoch, as in MMEngine."""

    counter: ClassVar[Counter] = "epoch"


class AfterTrainEpoch(_TrainEvent, kw_only=True):
    """The epoch ends. An epoch that was cut short has another `reason` and is not counted."""

    counter: ClassVar[Counter] = "epoch"
    reason: str = COMPLETED


class BeforeValEpoch(_ValEvent, kw_only=True):
    """The pass over the validation loader begins."""

    counter: ClassVar[Counter] = "val_epoch"


class AfterValEpoch(_ValEvent, kw_only=True):
    """The pass ends. `metrics` is empty unless `reason` is "completed": half a validation has no score."""

    counter: ClassVar[Counter] = "val_epoch"
    metrics: dict[str, float] = {}
    reason: str = COMPLETED


class BeforeTestEpoch(_TestEvent, kw_only=True):
    """The pass over the test loader begins."""

    counter: ClassVar[Counter] = "val_epoch"


class AfterTestEpoch(_TestEvent, kw_only=True):
    """The pass ends, with the metrics of the test."""

    counter: ClassVar[Counter] = "val_epoch"
    metrics: dict[str, float] = {}
    reason: str = COMPLETED


# --- iterations --------------------------------------------------------------------------------------------


class BeforeTrainIter(_TrainEvent, kw_only=True):
    """A batch is on the device (`trainer.batch`); raise `SkipIteration` to skip it."""

    counter: ClassVar[Counter] = "iter"
    batch_idx: int = 0


class AfterTrainIter(_TrainEvent, kw_only=True):
    """The forward pass is done (`trainer.outputs`); the optimizer hook does the rest at priority 30."""

    counter: ClassVar[Counter] = "iter"
    batch_idx: int = 0


class BeforeValIter(_ValEvent, kw_only=True):
    """A validation batch is on the device."""

    counter: ClassVar[Counter] = "batch"
    batch_idx: int = 0


class AfterValIter(_ValEvent, kw_only=True):
    """A validation batch was run."""

    counter: ClassVar[Counter] = "batch"
    batch_idx: int = 0


class BeforeTestIter(_TestEvent, kw_only=True):
    """A test batch is on the device."""

    counter: ClassVar[Counter] = "batch"
    batch_idx: int = 0


class AfterTestIter(_TestEvent, kw_only=True):
    """A test batch was run."""

    counter: ClassVar[Counter] = "batch"
    batch_idx: int = 0


# --- the optimizer's step ----------------------------------------------------------------------------------


class AfterBackward(_TrainEvent, kw_only=True):
    """Gradients are there, not yet clipped."""

    counter: ClassVar[Counter] = "iter"


class BeforeOptimizerStep(_TrainEvent, kw_only=True):
    """Gradients are clipped; the parameters are about to change."""

    counter: ClassVar[Counter] = "iter"


class AfterOptimizerStep(_TrainEvent, kw_only=True):
    """The parameters have changed."""

    counter: ClassVar[Counter] = "iter"


class OptimizerStepSkipped(_TrainEvent, kw_only=True):
    """No step was made, for `reason`; schedulers that count iterations do not advance."""

    counter: ClassVar[Counter] = "iter"
    reason: str = ""


# --- checkpoints -------------------------------------------------------------------------------------------


class BeforeSaveCheckpoint(_LoopEvent, kw_only=True):
    """On all ranks: `trainer.checkpoint` is the mapping about to be saved; handlers may change it."""

    path: str = ""


class CheckpointSaved(_LoopEvent, kw_only=True):
    """The bytes are durable at `path`. `seconds` runs from the snapshot to the last fsync."""

    path: str = ""
    bytes: int = 0
    seconds: float = 0.0


class CheckpointFailed(_LoopEvent, kw_only=True):
    """Nothing was saved at `path`, and nothing older was removed."""

    path: str = ""
    seconds: float = 0.0
    error: str = ""


class AfterLoadCheckpoint(_LoopEvent, kw_only=True):
    """`trainer.checkpoint` was read from `path`. Nothing is loaded yet, and handlers may change it."""

    path: str = ""


# --- logging (made on the background side, where a value on a device may be waited for) --------------------


class _LogEvent(_LoopEvent, kw_only=True):
    background_born: ClassVar[bool] = True
    mode: str = "train"
    step: int = 0


class ScalarsLogged(_LogEvent, kw_only=True):
    """Numbers of one iteration, or their means over the logging interval that ends with it."""

    scalars: dict[str, float] = {}


class ImageLogged(_LogEvent, kw_only=True):
    """`data` is the image's bytes, C order, of `shape` (height, width, channels) and numpy `dtype`."""

    name: str = ""
    data: bytes = b""
    shape: tuple[int, ...] = ()
    dtype: str = "uint8"


class HistogramLogged(_LogEvent, kw_only=True):
    """`data` is the values' bytes, C order, of `shape` and numpy `dtype`."""

    name: str = ""
    data: bytes = b""
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


class TextLogged(_LogEvent, kw_only=True):
    """A text under a name."""

    name: str = ""
    text: str = ""


class RunInfo(_LogEvent, kw_only=True):
    """What the run is: model, seed, versions, plan. Written once, at its start."""

    info: dict[str, str] = {}


# --- control and health ------------------------------------------------------------------------------------


class StopRequested(_LoopEvent, kw_only=True):
    """The run was asked to stop, as by `trainer.stop(reason)`. It ends at this iteration boundary."""

    reason: str = ""


class PreemptionRequested(_LoopEvent, kw_only=True):
    """A signal asks the run to end soon."""

    reason: str = ""


class HandlerFailed(Event, kw_only=True):
    """A background subscriber raised, or spent longer than its `stall_timeout` on one delivery (`cost`,
    seconds). `count` is how often it has failed; `error` the exception as text.
    """

    handler: str = ""
    error: str = ""
    count: int = 0
    cost: float = 0.0


class EventsDropped(Event, kw_only=True):
    """A subscriber's queue was full: `count` events were dropped since the last such report."""

    handler: str = ""
    count: int = 0


class SlowHandler(Event, kw_only=True):
    """A handler exceeds its `budget_us`: `cost` is the p99 of its calls in seconds, `count` how many were
    sampled. Told once a handler.
    """

    handler: str = ""
    count: int = 0
    cost: float = 0.0
