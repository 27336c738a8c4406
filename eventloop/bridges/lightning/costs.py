"""Measure the callbacks, module hooks and loggers of a Lightning trainer, through its profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from threading import RLock
from time import perf_counter
from typing import Any, Literal

from eventloop.bridges.driven import DrivenTrainer
from eventloop.bridges.lightning.methods import base_of
from eventloop.bridges.row_names import RowNames
from eventloop.costs.timing import Timing
from eventloop.costs.waits import Wait

IN_ITERATION = frozenset(
    {
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_before_batch_transfer",
        "transfer_batch_to_device",
        "on_after_batch_transfer",
        "lr_scheduler_step",
        "log_metrics",
    }
)
"""The methods of callbacks, modules and loggers that Lightning calls within a training iteration."""
PHASES: dict[tuple[str, str], Literal["backward", "optimizer", ""]] = {
    ("Strategy", "training_step"): "",
    ("Strategy", "backward"): "backward",
    ("LightningModule", "optimizer_step"): "optimizer",
    ("LightningModule", "optimizer_zero_grad"): "optimizer",
}
"""The profiler's actions, as (kind, method), that are phases of an iteration; "" is the forward pass."""
NO_ROWS = ("training_step", "backward", "validation_step", "test_step", "configure_callbacks")
"""The methods of modules that get no row in the costs, because they do the work of the training itself."""
LOGGER_METHODS = ("log_metrics", "log_hyperparams", "save")
NEXT_BATCH = "train_dataloader_next"
"""The profiler's action in which Lightning waits for a training batch."""


