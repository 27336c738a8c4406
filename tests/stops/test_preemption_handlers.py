"""Which handlers there are while a run lasts, and before and after it; what other processes do with them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.hooks import PreemptionHook
from eventloop.interrupt import graceful_interrupt
from tests.support.signals import Heard, send, send_in
from tests.support.trainers import MakeTrainer, batches, shuffled

# --- handlers ----------------------------------------------------------------------------------------------


def test_a_handler_of_the_programs_own_is_called_too(make_trainer: MakeTrainer, heard: Heard) -> None:
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


def test_handlers_are_put_back_after_an_error(make_trainer: MakeTrainer, heard: Heard) -> None:
    """However a run ends; also when a handler of before_run failed."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    trainer = make_trainer()
    trainer.bus.subscribe(lambda event: 1 / 0, "before_run", name="fails")

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_handler_that_somebody_installs_meanwhile_stays(make_trainer: MakeTrainer, heard: Heard) -> None:
    """What is put back is what the hook took away, and nothing else."""
    trainer = make_trainer()

    def theirs(signum: int, frame: Any) -> None:
        """Somebody's."""

    trainer.bus.subscribe(
        lambda event: signal.signal(signal.SIGTERM, theirs), "before_train", name="installs"
    )
    trainer.train()

    assert signal.getsignal(signal.SIGTERM) is theirs


def chain(event: Any) -> None:
    """Install a handler that calls the one it replaces, as libraries do."""
    replaced = signal.getsignal(signal.SIGINT)

    def theirs(number: int, frame: Any) -> None:
        assert callable(replaced)
        replaced(number, frame)

    signal.signal(signal.SIGINT, theirs)


def test_who_calls_ours_after_the_run_gets_what_was_before(
    make_trainer: MakeTrainer, default_handlers: None
) -> None:
    """A handler that was installed during a run, and calls the one it replaced, swallows no signal once the run is over."""
    trainer = make_trainer()
    trainer.bus.subscribe(chain, "before_train", name="installs")
    trainer.train()

    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)

    assert not trainer.asked_to_stop
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("own", [False, True])
def test_a_later_run_is_not_ended_by_an_earlier_ones_handler(
    make_trainer: MakeTrainer, default_handlers: None, own: bool
) -> None:
    """Where such a handler calls that of a run that is over, the later run is asked to stop, and ends as ever; the
    program's own handler is still called."""
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


def test_an_ignored_signal_stays_ignored(make_trainer: MakeTrainer, heard: Heard) -> None:
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


def test_an_evaluation_within_a_training_is_one_run(make_trainer: MakeTrainer, heard: Heard) -> None:
    """`trainer.val()` from a handler leaves the handlers to the training."""
    trainer = make_trainer(val_loader=batches(3))
    trainer.bus.subscribe(lambda event: trainer.val(), "after_train_iter", once=True, name="nested")
    send_in(trainer, "after_val_iter", 2)

    trainer.train()

    assert (trainer.iter, len(heard)) == (1, 1)


