"""Run a callback of another engine in this engine's `Trainer`.

    Trainer(..., hooks=[Foreign(EarlyStopping("val/loss")), Foreign(mmengine_hook, priority="LOW")])

Each other engine (system) has a module here, its adapter, which is imported only for an object of that
system. `Adapter` defines the functions of such a module; `ADAPTERS` maps packages to modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from eventloop.bus import Bus
from eventloop.events.priority import Priority, get_priority
from eventloop.hooks.hook import Hook

ADAPTERS = {
    "lightning": "eventloop.bridges.lightning.foreign",
    "pytorch_lightning": "eventloop.bridges.lightning.foreign",
    "transformers": "eventloop.bridges.transformers.foreign",
    "ignite": "eventloop.bridges.ignite.foreign",
    "mmengine": "eventloop.bridges.mmengine.foreign",
}
"""The adapters by the package from which a callback's base class comes."""


class ForeignCall(NamedTuple):
    """Describe a subscription to the bus that calls one method of another engine's callback."""

    method: str
    """The callback's method, such as "on_validation_end"."""
    events: tuple[str, ...]
    fn: Callable[[Any, Any], object]
    """The handler, called as `fn(trainer, event)`."""
    priority: Priority | int | str | None = None
    """The priority that the callback has in its own system; None if that system has no priorities."""


