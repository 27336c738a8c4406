"""A writer that is slow at the end of a run: it is waited for while it delivers, unless time is short."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest

from eventloop import Bus, Trainer
from eventloop.background.overtime import AFTER_SIGNAL, Deadline
from eventloop.events import AfterTrainIter, Event
from eventloop.interrupt import graceful_interrupt
from eventloop.writers import Writer
from tests.support.internals import substitute
from tests.support.paced import Paced
from tests.support.process_support import until
from tests.support.signals import Heard, send
from tests.support.trainers import DEADLINE, MakeTrainer


class Slow(Writer):
    """Writes one event each time it is decided whether the end of the run waits on."""

    events = (AfterTrainIter,)
    paced: Paced

    def __init__(self) -> None:
        self.written = 0

    def write(self, event: Event) -> None:
        self.paced.wait()
        self.written += 1


class Ending:
    """A trainer of six iterations with a slow writer, and what is decided at the end of its run."""

    def __init__(self, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writer = Slow()
        self.trainer: Trainer = make_trainer(
            writers=[self.writer], bus=Bus(drain_timeout=0.02), default_hooks={"checkpoint": None}
        )
        self.decided: list[bool] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.writer.paced = Paced(monkeypatch, self._left)

    def _left(self) -> int:
        return next(each.queued for each in self.trainer.bus.subscriber_costs() if each.name == "Slow")


@pytest.fixture
def ending(
    no_thread_left: None, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ending]:
    """The writer is let go at the end of the test."""
    ending = Ending(make_trainer, monkeypatch)
    make_progress = Deadline.make_progress

    def decide(deadline: Deadline) -> bool:
        ending.meanwhile()
        ending.decided.append(make_progress(deadline))
        return ending.decided[-1]

    monkeypatch.setattr(Deadline, "make_progress", decide)
    substitute(monkeypatch, "overtime.LONGEST_WAIT", 10_000)  # as a busy machine may take long to deliver
    yield ending
    ending.writer.paced.let_go()


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_waited_for_while_it_delivers(ending: Ending, fails: bool) -> None:
    """Nothing is left although its time was over several times, also after an error, which closes the writers."""
    if fails:
        ending.trainer.bus.subscribe(lambda event: 1 / 0, "after_train_epoch", start=1)

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        ending.trainer.train()

    assert ending.writer.written == 6
    assert len(ending.decided) >= 5
    assert "not everything was delivered" not in ending.trainer.summary()


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT, SystemExit(3)], ids=repr)
def test_a_run_that_ends_its_program_has_no_time(
    ending: Ending,
    default_handlers: None,
    ends: signal.Signals | SystemExit,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its grace may be over soon, after a signal or a SystemExit of a handler: it waits once, at most a fifth as long, and
    counts what is left."""

    @ending.trainer.bus.on("after_train_iter", start=5)
    def end(event: Event) -> None:
        if isinstance(ends, SystemExit):
            raise ends
        send(ends)

    with pytest.raises((SystemExit, KeyboardInterrupt)):
        ending.trainer.train()

    assert ending.decided == []
    assert 0.0 < ending.trainer.bus.patience <= 1.001 * 0.02 * AFTER_SIGNAL
    assert ending.writer.written == 0
    assert "undelivered: Slow (6)" in caplog.text


def test_a_signal_that_comes_while_it_is_waited_for(ending: Ending, received: Heard) -> None:
    """The time that has begun is the last; the next run has all of it again."""
    ending.meanwhile = lambda: send(signal.SIGTERM) if len(ending.decided) == 1 else None

    ending.trainer.train()

    assert received == [signal.SIGTERM]
    assert [bool(more) for more in ending.decided] == [True, False]
    ending.meanwhile = lambda: None
    ending.trainer.val_loader = ending.trainer.train_loader
    ending.trainer.val()
    assert ending.writer.written == 6


