"""Signal handlers while a run lasts, before and after it, and in other processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import PreemptionHook
from eventloop.interrupt import graceful_interrupt
from tests.support.forking import forked
from tests.support.internals import substitute
from tests.support.signals import Heard, send, send_in
from tests.support.trainers import MakeTrainer, batches, collect, shuffled


def test_a_handler_of_the_programs_own_is_called_too(make_trainer: MakeTrainer, received: Heard) -> None:
    """It is called when the signal comes, after the stop was noted, and put back; `train` returns, it decides."""
    trainer = make_trainer()
    own = signal.getsignal(signal.SIGTERM)
    asked: list[bool] = []

    def chained(signum: int, frame: Any) -> None:
        asked.append(trainer.asked_to_stop)

    signal.signal(signal.SIGTERM, chained)
    send_in(trainer, "after_train_iter", 2)
    trainer.train()

    assert (asked, trainer.iter, trainer.stop_reason) == ([True], 2, "preempted by SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is chained
    signal.signal(signal.SIGTERM, own)


def test_a_handler_that_is_installed_meanwhile_stays(make_trainer: MakeTrainer, received: Heard) -> None:
    """The hook puts back the handlers that it replaced, and no other, also when a handler of before_run failed."""
    trainer = make_trainer()
    interrupt = signal.getsignal(signal.SIGINT)

    def theirs(signum: int, frame: Any) -> None:
        """A handler of another library."""

    @trainer.bus.on("before_run")
    def install_and_fail(event: Any) -> None:
        signal.signal(signal.SIGTERM, theirs)
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        trainer.train()

    assert signal.getsignal(signal.SIGTERM) is theirs
    assert signal.getsignal(signal.SIGINT) is interrupt


def chain(event: Any) -> None:
    """Install a handler that calls the one it replaces, as libraries do."""
    replaced = signal.getsignal(signal.SIGINT)

    def theirs(number: int, frame: Any) -> None:
        assert callable(replaced)
        replaced(number, frame)

    signal.signal(signal.SIGINT, theirs)


def test_a_chained_handler_after_the_run(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """A handler that was installed during a run, and calls the one it replaced, swallows no signal afterwards."""
    trainer = make_trainer()
    trainer.bus.subscribe(chain, "before_train", name="installs")
    trainer.train()

    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)

    assert not trainer.asked_to_stop
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("own", [False, True])
def test_a_chained_handler_in_a_later_run(
    make_trainer: MakeTrainer, default_handlers: None, own: bool
) -> None:
    """The later run is asked to stop, and ends as ever; the program's own handler is still called."""
    taken: list[int] = []
    if own:
        signal.signal(signal.SIGINT, lambda signum, frame: taken.append(signum))
    first, later = make_trainer(), make_trainer()
    first.bus.subscribe(chain, "before_train", name="installs")
    first.train()
    send_in(later, "after_train_iter", 2, signal.SIGINT)
    later.train()

    assert (later.iter, later.stop_reason) == (2, "interrupted by Ctrl-C")
    assert taken == [signal.SIGINT] * own
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_ignored_signal_stays_ignored(make_trainer: MakeTrainer, received: Heard) -> None:
    """As Python itself leaves it, for programs that nohup started."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    trainer = make_trainer()
    send_in(trainer, "after_train_iter", 1, signal.SIGUSR1)

    trainer.train()

    assert (trainer.iter, trainer.stop_reason) == (6, None)


def test_runs_within_runs(make_trainer: MakeTrainer, default_handlers: None, tmp_path: Path) -> None:
    """A trainer that is run by a handler of another's stops with it; the outer one ends the program."""
    inner = make_trainer(work_dir=tmp_path / "inner")
    outer = make_trainer(work_dir=tmp_path / "outer")
    send_in(inner, "after_train_iter", 2)
    outer.bus.subscribe(lambda event: inner.train(), "after_train_iter", once=True, name="nested")

    with pytest.raises(SystemExit, match="143"):
        outer.train()

    assert (inner.iter, outer.iter) == (2, 1)


def test_an_evaluation_within_a_training_is_one_run(make_trainer: MakeTrainer, received: Heard) -> None:
    """`trainer.val()` from a handler leaves the handlers to the training."""
    trainer = make_trainer(val_loader=batches(3))
    trainer.bus.subscribe(lambda event: trainer.val(), "after_train_iter", once=True, name="nested")
    send_in(trainer, "after_val_iter", 2)

    trainer.train()

    assert (trainer.iter, len(received)) == (1, 1)


