"""A second Ctrl-C waits for nobody, a blocking subscriber that hangs included."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from eventloop import Bus
from eventloop.events import BeforeTrain, ScalarsLogged
from eventloop.interrupt import graceful_interrupt
from tests.support.saving import DEADLINE
from tests.support.trainers import MakeTrainer, collect, event_name

CLOSING = ("after_train_epoch", "after_train", "after_run")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a subscriber hangs on, opened at the end of the test."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_closing_events_do_not_wait_for_it(
    make_trainer: MakeTrainer, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Its queue is full when the run is ended: it gets the closing events on top, is named with what it did not take,
    and its stall_timeout is not waited for."""
    trainer = make_trainer(default_hooks={"checkpoint": None})
    trainer.bus.subscribe(
        lambda event: gate.wait(DEADLINE), "before_train", *CLOSING, offload="thread", queue=1, overflow="block",
        name="hangs",
    )  # fmt: skip
    seen = collect(trainer, *CLOSING)

    @trainer.bus.on("after_train_iter", once=True)
    def twice(event: Any) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    began = monotonic()
    with pytest.raises(KeyboardInterrupt), graceful_interrupt(trainer):
        trainer.train()

    assert monotonic() - began < DEADLINE / 2
    assert [event_name(event) for event in seen] == [*CLOSING]
    assert "closed after 0.2 s; events left undelivered: hangs (4)" in caplog.text
    (stats,) = (row for row in trainer.bus.stats() if row.name == "hangs")
    assert stats.queued == 4


def test_nor_do_values_that_are_posted(gate: threading.Event) -> None:
    """After `never_wait` neither an emit nor a post is held up."""
    bus = Bus()
    bus.subscribe(
        lambda event: gate.wait(DEADLINE), "before_train", "scalars_logged", offload="thread", queue=1,
        overflow="block", name="hangs",
    )  # fmt: skip
    bus.emit(BeforeTrain())

    class Ready:
        def ready(self) -> bool:
            return True

        def events(self) -> list[ScalarsLogged]:
            return [ScalarsLogged()]

    bus.never_wait()
    began = monotonic()
    bus.emit(BeforeTrain())
    bus.post(Ready(), ScalarsLogged)

    assert monotonic() - began < DEADLINE / 2
    gate.set()
    report = bus.close(DEADLINE)
    assert [row.delivered for row in report.stats] == [3]