def in_the_final_wait(ending: Ending, *do: Callable[[], object]) -> threading.Thread:
    """Call each of `do` on a thread: the first when the run has ended and its writer is waited for, the others when
    the bus is being closed, too."""

    def run() -> None:
        try:
            until(lambda: not ending.trainer.running and bool(ending.trainer.iter))
            do[0]()
            until(lambda: ending.trainer.bus.closed)
            for each in do[1:]:
                each()
        finally:
            ending.writer.paced.let_go()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_final_wait_closes_the_bus(
    ending: Ending,
    default_handlers: None,
    signum: signal.Signals,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The close begins at the signal, and no further wait follows at the exit. What is delivered until then is no loss.
    Of an iteration the text of Ctrl-C says nothing."""
    ending.trainer.bus.drain_timeout = DEADLINE
    thread = in_the_final_wait(ending, lambda: send(signum))

    with pytest.raises(KeyboardInterrupt if signum == signal.SIGINT else SystemExit):
        ending.trainer.train()

    thread.join(DEADLINE)
    assert ending.decided == []
    assert ending.trainer.bus.closed
    assert ending.writer.written == 6
    assert caplog.messages == []
    told = capfd.readouterr().err
    assert (f" at most {AFTER_SIGNAL * DEADLINE:g} s " in told) if signum == signal.SIGINT else (told == "")


def test_a_signal_in_the_final_wait_names_what_is_left(
    ending: Ending, default_handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line: that of the close."""
    ending.meanwhile = lambda: send(signal.SIGTERM) if len(ending.decided) == 0 else None

    with pytest.raises(SystemExit):
        ending.trainer.train()

    assert not any(ending.decided)
    (line,) = caplog.messages  # one is delivered where it is decided whether the flush goes on
    assert "events left undelivered: Slow (5)" in line


def test_a_second_ctrl_c_ends_the_final_wait_at_once(
    ending: Ending, default_handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It names what is left."""
    ending.trainer.bus.drain_timeout = DEADLINE
    ended, press = threading.Event(), partial(send, signal.SIGINT)
    thread = in_the_final_wait(ending, press, press, lambda: ended.wait(DEADLINE))

    with pytest.raises(KeyboardInterrupt):
        ending.trainer.train()

    ended.set()
    thread.join(DEADLINE)
    assert "events left undelivered: Slow (6)" in caplog.text


def test_a_hint_of_ones_own_is_for_iterations_too(ending: Ending, capfd: pytest.CaptureFixture[str]) -> None:
    """`graceful_interrupt` says the same once the run has ended; before and after a run it has its own text."""
    ending.meanwhile = lambda: send(signal.SIGINT) if len(ending.decided) == 0 else None

    with graceful_interrupt(ending.trainer, hint="stopping"):
        ending.trainer.train()
    with graceful_interrupt(ending.trainer, hint="stopping"):
        send(signal.SIGINT)

    ended, own = capfd.readouterr().err.splitlines()
    assert f" at most {0.02 * AFTER_SIGNAL:g} s " in ended
    assert own == "stopping"


def test_after_a_signal_saves_and_writers_share_their_time(make_trainer: MakeTrainer) -> None:
    """What the end of a run takes before the writers are waited for is subtracted from their wait, up to a half."""
    trainer = make_trainer(bus=Bus(drain_timeout=0.5), default_hooks={"checkpoint": None})
    whole = AFTER_SIGNAL * 0.5
    trainer.bus.subscribe(
        lambda event: trainer.request_stop("preempted", signum=signal.SIGTERM), "after_train_iter", once=True
    )
    waits: list[float] = []

    @trainer.bus.on("after_train", priority="LOWEST")
    def save(event: Event) -> None:
        waits.append(trainer.bus.patience)
        if trainer.stop_signal is not None:
            until(lambda: trainer.bus.patience == whole / 2)

    with pytest.raises(SystemExit):
        trainer.train()
    trainer.train()

    assert whole / 2 <= waits[0] < whole
    assert waits[1] == 0.5
