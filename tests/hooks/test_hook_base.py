"""The base class: which methods subscribe, where, and which are refused."""

from __future__ import annotations

from typing import Any, cast

import pytest

from eventloop import Priority, Trainer, hooks
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterValIter, BeforeTrainIter, Event
from eventloop.events.base import known_events
from eventloop.hooks import Hook, TestHook, on
from tests.support.internals import substitute


def define(**namespace: Any) -> type[Hook]:
    """A hook class with these attributes."""
    return type("MyHook", (Hook,), namespace)


def nothing(self: Hook, trainer: Any, event: Any) -> None:
    """A method that does nothing."""


def test_only_overridden_points_subscribe(bus: Bus) -> None:
    """A hook is subscribed to what its class, a base class or a mixin overrides, and the rest costs nothing."""

    class Mixin:
        def before_train(self, trainer: Trainer, event: Event) -> None: ...

    class Base(Hook):
        def after_train(self, trainer: Trainer, event: Event) -> None: ...

    class Derived(Mixin, Base):
        def compute(self) -> None: ...

        def _after_something(self) -> None: ...

    define()().attach(bus)
    assert bus.stats() == []
    Derived().attach(bus)

    assert {s.event for s in bus.stats()} == {"before_train", "after_train"}
    assert not bus.wants(BeforeTrainIter)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("after_trian_iter", "did you mean 'after_train_iter'"),
        ("before_vla_epoch", "did you mean 'before_val_epoch'"),
        ("befor_train_iter", "did you mean 'before_train_iter'"),
        ("after_epochs", "did you mean 'after_epoch'"),
        ("aftertrain_epoch", "did you mean 'after_train_epoch'"),
        # of Lightning, torchtnt, Keras and Transformers, which would never be called
        ("on_train_batch_end", r"define after_train_iter\(self, trainer, event\)"),
        ("on_train_epoch_start", "define before_train_epoch"),
        ("on_validation_epoch_end", "define after_val_epoch"),
        ("on_test_batch_start", "define before_test_iter"),
        ("on_fit_end", "define after_run"),
        ("on_step_end", "define after_train_iter"),
        ("on_epoch_begin", "define before_epoch"),
        ("on_after_backward", "define after_backward"),
        ("on_before_optimizer_step", "define before_optimizer_step"),
        ("on_save_checkpoint", "define before_save_checkpoint"),
    ],
)
def test_misspelled_point_is_refused_where_it_is_defined(method: str, message: str) -> None:
    """A method that looks like an event and is none raises at the class statement, with the name to use."""
    with pytest.raises(TypeError, match=rf"MyHook\.{method} is not an event.*: {message}"):
        define(**{method: nothing})


@pytest.mark.parametrize("helper", ["on_start", "on_device", "on_upload_end", "on_rank_start"])
def test_a_helper_may_begin_with_on(helper: str, bus: Bus) -> None:
    """A name that stands for no point is the author's own."""
    define(**{helper: nothing})().attach(bus)

    assert bus.stats() == []


@pytest.mark.parametrize("name", hooks.__all__)
def test_each_own_hook_can_be_subclassed(name: str) -> None:
    """The methods of eventloop's own hooks have the names of events or of none, as those of a user's hook."""
    cls = getattr(hooks, name)
    if isinstance(cls, type) and issubclass(cls, Hook):
        mine = type("Mine", (cls,), {})

        assert vars(mine)["_points"] == vars(cls).get("_points", {})


