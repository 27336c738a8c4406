"""Handlers with the signatures of other systems are refused by name, and do not get an event for a storage."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop.bus import Bus
from eventloop.hooks import Hook
from tests.support.trainers import MakeTrainer


def pet(storage: Any, *args: Any, epoch: Any = None, **kw: Any) -> None: ...
def ignite(engine: Any) -> None: ...
def ignite_with_more(engine: Any, counts: Any) -> None: ...
def keras(epoch: Any, logs: Any = None) -> None: ...
def lightning(trainer: Any, pl_module: Any) -> None: ...
def composer(state: Any, logger: Any) -> None: ...
def torchtnt(state: Any, unit: Any) -> None: ...
def skorch(net: Any, **kw: Any) -> None: ...


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (pet, "signature is that of Pet, whose storage is trainer.metrics"),
        (ignite, "signature is that of ignite, whose engine is the trainer"),
        (ignite_with_more, "signature is that of ignite"),
        (keras, "signature is that of Keras, whose logs"),
        (lightning, "signature is that of Lightning, whose module is trainer.model"),
        (composer, "signature is that of Composer"),
        (torchtnt, "signature is that of torchtnt, whose unit is trainer.model"),
        (skorch, "signature is that of skorch"),
    ],
)
def test_a_signature_of_another_system_is_refused(handler: Any, message: str) -> None:
    """The error says what is expected, what came, and where its values are here."""
    with pytest.raises(
        TypeError, match=rf"handler {handler.__name__}\(.*expected \(trainer, event\).*{message}"
    ):
        Bus().on("after_train_iter")(handler)


def test_a_hook_of_pet_is_refused(make_trainer: MakeTrainer) -> None:
    """Its method would get the event as `storage`, and no `epoch` ever."""

    class Timer(Hook):
        def after_step(self, storage: Any, *args: Any, epoch: Any = None, **kw: Any) -> None: ...

    with pytest.raises(TypeError, match=r"Timer\.after_step.* signature is that of Pet"):
        make_trainer(hooks=[Timer()])


def test_any_name_is_free_for_the_trainer() -> None:
    """`(engine, event)` is a handler of the bus, whatever the trainer is called."""
    bus = Bus()

    @bus.on("after_train_iter")
    def handler(engine: Any, event: Any) -> None: ...

    assert [row.name for row in bus.plan("after_train_iter")] != []