def test_within_graceful_interrupt(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """There the first Ctrl-C lets `train` return, as the block says, and the hook has the other signals."""
    trainer = make_trainer()
    send_in(trainer, "after_train_iter", 2, signal.SIGINT)
    with graceful_interrupt(trainer):
        trainer.train()

        send_in(trainer, "after_train_iter", 1)
        with pytest.raises(SystemExit, match="143"):
            trainer.train()

    assert trainer.iter == 3


def test_off_the_main_thread_nothing_is_done(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """Python delivers signals to the main thread, and lets no other install handlers."""
    trainer = make_trainer()
    found: list[Any] = []
    trainer.bus.subscribe(
        lambda event: found.append(signal.getsignal(signal.SIGTERM)), "before_train", name="look"
    )

    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()

    assert (found, trainer.iter) == ([signal.SIG_DFL], 6)


def exit_of_child(trainer: Trainer, body: Callable[[], None]) -> int:
    """Fork in the middle of a run; returns how the child ended."""
    ended: list[int] = []

    @trainer.bus.on("after_train_iter", once=True)
    def fork(event: Any) -> None:
        child = os.fork()
        if not child:
            try:
                body()
            finally:
                os._exit(7)
        ended.append(os.waitpid(child, 0)[1])

    trainer.train()
    return os.waitstatus_to_exitcode(ended[0])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_forked_process_dies_as_ever(
    make_trainer: MakeTrainer, default_handlers: None, signum: int
) -> None:
    """It inherits the handler, not the run."""
    trainer = make_trainer()

    assert exit_of_child(trainer, lambda: send(signum)) == -signum
    assert (trainer.iter, trainer.stop_reason) == (6, None)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_has_the_programs_handler(make_trainer: MakeTrainer, heard: Heard) -> None:
    """The one that was there before is called in the child too."""
    trainer = make_trainer()

    def body() -> None:
        send()
        os._exit(len(heard))

    assert exit_of_child(trainer, body) == 1
    assert trainer.stop_reason is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_loader_workers_outlive_what_the_terminal_sends_to_all(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, default_handlers: None
) -> None:
    """Ctrl-C and SIGUSR1 reach every process of the job: the workers serve the iteration that is to be finished."""
    trainer = make_trainer()

    def body() -> None:
        monkeypatch.setattr("eventloop.stops.signals.get_worker_info", lambda: "a worker's")
        send(signal.SIGINT)
        send(signal.SIGUSR1)
        os._exit(0)

    assert exit_of_child(trainer, body) == 0


def test_loader_workers_that_got_the_signal_too(make_trainer: MakeTrainer, heard: Heard) -> None:
    """PyTorch raises in the main thread when workers die; a run that is stopping by the same signal needs them no more."""
    loader = shuffled(8, num_workers=1)
    trainer = make_trainer(train_loader=loader, max_epochs=1)

    @trainer.bus.on("after_train_iter", start=1, once=True)
    def to_all(event: Any) -> None:
        send()
        for child in multiprocessing.active_children():
            subprocess.run(
                ["kill", "-TERM", str(child.pid)], check=True
            )  # PyTorch takes its parent's for its own
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


def test_without_the_hook(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """`default_hooks=dict(preemption=None)`: no handler is installed."""
    trainer = make_trainer(default_hooks={"preemption": None})
    found: list[Any] = []
    trainer.bus.subscribe(
        lambda event: found.append(signal.getsignal(signal.SIGTERM)), "before_train", name="look"
    )

    trainer.train()

    assert found == [signal.SIG_DFL]


def test_signals_are_chosen(make_trainer: MakeTrainer, default_handlers: None) -> None:
    """Those that are not named are as they were, others can be."""
    trainer = make_trainer(default_hooks={"preemption": {"signals": ["SIGUSR2"]}})
    found: list[Any] = []

    @trainer.bus.on("before_train")
    def look(event: Any) -> None:
        found.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))

    send_in(trainer, "after_train_iter", 2, signal.SIGUSR2)
    with pytest.raises(SystemExit) as ended:
        trainer.train()

    assert ended.value.code == 128 + signal.SIGUSR2
    assert found == [signal.SIG_DFL, signal.default_int_handler]


def test_what_the_platform_lacks_is_left_out(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, default_handlers: None
) -> None:
    """Windows has no SIGUSR1."""
    monkeypatch.delattr(signal, "SIGUSR1")

    make_trainer().train()


@pytest.mark.parametrize(
    ("signals", "error", "message"),
    [
        ("SIGTERM", TypeError, r"signals must be a sequence of names such as \('SIGTERM',\), got 'SIGTERM'"),
        ([], ValueError, r"signals must name at least one signal, got none: .* default_hooks=dict\(preemption=None\)"),
        ([15], TypeError, "signals must be names such as 'SIGTERM', got 15"),
        (["SIGTREM"], ValueError, "signals that end a run, got 'SIGTREM': did you mean 'SIGTERM'"),
        (["SIGKILL"], ValueError, "signals that end a run, got 'SIGKILL'"),
    ],
)  # fmt: skip
def test_bad_input(signals: Any, error: type[Exception], message: str) -> None:
    """Refused where it is written."""
    with pytest.raises(error, match=message):
        PreemptionHook(signals)