def test_events_of_others_change_no_hook_of_eventloop(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A declared event may have any name: one that is, or is near, a method of a hook that is no point neither refuses
    the hook nor subscribes the method, in a subclass of theirs as well."""
    substitute(monkeypatch, "base._BY_NAME", {name: [*known] for name, known in known_events().items()})
    for name in ("Tick", "Toc", "Settings", "StateDict"):
        type(name, (Event,), {"__module__": __name__})

    class Mine(TestHook):
        def state_dict(self) -> dict[str, Any]:
            return {}

    class OfTheirs(Hook):
        def tick(self, trainer: Trainer, event: Event) -> None: ...

    Mine().attach(bus)
    OfTheirs().attach(bus)

    received = {row.name for event in ("tick", "toc", "settings", "state_dict") for row in bus.plan(event)}
    assert received == {"OfTheirs.tick"}
    with pytest.raises(TypeError, match=r"MyHook\.ticks is not an event: did you mean 'tick'\?"):
        define(ticks=nothing)


@pytest.mark.parametrize("point", ["before_epoch", "after_epoch", "before_iter", "after_iter"])
def test_mmengines_points_with_an_underscore_are_refused(point: str) -> None:
    """MMEngine's `_before_epoch(self, runner, mode)` would never be called: the class says which name to use instead."""
    message = rf"MyHook\._{point} is MMEngine's .* define {point}\(self, trainer, event\)"
    with pytest.raises(TypeError, match=message):
        define(**{f"_{point}": nothing})


@pytest.mark.parametrize("generic", ["before_epoch", "after_epoch", "before_iter", "after_iter"])
def test_generic_point_serves_all_three_modes(bus: Bus, generic: str) -> None:
    """One method hears training, validation and test; `event.mode` says which."""
    modes: list[str] = []
    define(**{generic: lambda self, trainer, event: modes.append(event.mode)})().attach(bus)
    when, what = generic.split("_")

    for mode in ("train", "val", "test"):
        event_type = bus.signal(f"{when}_{mode}_{what}").event_type
        bus.emit(event_type())

    assert modes == ["train", "val", "test"]


def test_specific_point_wins_in_its_mode(bus: Bus) -> None:
    """With both `after_iter` and `after_train_iter`, training calls the specific one alone."""
    calls: list[str] = []
    define(
        after_iter=lambda self, trainer, event: calls.append(f"generic {event.mode}"),
        after_train_iter=lambda self, trainer, event: calls.append("train"),
    )().attach(bus)

    bus.emit(AfterTrainIter())
    bus.emit(AfterValIter())

    assert calls == ["train", "generic val"]


def test_once_on_a_generic_point_is_once_over_all_modes(bus: Bus) -> None:
    """A method marked once is called a single time, whichever of its events comes first."""
    calls: list[str] = []

    class Once(Hook):
        @on(once=True)
        def after_iter(self, trainer: Trainer, event: Any) -> None:
            calls.append(event.mode)

    Once().attach(bus)
    bus.emit(AfterValIter())
    bus.emit(AfterTrainIter())

    assert calls == ["val"]


@pytest.mark.parametrize(
    ("alias", "event"), [("before_step", "before_train_iter"), ("after_step", "after_train_iter")]
)
def test_detectron_names_are_aliases(bus: Bus, alias: str, event: str) -> None:
    """`before_step` and `after_step` are the train iteration pair."""
    define(**{alias: nothing})().attach(bus)

    assert [s.event for s in bus.stats()] == [event]


def test_two_names_of_one_event_are_refused() -> None:
    """A hook cannot have both `after_step` and `after_train_iter`: one of them would be silent."""
    with pytest.raises(TypeError, match="MyHook has both after_step and after_train_iter, two names of one"):
        define(after_step=nothing, after_train_iter=nothing)


class SoupServed(Event):
    """An event of these tests."""

    dish: str = ""


def test_custom_event_is_a_point(bus: Bus) -> None:
    """A method named after a declared event hears it."""
    dishes: list[str] = []
    define(soup_served=lambda self, event: dishes.append(event.dish))().attach(bus)

    bus.emit(SoupServed(dish="goulash"))

    assert dishes == ["goulash"]


def test_async_method_runs_in_the_background(bus: Bus) -> None:
    """On the loop, with one queue for all modes of `after_iter`, so that no event overtakes another."""
    seen: list[str] = []

    async def after_iter(self: Hook, event: Any) -> None:
        seen.append(f"{event.mode} {event.iter}")

    define(after_iter=after_iter)().attach(bus)
    for i in range(20):
        bus.emit(AfterTrainIter(iter=i))
        bus.emit(AfterValIter(iter=i))
    bus.flush()

    assert seen == [f"{mode} {i}" for i in range(20) for mode in ("train", "val")]
    assert {s.runs_on for s in bus.stats()} == {"loop"}


async def wants_the_trainer(self: Hook, trainer: Any, event: Any) -> None: ...


def wants_too_much(self: Hook, trainer: Any, batch: Any, outputs: Any) -> None: ...


@pytest.mark.parametrize(
    ("point", "method", "message"),
    [
        ("after_train_iter", wants_the_trainer, r"background handler .* must take only \(event\)"),
        ("after_train_iter", wants_too_much, r"MyHook\.wants_too_much\(trainer.*expected \(trainer, event\)"),
        ("scalars_logged", nothing, r"scalars_logged is created in the background.*read trainer\.metrics"),
    ],
)
def test_a_signature_that_cannot_be_called_is_refused(
    point: str, method: Any, message: str, bus: Bus
) -> None:
    """When the hook is attached: only the training thread is given the trainer, and a sync method no background event."""
    with pytest.raises(TypeError, match=message):
        define(**{point: method})().attach(bus)


@pytest.mark.parametrize("priority", [Priority.LOW, "LOW", "low", 70])
def test_priority_is_a_member_its_name_or_a_number(bus: Bus, priority: Any) -> None:
    """All three say the same."""
    define(priority=priority, after_train_iter=nothing)().attach(bus)

    assert [row.priority for row in bus.plan("after_train_iter")] == [70]


@pytest.mark.parametrize(
    ("priority", "message"),
    [("LOWER", "did you mean LOWE?S?T?"), (101, "between 0 .* 101"), (True, "got True")],
)
def test_bad_class_priority_is_refused_where_it_is_defined(priority: Any, message: str) -> None:
    """A wrong `priority` raises at the class statement."""
    with pytest.raises((TypeError, ValueError), match=f"priority .*{message}"):
        define(priority=priority)


def test_on_gives_one_method_its_own_priority(bus: Bus) -> None:
    """`@on(priority=...)` counts on that method; the class's priority on the others."""

    class Two(Hook):
        priority = "LOW"

        @on(priority="HIGH")
        def before_train_iter(self, trainer: Trainer, event: Any) -> None: ...

        @on(every=2)
        def after_train_iter(self, trainer: Trainer, event: Any) -> None: ...

    Two().attach(bus)

    assert [row.priority for row in bus.plan("before_train_iter")] == [30]
    assert [row.priority for row in bus.plan("after_train_iter")] == [70]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 3}, [2, 5, 8]),
        ({"every": 3, "start": 2}, [4, 7]),
        ({"start": 7}, [7, 8, 9]),
        ({"once": True, "every": 4}, [3]),
        ({"when": lambda event: event.iter % 5 == 0}, [0, 5]),
    ],
    ids=["every", "every start", "start", "once", "when"],
)
def test_on_filters_one_method(bus: Bus, options: dict[str, Any], expected: list[int]) -> None:
    """`@on` takes the filters of `bus.on`."""
    seen: list[int] = []

    class Filtered(Hook):
        @on(**options)
        def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
            seen.append(event.iter)

    Filtered().attach(bus)
    for i in range(10):
        bus.emit(AfterTrainIter(iter=i))

    assert seen == expected