class HostCosts:
    """Measure the calls that one Lightning trainer reports to its profiler as named actions.

    The user's profiler object stays and still works: its methods `start`, `stop` and `profile` are wrapped
    until the end of the run.
    """

    def __init__(self) -> None:
        self.driven: DrivenTrainer | None = None
        self.under_way: list[list[float]] = []
        """The running actions, the outermost first.

        Each entry has the action's start on `perf_counter`, and the seconds within the action that are
        already charged to a phase.
        """
        self._rows: dict[str, Row] = {}
        self._actions = Actions(self._make_action)
        self._native: Any = None
        self._bridge: Any = None
        self._names = RowNames()
        self._ambiguous: set[str] = set()
        """The state keys that several callbacks share. An action's name has only the callback's key."""

    def attach(self, driven: DrivenTrainer) -> None:
        """Charge calls to the phases of a trainer's iterations, and add the rows to that trainer's costs."""
        self.detach()
        self.driven = driven
        driven.clock.waits.watchers.append(self._exclude)
        for row in self._rows.values():
            self._add_to_costs(row)

    def detach(self) -> None:
        """Stop charging calls to the phases of the trainer's iterations."""
        if self.driven is not None:
            self.driven.clock.waits.watchers.remove(self._exclude)
        self.driven = None

    def _exclude(self, wait: Wait) -> None:
        """Do not charge a wait to the phase of the call under way."""
        if self.under_way:
            self.under_way[-1][1] += wait.seconds

    @contextmanager
    def installed(self, native: Any, bridge: Any) -> Iterator[None]:
        """Measure the Lightning trainer's callbacks, except the bridge, until the block ends."""
        self._native, self._bridge, self._names = native, bridge, RowNames()
        self._actions.clear()
        self.under_way.clear()
        profiler = native.profiler
        with ExitStack() as during:
            if _passes_through(profiler):  # else each action would cost a generator of `Profiler.profile`
                during.enter_context(replaced(profiler, "profile", lambda _: self._actions.__getitem__))
            during.enter_context(replaced(profiler, "start", self._wrap_start))
            during.enter_context(replaced(profiler, "stop", self._wrap_stop))
            for owner, method in [
                *self._methods_with_ambiguous_actions(native.callbacks),
                *_logger_methods(native.loggers),
            ]:
                during.enter_context(replaced(owner, method, self._measure(owner, method)))
            yield
        self._native = self._bridge = None

    def in_training_epoch(self) -> bool:
        """Return whether a training epoch is under way, outside of validations."""
        driven = self.driven
        return driven is not None and driven.passing is not None and driven.metrics.inside.mode == "train"

    def _wrap_start(self, start: Callable[[str], Any]) -> Callable[[str], Any]:
        """Wrap the profiler's `start` to begin measuring an action after it."""

        def start_measured(action_name: str) -> Any:
            """Call `start`, and then begin to measure, without the profiler's own time."""
            result = start(action_name)
            if (action := self._actions[action_name]) is not NOTHING:
                action.__enter__()
            return result

        return start_measured

    def _wrap_stop(self, stop: Callable[[str], Any]) -> Callable[[str], Any]:
        """Wrap the profiler's `stop` to end measuring an action before it."""

        def stop_measured(action_name: str) -> Any:
            """End the measurement of the action, and then call `stop`."""
            if (action := self._actions[action_name]) is not NOTHING:
                with suppress(IndexError):  # an action started before the profiler's methods were replaced
                    action.__exit__()
            return stop(action_name)

        return stop_measured

    def _methods_with_ambiguous_actions(self, callbacks: Sequence[Any]) -> list[tuple[Any, str]]:
        """Return (callback, method) for each method of callbacks whose profiler actions have equal names.

        An action is named by the callback's `state_key`, which by default is the name of its class. The keys
        that several callbacks share are stored in `_ambiguous`.
        """
        measured = {id(callback): callback for callback in callbacks if callback is not self._bridge}.values()
        for callback in measured:  # callbacks of one class get numbers in the order of this list
            self._names.of(callback, type(callback).__name__)
        counts = Counter(callback.state_key for callback in measured)
        self._ambiguous = {key for key, count in counts.items() if count > 1}
        return [
            (callback, method)
            for callback in measured
            if callback.state_key in self._ambiguous
            for method in dir(base_of(callback))
            if method.startswith(("on_", "setup", "teardown")) and _defines(callback, method, "Callback")
        ]

    def _measure(self, owner: Any, method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator, for `replaced`, that measures a method of a callback or logger."""
        row = self._row(f"{self._names.of(owner, type(owner).__name__)}.{method}", method)

        def measured(fn: Callable[..., Any]) -> Callable[..., Any]:
            """Wrap a method so that the row measures each call."""

            @wraps(fn)
            def call(*args: Any, **kwargs: Any) -> Any:
                with row:
                    return fn(*args, **kwargs)

            return call

        return measured

    # --- names ---------------------------------------------------------------------------------------------

    def _make_action(self, name: str) -> Any:
        """Create the context manager that measures a profiler's action, such as `[Callback]Timer.setup`."""
        kind, _, rest = name.removeprefix("[").partition("]")
        owner, _, method = rest.rpartition(".")
        if method == NEXT_BATCH:
            return NextBatch(self)
        if (kind, method) in PHASES:
            return Phase(self, PHASES[kind, method])
        if kind not in ("Callback", "LightningModule", "LightningDataModule") or method in NO_ROWS:
            return NOTHING
        label = self._label(kind, owner, method)
        return NOTHING if label is None else self._row(f"{label}.{method}", method)

    def _label(self, kind: str, owner: str, method: str) -> str | None:
        """Return the owner's name in reports, or None if the action gets no row.

        The bridge's methods get none, nor does a method that the owner inherits from Lightning, nor an action
        whose name several callbacks share.
        """
        native = self._native
        if kind == "Callback":
            target = next((callback for callback in native.callbacks if callback.state_key == owner), None)
            if target is self._bridge or owner in self._ambiguous:
                return None
        else:
            target = native.lightning_module if kind == "LightningModule" else native.datamodule
        if target is None:
            return owner
        return self._names.of(target, type(target).__name__) if _defines(target, method, kind) else None

    def _row(self, name: str, method: str) -> Row:
        """Return the row of a callback's method, and add a new one to the costs."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = Row(self, name, method)
            self._add_to_costs(row)
        return row

    def _add_to_costs(self, row: Row) -> None:
        if self.driven is not None and not row.in_costs:
            row.in_costs = True
            self.driven.foreign_calls.add_row(row.name, row.method, row.timing, in_iteration=row.in_iteration)


class Actions(dict[str, Any]):
    """Map the name of a profiler's action to the context manager that measures it, created at its first use.

    Lightning looks up some thirty actions in each batch, and a dict lookup is faster than a method call.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Any:
        action = self[name] = self._make(name)
        return action


NOTHING = RLock()
"""The context manager of an action that is not measured, such as a hook that no class defines.

Each batch enters some twenty such actions. A lock that no other thread uses is the cheapest context manager,
because it runs no Python code.
"""


class Row:
    """Measure an action that has a row in the costs, as a context manager."""

    def __init__(self, costs: HostCosts, name: str, method: str) -> None:
        self.name, self.method, self.timing = name, method, Timing()
        self.in_iteration = method in IN_ITERATION
        self.in_costs = False
        self._costs = costs

    def __enter__(self) -> None:
        self._costs.under_way.append([perf_counter(), 0.0])

    def __exit__(self, *_: object) -> None:
        """Add the call to the row, and charge its seconds to the iteration, without those of inner calls."""
        costs = self._costs
        began, charged = costs.under_way.pop()
        seconds = perf_counter() - began
        self.timing.add(seconds)
        if costs.driven is None or not costs.in_training_epoch():
            return
        if self.in_iteration:
            costs.driven.clock.charge("hooks", seconds - charged)
            if costs.under_way:  # the outer action does not charge these seconds again
                costs.under_way[-1][1] += seconds
        elif not costs.under_way:  # runs between two iterations, so it is no part of the next one's time
            costs.driven.clock.exclude(seconds - charged)


class Phase:
    """Charge the time of an action to a phase of the iteration, as a context manager."""

    def __init__(self, costs: HostCosts, phase: Literal["backward", "optimizer", ""]) -> None:
        self._costs, self._phase = costs, phase

    def __enter__(self) -> None:
        self._costs.under_way.append([perf_counter(), 0.0])

    def __exit__(self, *_: object) -> None:
        """Charge the seconds of the action to the phase, without those that inner actions have charged."""
        costs, phase = self._costs, self._phase
        began, charged = costs.under_way.pop()
        seconds = perf_counter() - began
        if phase and costs.driven is not None and costs.in_training_epoch():
            costs.driven.clock.charge(phase, seconds - charged)
        if costs.under_way:  # the outer action does not charge these seconds again
            costs.under_way[-1][1] += seconds


class NextBatch:
    """Begin the phase `data` when Lightning begins to wait for a batch, as a context manager."""

    def __init__(self, costs: HostCosts) -> None:
        self._costs = costs

    def __enter__(self) -> None:
        if self._costs.driven is not None:
            self._costs.driven.clock.begin_data()

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def replaced(owner: Any, method: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a bound method of one object by `by(method)` until the block ends; its class stays as it is."""
    attributes = vars(owner)
    was_on_object, original = method in attributes, getattr(owner, method)
    attributes[method] = by(original)
    try:
        yield
    finally:
        if was_on_object:
            attributes[method] = original
        else:
            attributes.pop(method, None)


def followed_by(then: Callable[[], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator, for `replaced`, that calls `then()` after each call that raises no error."""

    def wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to call `then` after it, not after an error."""

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            then()
            return result

        return call

    return wrapper


def _passes_through(profiler: Any) -> bool:
    """Return whether the profiler is Lightning's default, which records nothing."""
    return type(profiler).__qualname__ == "PassThroughProfiler" and "profile" not in vars(type(profiler))


def _defines(owner: Any, method: str, kind: str) -> bool:
    """Return whether an object or its class overrides a hook of Lightning."""
    if method in vars(owner):  # a LambdaCallback has its methods on the object
        return True
    definer = next((cls for cls in type(owner).__mro__ if method in vars(cls)), None)
    if definer is None:
        return False
    if kind == "Callback":
        return not (definer.__qualname__ == "Callback" and _is_of_lightning(definer))
    return not _is_of_lightning(definer)


def _is_of_lightning(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _logger_methods(loggers: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return (logger, method) for each method of loggers to measure. The profiler has no actions for them."""
    return [(logger, method) for logger in loggers for method in LOGGER_METHODS]
