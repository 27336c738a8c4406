"""Arguments that every bridge checks where it is made, without any of the engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Bus
from eventloop.bridges import host
from eventloop.bridges.attachment import Attachment
from eventloop.hooks import (
    CallbackHook,
    EMAHook,
    Hook,
    OptimizerHook,
    ParamSchedulerHook,
    PreemptionHook,
    ThroughputHook,
)
from eventloop.writers import JSONLWriter
from tests.support.internals import substitute
from tests.support.trainers import tiny_model


def attachment(bus: Bus | None = None, **changes: Any) -> Attachment:
    """Make the attachment of a bridge to an engine that has no moment for `optimizer_step_skipped`."""
    never = {"optimizer_step_skipped": "toyloop does not say that a step was skipped"}
    options: dict[str, Any] = {"hooks": (), "writers": (), "work_dir": None, "measure": True}
    return Attachment("toyloop", never, bus, **{**options, **changes})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"hooks": [EMAHook]}, TypeError, r"expected a hook, got the class EMAHook: write EMAHook\(\)"),
        ({"hooks": [3]}, TypeError, r"expected a hook or a config dict\(type=...\), got 3"),
        (
            {"hooks": [JSONLWriter()]},
            TypeError,
            r"expected a hook, got JSONLWriter, which is a writer: .* writers=",
        ),
        (
            {"writers": [JSONLWriter]},
            TypeError,
            r"expected a writer, got the class JSONLWriter: write JSONLWriter\(\)",
        ),
        ({"writers": ["jsonl"]}, TypeError, r"expected a writer or a config dict\(type=...\), got 'jsonl'"),
        (
            {"writers": [{"type": "JSNOLWriter"}]},
            ValueError,
            "unknown type 'JSNOLWriter': did you mean 'JSONLWriter'",
        ),
    ],
)
def test_hooks_and_writers(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """What is no hook or no writer is refused where the bridge is made, and not at the host's first run."""
    with pytest.raises(error, match=words):
        attachment(**arguments)


def test_the_printed_bus_has_hooks_and_writers_from_the_run_on(tmp_path: Path) -> None:
    """Hooks need the host's model, so `print(bridge.bus)` lists them, and the writers, in `before_run`."""
    bridge = attachment(hooks=[EMAHook()], writers=[JSONLWriter()], work_dir=tmp_path)
    printed: list[str] = []
    bridge.bus.on("before_run")(lambda trainer, event: printed.append(str(trainer.bus)))

    bridge.begin_run(tiny_model(), native=None)
    bridge.end_run()

    assert "EMAHook.after_train_iter" in printed[0]
    assert "JSONLWriter" in printed[0]


@pytest.mark.parametrize("hook", [OptimizerHook(), ParamSchedulerHook(), PreemptionHook()])
def test_a_bus_with_a_hook_that_owns_a_part_of_the_loop(hook: Hook) -> None:
    """A bus to which such a hook is attached is refused where the bridge is made, with the hook's name."""
    bus = Bus()
    hook.attach(bus)

    with pytest.raises(
        ValueError, match=rf"{type(hook).__name__} does .* itself, which toyloop does here: leave"
    ):
        attachment(bus)


class Skipped(Hook):
    """A hook for an event that the engines do not emit."""

    def optimizer_step_skipped(self, trainer: Any, event: Any) -> None: ...


class SkippedNotes(ThroughputHook):
    """Such a hook, derived from a hook of eventloop whose `attach` does more."""

    def optimizer_step_skipped(self, trainer: Any, event: Any) -> None: ...


class Chooses(Skipped):
    """A hook that subscribes by itself to what the bus has."""

    def attach(self, bus: Bus) -> None:
        if bus.possible(["optimizer_step_skipped"]):
            super().attach(bus)


def record_skipped(event: Any) -> None: ...


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (Skipped(), "Skipped.optimizer_step_skipped"),
        (SkippedNotes(), "SkippedNotes.optimizer_step_skipped"),
        (CallbackHook(optimizer_step_skipped=record_skipped), "record_skipped"),
    ],
)
def test_a_hook_for_an_event_that_the_host_never_emits(hook: Hook, name: str) -> None:
    """It is refused where the bridge is made, with the names of the hook's method and the event, and the reason."""
    words = rf"{name} subscribes to optimizer_step_skipped, which this bus never has: toyloop does not say"
    with pytest.raises(ValueError, match=words):
        attachment(hooks=[EMAHook(), hook])


def test_a_hook_with_its_own_attach(tmp_path: Path) -> None:
    """A hook whose `attach` leaves out the event that the host lacks is accepted, and runs."""
    bridge = attachment(hooks=[Chooses()], work_dir=tmp_path)
    bridge.begin_run(tiny_model(), native=None)
    bridge.end_run()


def of_lightning(hook: Hook) -> object:
    from eventloop.bridges.lightning import EventLoopCallback

    return EventLoopCallback(hooks=[hook])


def of_transformers(hook: Hook) -> object:
    from eventloop.bridges.transformers import EventLoopCallback

    return EventLoopCallback(hooks=[hook])


def of_ignite(hook: Hook) -> object:
    from ignite.engine import Engine

    from eventloop.bridges.ignite import attach

    return attach(Engine(lambda engine, batch: None), hooks=[hook])


def of_mmengine(hook: Hook) -> object:
    from eventloop.bridges.mmengine import EventLoopHook

    return EventLoopHook(hooks=[hook])


class BeforeBatch(Hook):
    """A hook for an event that Transformers does not emit."""

    def before_val_iter(self, trainer: Any, event: Any) -> None: ...


@pytest.mark.parametrize(
    ("package", "make", "hook", "words"),
    [
        ("lightning", of_lightning, Skipped, "Lightning does not say that a step was skipped"),
        (
            "transformers",
            of_transformers,
            BeforeBatch,
            "Transformers has no callback before a batch of an evaluation",
        ),
        ("ignite", of_ignite, Skipped, "ignite does not say that a step was skipped"),
        ("ignite", of_ignite, BeforeBatch, "give .* the evaluator"),
        ("mmengine", of_mmengine, Skipped, "MMEngine's optim wrappers do not say that a step was skipped"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # MMEngine's own, at its import
def test_each_bridge_refuses_such_a_hook(
    package: str, make: Callable[[Hook], object], hook: type[Hook], words: str
) -> None:
    """The bridges to real engines refuse it where they are made, not in the engine's first run."""
    pytest.importorskip(package, reason=f"{package} is not installed")

    with pytest.raises(
        ValueError, match=rf"{hook.__name__}\..* subscribes to .*, which this bus never has: {words}"
    ):
        make(hook())


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        (
            "find_spec",
            None,
            r"needs toyloop-ml>=1.2, which is not installed: pip install 'torch-eventloop\[toyloop\]'",
        ),
        ("version", "1.1.9", r"needs toyloop-ml>=1.2, got 1.1.9: pip install 'torch-eventloop\[toyloop\]'"),
    ],
)
def test_a_host_that_is_missing_or_old(
    monkeypatch: pytest.MonkeyPatch, name: str, found: str | None, words: str
) -> None:
    """The error has the package, the version needed, the one found, and the extra that installs it."""
    substitute(monkeypatch, "host.find_spec", lambda module: module)
    substitute(monkeypatch, f"host.{name}", lambda package: found)

    with pytest.raises(ImportError, match=words):
        host.require("toyloop", "toyloop-ml", "1.2", extra="toyloop")