@pytest.mark.parametrize(
    ("method", "got"),
    [(lambda trainer, event: None, "trainer, event"), (lambda event: None, "event")],
    ids=["trainer", "event"],
)
def test_method_without_self_is_refused_where_it_is_defined(method: Any, got: str) -> None:
    """Its first parameter would be the hook itself, and its second one the event."""
    message = rf"MyHook.after_train_iter must take \(self, trainer, event\), got \({got}\): self is missing"
    with pytest.raises(TypeError, match=message):
        type("MyHook", (Hook,), {"after_train_iter": method})
    type("MyHook", (Hook,), {"after_train_iter": staticmethod(lambda event: None)})


def test_on_without_parentheses_is_refused() -> None:
    """Where it is written, with the line to write."""
    with pytest.raises(TypeError, match=r"expected @on\(priority=\.\.\.\), got @on above <function"):
        define(after_train_iter=cast(Any, on)(lambda self, trainer, event: None))


@pytest.mark.parametrize("method", ["log_it", "_log_it"])
def test_on_upon_no_point_is_refused(method: str) -> None:
    """`@on` on a method that is named after no event would never be called."""
    with pytest.raises(TypeError, match=rf"MyHook\.{method} is not an event"):
        define(**{method: on(every=10)(lambda self, trainer, event: None)})