def test_within_graceful_interrupt(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """The first Ctrl-C ends the run at an iteration boundary, with every closing event, and lets `train` return; the hook
    has the other signals."""
    trainer = make_trainer()
    send_in(trainer, "after_train_iter", 2, signal.SIGINT)
    seen = collect(trainer, "after_train_epoch", "after_train", "after_run")
    with graceful_interrupt(trainer):
        trainer.train()
        assert [event.reason for event in seen] == ["interrupted by Ctrl-C"] * 3

        send_in(trainer, "after_train_iter", 1)
        with pytest.raises(SystemExit, match="143"):
            trainer.train()

    assert trainer.iter == 3


def exit_of_child(trainer: Trainer, body: Callable[[], int]) -> int:
    """Fork in the middle of a run; return how the child ended."""
    ended: list[int] = []

    @trainer.bus.on("after_train_iter", once=True)
    def fork(event: Any) -> None:
        ended.append(os.waitpid(forked(body), 0)[1])

    trainer.train()
    assert (trainer.iter, trainer.stop_reason) == (6, None)
    return os.waitstatus_to_exitcode(ended[0])


ignore_fork_warning = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@ignore_fork_warning
@pytest.mark.parametrize("handled", [False, True])
def test_a_forked_process_has_the_handler_from_before(
    make_trainer: MakeTrainer, request: pytest.FixtureRequest, handled: bool
) -> None:
    """It does not inherit the run: it dies of the signal as ever, or the program's own handler is called."""
    fixture = request.getfixturevalue("received" if handled else "default_handlers")
    received: Heard = fixture if handled else []

    def body() -> int:
        send()
        return len(received)

    assert exit_of_child(make_trainer(), body) == (1 if handled else -signal.SIGTERM)


@ignore_fork_warning
def test_loader_workers_outlive_what_the_terminal_sends_to_all(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, default_handlers: None
) -> None:
    """Ctrl-C and SIGUSR1 reach every process of the job: the workers serve the iteration that is to be finished."""

    def body() -> int:
        substitute(monkeypatch, "signals.get_worker_info", lambda: "a worker's")
        send(signal.SIGINT)
        send(signal.SIGUSR1)
        return 0

    assert exit_of_child(make_trainer(), body) == 0


def test_loader_workers_that_got_the_signal_too(make_trainer: MakeTrainer, received: Heard) -> None:
    """PyTorch raises in the main thread when workers die; a run that is stopping by the same signal ends all the same."""
    trainer = make_trainer(train_loader=shuffled(8, num_workers=1), max_epochs=1)

    @trainer.bus.on("after_train_iter", start=1, once=True)
    def to_all(event: Any) -> None:
        send()
        for child in multiprocessing.active_children():
            # by a program of its own: PyTorch takes a signal of its parent for its own
            subprocess.run(["kill", "-TERM", str(child.pid)], check=True)
            os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)  # PyTorch is to find it dead

    trainer.train()

    assert (trainer.iter, trainer.stop_reason) == (2, "preempted by SIGTERM")


@pytest.mark.parametrize("stops", [True, False])
def test_a_loader_whose_workers_are_gone(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, stops: bool
) -> None:
    """A batch that cannot be had ends a run that is stopping anyway at the boundary where it is; else it is an error."""

    class Loses:
        def __iter__(self) -> Iterator[Any]:
            yield from batches(2)
            if stops:
                trainer.request_stop("preempted")
            raise RuntimeError("DataLoader worker exited unexpectedly")

    trainer = make_trainer(train_loader=Loses(), max_epochs=1)
    with nullcontext() if stops else pytest.raises(RuntimeError, match="exited unexpectedly"):
        trainer.train()

    assert (trainer.iter, trainer.epoch) == (2, 0)
    assert ("its loader gave no further batch: DataLoader worker exited" in caplog.text) is stops


@pytest.mark.parametrize("options", [None, {"signals": ["SIGUSR2"]}], ids=["no hook", "SIGUSR2"])
def test_signals_are_chosen(make_trainer: MakeTrainer, default_handlers: None, options: Any) -> None:
    """Signals that are not named have no handler, none with `default_hooks=dict(preemption=None)`; others can be named."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    trainer = make_trainer(default_hooks={"preemption": options})
    found: list[Any] = []
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    trainer.bus.subscribe(
        lambda event: found.extend(map(signal.getsignal, numbers)), "before_train", name="look"
    )
    if options:
        send_in(trainer, "after_train_iter", 2, signal.SIGUSR2)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGUSR2)) if options else nullcontext():
        trainer.train()

    assert found[:2] == [signal.SIG_DFL, signal.default_int_handler]
    assert (found[2] == signal.SIG_DFL) == (options is None)


@pytest.mark.parametrize(
    ("signals", "error", "message"),
    [
        ("SIGTERM", TypeError, r"a sequence of names such as \('SIGTERM',\), got 'SIGTERM'"),
        ([], ValueError, r"at least one signal, got none: .* default_hooks=dict\(preemption=None\)"),
        ([15], TypeError, "names such as 'SIGTERM', got 15"),
        (["SIGTREM"], ValueError, "signals that end a run, got 'SIGTREM': did you mean 'SIGTERM'"),
        (["SIGKILL"], ValueError, "signals that end a run, got 'SIGKILL'"),
    ],
)
def test_bad_input(signals: Any, error: type[Exception], message: str) -> None:
    """Refused where it is written."""
    with pytest.raises(error, match=message):
        PreemptionHook(signals)