class ForeignTrainer(Protocol):
    """Stand for our trainer as a trainer object of another system, which its callbacks read.

    It never trains: subscriptions copy our trainer's counters to it. A trainer has one for each system, and
    all callbacks of that system share it.
    """

    def calls(self, callback: Any) -> Iterable[ForeignCall]:
        """Return the subscriptions of one callback: one for each method that the callback defines."""

    def own_calls(self) -> Iterable[ForeignCall]:
        """Return the subscriptions that copy our trainer's counters to this object, each with a priority."""

    def state_dict(self, callback: Any) -> dict[str, Any]:
        """Return the state of one callback, as plain values and tensors."""

    def load_state_dict(self, callback: Any, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned into a callback."""


class Adapter(Protocol):
    """List the functions that the adapter module of a system defines, such as `lightning.foreign`."""

    SYSTEM: str
    """The name of the system in reports, such as "lightning"."""

    def check(self, callback: Any) -> None:
        """Refuse an object that is not a callback of the system, or that has no effect in our trainer.

        Raises:
            TypeError: the object is not a callback of the system.
            ValueError: the callback controls the loop of its own system.
        """

    def stateful(self, callback: Any) -> bool:
        """Return whether the callback has a state to save."""

    def build(self, trainer: Any, callbacks: Sequence[Any]) -> ForeignTrainer:
        """Create the trainer object of the system that its callbacks receive in place of our trainer.

        Raises:
            ValueError: a callback cannot serve this trainer.
        """


class Foreign(Hook):
    """Run a callback of Lightning, transformers, ignite or MMEngine in this trainer.

        Trainer(..., hooks=[Foreign(EarlyStopping("loss", patience=3)), Foreign(LearningRateMonitor())])

    Each method of the callback is one subscription in `print(trainer.bus)` and in the costs, with a name such
    as `EarlyStopping.on_validation_end (lightning)`. Checkpoints of this trainer contain the callback's
    state. The pages "Use it inside Lightning" and so on list the classes that work.

    Args:
        callback: an object of a class of the system, or of a subclass.
        priority: the priority of all its methods. None means the priority that it has in its own system, or
            NORMAL if that system has no priorities.
        name: the name of its state in checkpoints; None means its class and system. Two callbacks of one
            class need different names.

    Raises:
        TypeError: `callback` is a class, or not a callback of the four systems; or `name` is not a str.
        ValueError: the callback controls the loop of its own system, and has no effect here; or the priority
            is invalid.
        ImportError: the version of the system is too old.
    """

    can_start_over = False  # a fresh callback cannot be made: the program has constructed this one

    def __init__(
        self, callback: Any, *, priority: Priority | int | str | None = None, name: str | None = None
    ) -> None:
        if priority is not None:
            get_priority(priority)
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(
                f"name must be a str, the name of the callback's state in checkpoints, got {name!r}"
            )
        self._adapter = adapter_of(callback)
        self._adapter.check(callback)
        self.callback, self._priority = callback, priority
        self.system = self._adapter.SYSTEM
        qualified_name = getattr(callback, "__qualname__", type(callback).__qualname__)
        self._label = qualified_name.rsplit("<locals>.", 1)[-1]
        self.name = name or f"{self._label} ({self.system})"
        self._host: ForeignTrainer | None = None
        self._first = True  # whether it is the first callback of its system in the trainer's hooks

    def check(self, trainer: Any) -> None:
        """Build the trainer object that the callback receives; callbacks of one system share it.

        Raises:
            ValueError: an iteration of the trainer has several batches, and the callback counts batches.
        """
        if trainer.counting.accumulator is not None:
            raise ValueError(
                f'{self.name} receives each batch, and unit="update" makes an iteration of '
                f"{trainer.counting.batches_per_iter} batches: leave unit out"
            )
        siblings = [
            hook for hook in trainer.hooks if isinstance(hook, Foreign) and hook.system == self.system
        ]
        self._first = siblings[0] is self
        if self._first:
            self._host = self._adapter.build(trainer, [hook.callback for hook in siblings])
        else:
            self._host = siblings[0]._host

    def attach(self, bus: Bus) -> None:
        """Subscribe each method that the callback defines, each as a handler with a name of its own."""
        if self._host is None:
            raise RuntimeError(f"{self.name} belongs in hooks=[...] of a Trainer, which attaches it")
        if self._first:  # all callbacks of the system share the counters
            for call in self._host.own_calls():
                self._subscribe(bus, call, f"{call.method} ({self.system})", call.priority)
        for call in self._host.calls(self.callback):
            priority = self._priority if self._priority is not None else call.priority
            self._subscribe(bus, call, f"{self._label}.{call.method} ({self.system})", priority)

    def _subscribe(
        self, bus: Bus, call: ForeignCall, name: str, priority: Priority | int | str | None
    ) -> None:
        """Subscribe a handler of its own for each callback, so that reports have the name of each."""
        fn = call.fn

        def handler(trainer: Any, event: Any) -> None:
            fn(trainer, event)

        handler.__qualname__ = handler.__name__ = name  # the bus numbers names that occur twice
        bus.subscribe(handler, *call.events, priority=Priority.NORMAL if priority is None else priority)

    @property
    def stateful(self) -> bool:
        """True when the callback has a state to save."""
        return self._adapter.stateful(self.callback)

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state."""
        return {} if self._host is None else self._host.state_dict(self.callback)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the callback's state."""
        if self._host is not None:
            self._host.load_state_dict(self.callback, state)


def adapter_of(callback: object) -> Adapter:
    """Return the adapter of the system from which an object's class comes.

    Raises:
        TypeError: the object is a class, or comes from none of the systems.
    """
    if isinstance(callback, type):
        raise TypeError(
            f"Foreign takes a callback object, got the class {callback.__name__}: write "
            f"Foreign({callback.__name__}(...))"
        )
    if isinstance(callback, Hook):
        raise TypeError(
            f"Foreign takes a callback of another engine, got {type(callback).__name__}, which is a hook of "
            "this one: put it in hooks=[...] itself"
        )
    for base in type(callback).__mro__:
        module = ADAPTERS.get(base.__module__.partition(".")[0])
        if module is not None:
            return cast(Adapter, import_module(module))
    raise TypeError(
        "Foreign takes a callback of lightning, pytorch_lightning, transformers, ignite or mmengine, got "
        f"{callback!r}, whose class has no base class there"
    )
