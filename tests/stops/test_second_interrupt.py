"""The second Ctrl-C closes everything, waits for nothing, and names what it leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from io import FileIO
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from eventloop import Bus, Trainer
from eventloop.checkpoint import load_checkpoint, verify_checkpoint
from eventloop.checkpoint.disk import Disk, SaveGivenUp
from eventloop.checkpoint.saving.saver import Saver
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.events import BeforeTrain, Event, ScalarsLogged
from eventloop.hooks import CheckpointHook
from eventloop.interrupt import graceful_interrupt
from eventloop.writers import Writer
from tests.forked import ROOT, Forked
from tests.support.internals import close_in_time, substitute
from tests.support.process_support import until
from tests.support.saving import Gate, no_thread_while_it_starts
from tests.support.trainers import DEADLINE, MakeTrainer, Stuck, collect, event_name

needs_shared_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")


class Kept(Writer):
    """Keeps in memory what it is given."""

    events = ("*",)

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.ended = threading.Event()
        self.closed = False

    def write(self, event: Event) -> None:
        self.seen.append(type(event).__name__)
        if self.seen[-1] == "AfterRun":
            self.ended.set()

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log names the time of a close, which is longer on a busy machine."""
    close_in_time(monkeypatch)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> Callable[[str], threading.Event]:
    """Hold up the saves of a checkpoint in the middle of writing; return an event that is set then."""
    write = Disk.write

    def hold(name: str) -> threading.Event:
        entered = threading.Event()

        def held(disk: Disk, file: FileIO, data: memoryview) -> int:
            if f"/.{name}." in str(file.name):
                entered.set()
                gate.open.wait(DEADLINE)
            return write(disk, file, data)

        monkeypatch.setattr(Disk, "write", held)
        substitute(monkeypatch, "pending.Saver", partial(Saver, process=False))
        return entered

    return hold


def press() -> None:
    """Press Ctrl-C two times."""
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)


def press_twice(trainer: Trainer, iteration: int) -> None:
    """Press Ctrl-C two times in an iteration."""

    @trainer.bus.on("after_train_iter", start=iteration - 1, once=True)
    def twice(event: Event) -> None:
        press()


def press_inside(function: str, after: threading.Event | None = None) -> threading.Thread:
    """Press Ctrl-C once the main thread is in a function of that name, after `after` is set.

    A signal that comes in the moment before the thread waits is only seen when that wait ends, so it is sent again.
    """

    def run() -> None:
        if after is not None:
            after.wait(DEADLINE)
        wait_until_inside(function)
        again = threading.Event()
        while is_inside(function):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            again.wait(0.5)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def is_inside(function: str) -> bool:
    """True while the main thread is in a function of that name."""
    frame: Any = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def wait_until_inside(function: str) -> None:
    """Wait until the main thread is there."""
    looked = threading.Event()
    while not is_inside(function):
        looked.wait(0.001)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def ended_by_ctrl_c(trainer: Trainer) -> None:
    """Train until the second Ctrl-C."""
    with pytest.raises(KeyboardInterrupt), graceful_interrupt(trainer):
        trainer.train()


# --- writers -----------------------------------------------------------------------------------------------


def assert_stuck_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """One line names the writer that hangs, with the events it did not take and the command for them."""
    (line,) = warnings_of(caplog)
    assert re.fullmatch(
        r"closed after 0\.2 s; events left undelivered: Stuck \(\d+\)(, (stuck|in one delivery) for .*)?\. `eventloop replay .*` says how to deliver them",
        line,
    )


@pytest.mark.parametrize(
    "when", ["training", *(pytest.param(when, marks=pytest.mark.slow) for when in ("delivering", "closing"))]
)
def test_a_writer_that_hangs_is_left(
    make_trainer: MakeTrainer, stuck: Stuck, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """It is named and the others get everything: in an iteration, while the first Ctrl-C's clean end waits for
    delivery, and while the writers of a run that raised are closed."""
    kept, seconds = Kept(), list[threading.Thread]()
    trainer = make_trainer(writers=[stuck, kept], default_hooks={"checkpoint": None, "trace": None})
    if when == "training":
        press_twice(trainer, 2)
    else:
        trainer.bus.subscribe(lambda event: signal.raise_signal(signal.SIGINT), "after_train_iter", once=True)
        seconds.append(
            press_inside("flush" if when == "delivering" else "_flush_until_quiet", after=kept.ended)
        )

    with (
        pytest.raises(KeyboardInterrupt),
        graceful_interrupt(trainer) if when != "closing" else nullcontext(),
    ):
        trainer.train()

    for second in seconds:
        second.join(DEADLINE)
    assert_stuck_is_named(caplog)
    assert not stuck.gate.is_set()
    assert (kept.seen[-1], kept.closed) == ("AfterRun", True)


def test_in_a_hand_written_loop(
    make_trainer: MakeTrainer, stuck: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer is left there too, although the loop's generators never see the exception."""
    hooks = {"checkpoint": None, "optimizer": None, "trace": None}
    trainer = make_trainer(writers=[stuck], default_hooks=hooks, max_epochs=1)
    seen = collect(trainer, "after_run")

    def train() -> None:
        for _ in trainer.epochs():
            for _ in trainer.batches(trainer.train_loader or ()):
                press()

    with pytest.raises(KeyboardInterrupt), graceful_interrupt(trainer):
        train()

    assert [(event.reason, event.error) for event in seen] == [("error", "KeyboardInterrupt")]
    assert_stuck_is_named(caplog)


def test_a_full_queue_holds_up_no_closing_event(
    make_trainer: MakeTrainer, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """A blocking subscriber that hangs gets the closing events beyond its limit, and is named with what it did not
    take; its `stall_timeout` is not waited for."""
    closing = ("after_train_epoch", "after_train", "after_run")
    trainer = make_trainer(default_hooks={"checkpoint": None, "trace": None})
    trainer.bus.subscribe(
        lambda event: gate.open.wait(DEADLINE),
        "before_train",
        *closing,
        offload="thread",
        queue=1,
        overflow="block",
        name="hangs",
    )
    seen = collect(trainer, *closing)
    press_twice(trainer, 1)

    began = monotonic()
    ended_by_ctrl_c(trainer)

    assert monotonic() - began < DEADLINE / 2
    assert [event_name(event) for event in seen] == [*closing]
    assert "closed after 0.2 s; events left undelivered: hangs (4)" in caplog.text
    assert [row.queued for row in trainer.bus.stats() if row.name == "hangs"] == [4]


def test_never_wait_holds_up_no_emit_and_no_post(gate: Gate) -> None:
    """Events and posted values exceed the limit of a full blocking queue, and are delivered later."""
    bus = Bus()
    bus.subscribe(
        lambda event: gate.open.wait(DEADLINE),
        "before_train",
        "scalars_logged",
        offload="thread",
        queue=1,
        overflow="block",
        name="hangs",
    )
    bus.emit(BeforeTrain())

    class Ready:
        def ready(self) -> bool:
            return True

        def events(self) -> list[Event]:
            return [ScalarsLogged()]

    bus.never_wait()
    began = monotonic()
    bus.emit(BeforeTrain())
    bus.post(Ready(), ScalarsLogged)

    assert monotonic() - began < DEADLINE / 2
    gate.open.set()
    assert [row.delivered for row in bus.close(DEADLINE).stats] == [3]


def test_outside_of_a_run(make_trainer: MakeTrainer) -> None:
    """The bus is closed, so that nothing is left to the interpreter's exit."""
    trainer = make_trainer()
    with pytest.raises(KeyboardInterrupt), graceful_interrupt(trainer):
        press()

    assert trainer.bus.closed


# --- checkpoints -------------------------------------------------------------------------------------------


def checkpointed(make_trainer: MakeTrainer, **changes: Any) -> Trainer:
    """A trainer that saves every second iteration, and whose first checkpoint is durable before the second is due."""
    own = {"default_hooks": {"trace": None}}  # which warns if a busy machine has not written the trace
    trainer = make_trainer(max_iters=20, hooks=[CheckpointHook(interval=2)], **own | changes)
    first = trainer.work_dir / "iter_2"
    trainer.bus.subscribe(lambda event: until(first.exists), "before_train_iter", start=3, once=True)
    return trainer


def test_a_save_under_way_is_given_up(
    make_trainer: MakeTrainer,
    hold: Callable[[str], threading.Event],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """A thread's save is named, its event is checkpoint_failed, nothing is left of it, and older ones are intact."""
    hold("iter_4")
    trainer = checkpointed(make_trainer)
    seen = collect(trainer, "checkpoint_saved", "checkpoint_failed")
    press_twice(trainer, 5)

    ended_by_ctrl_c(trainer)

    assert warnings_of(caplog) == [
        f"checkpoint {tmp_path / 'run' / 'iter_4'} was given up; older ones are intact"
    ]
    assert [(type(e).__name__, Path(e.path).name) for e in seen] == [
        ("CheckpointSaved", "iter_2"),
        ("CheckpointFailed", "iter_4"),
    ]
    assert seen[1].error == "given up: the run was aborted"
    assert [path.name for path in (tmp_path / "run").glob("*iter_*")] == ["iter_2"]
    assert load_checkpoint(tmp_path / "run" / "iter_2")["meta"]["iter"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("function", ["after_train_iter", "after_train", "after_run"])
def test_while_a_save_is_waited_for(
    function: str, make_trainer: MakeTrainer, hold: Callable[[str], threading.Event], tmp_path: Path
) -> None:
    """The second Ctrl-C ends the wait for a save, wherever the checkpoint hook waits."""
    hold("iter_4")
    trainer = checkpointed(make_trainer, default_hooks={"param_scheduler": None})
    pressed: list[threading.Thread] = []
    at = 6 if function == "after_train_iter" else 5  # the save of iteration 6 waits for that of iteration 4

    @trainer.bus.on("before_train_iter", start=at - 1, once=True)
    def first(event: Event) -> None:
        signal.raise_signal(signal.SIGINT)
        pressed.append(press_inside("result"))

    if function == "after_run":
        trainer.bus.off(next(hook for hook in trainer.hooks if isinstance(hook, CheckpointHook)).after_train)
    ended_by_ctrl_c(trainer)

    pressed[0].join(DEADLINE)
    assert [path.name for path in (tmp_path / "run").glob("*iter_*")] == ["iter_2"]


def test_the_first_interrupt_waits_for_the_save(
    make_trainer: MakeTrainer, hold: Callable[[str], threading.Event], gate: Gate, tmp_path: Path
) -> None:
    """Without `graceful_interrupt` the first Ctrl-C raises, and what is under way is brought to its end."""
    hold("iter_2")
    trainer = checkpointed(make_trainer, writers=[kept := Kept()])

    def let_go() -> None:
        wait_until_inside("result")
        gate.open.set()

    @trainer.bus.on("before_train_iter", start=2, once=True)
    def interrupted(event: Event) -> None:
        threading.Thread(target=let_go).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.train()

    assert load_checkpoint(tmp_path / "run" / "iter_2")["meta"]["iter"] == 2
    assert "CheckpointSaved" in kept.seen
    assert kept.closed


def a_state(megabytes: int = 4) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((megabytes << 18,), 1.0)}}


def test_a_thread_gives_up(hold: Callable[[str], threading.Event], gate: Gate, tmp_path: Path) -> None:
    """A save that is given up in the middle ends at the next piece."""
    entered = hold("a")
    saver = Saver(process=False)
    written = saver.save(a_state(20), Job(tmp_path / "a"))
    assert entered.wait(DEADLINE)
    left = saver.abandon()
    gate.open.set()

    assert left == []
    assert isinstance(written.exception(DEADLINE), SaveGivenUp)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Saver, int]]:
    """A saver whose process has written once, and is stopped; with the process id."""
    no_thread_while_it_starts(monkeypatch)
    saver = Saver()
    saver.save(a_state(1), Job(tmp_path / "zero")).result(DEADLINE)
    assert saver.process is not None
    pid = saver.process.pid
    os.kill(pid, signal.SIGSTOP)
    yield saver, pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def ended(pid: int) -> bool:
    """Wait until a process has ended."""
    end = time.monotonic() + DEADLINE
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.005)
    return True


@pytest.mark.slow
@needs_shared_memory
def test_the_hook_leaves_a_save_to_its_process(
    stopped: tuple[Saver, int],
    make_trainer: MakeTrainer,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """It says so in one line, and announces neither success nor failure, of which it knows nothing."""
    saver, pid = stopped
    hook = CheckpointHook(interval=2)
    hook.saves.saver = saver
    trainer = make_trainer(max_iters=20, hooks=[hook], default_hooks={"trace": None})
    seen = collect(trainer, "checkpoint_saved", "checkpoint_failed")
    press_twice(trainer, 3)

    ended_by_ctrl_c(trainer)

    path = tmp_path / "run" / "iter_2"
    assert warnings_of(caplog) == [f"checkpoint {path} is still being written; its process finishes it"]
    assert seen == []
    os.kill(pid, signal.SIGCONT)
    assert ended(pid)
    assert load_checkpoint(path)["meta"]["iter"] == 2


LEAVES = """
import os, signal, sys, torch
from pathlib import Path
from eventloop.checkpoint.saving import group_writer
from eventloop.checkpoint.saving.saver import Saver
from eventloop.checkpoint.saving.saver_client import Job

group_writer.STARTING_BYTES = -1
saver = Saver()
state = {"state_dict": {"w": torch.ones(1 << 20)}}
written = saver.save(state, Job(Path("first")))  # the process has mapped the memory
written.result(60)
os.kill(saver.process.pid, signal.SIGSTOP)
saver.save(state, Job(Path("second")))
print(saver.process.pid, flush=True)
input()
print([path.name for path in saver.abandon()], flush=True)
"""


@pytest.mark.slow
@needs_shared_memory
def test_a_process_that_is_left_says_nothing(tmp_path: Path) -> None:
    """It ends quietly after the program that left it: no traceback appears on a terminal that is somebody else's."""
    process = Forked(
        ["-c", LEAVES],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": ROOT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    pid = int(process.stdout.readline())
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "['second']\n"
    assert process.wait(60) == 0
    os.kill(pid, signal.SIGCONT)

    assert process.stderr.read() == ""  # until the other process, which has it too, has ended
    process.communicate()
    assert verify_checkpoint(tmp_path / "second").keys == ("state_dict",)


# --- the interpreter's exit --------------------------------------------------------------------------------

SCRIPT = """
import torch
from eventloop import Trainer
from eventloop.checkpoint.disk import Disk
from eventloop.hooks import CheckpointHook
from eventloop.interrupt import graceful_interrupt
from eventloop.checkpoint.retention import pending
from eventloop.checkpoint.saving.saver import Saver

pending.Saver = lambda **options: Saver(process=False, **options)

def held(disk, file, data):
    open("hold").read()

Disk.write = held

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(1, 1)

model = torch.nn.Linear(1, 1 << 20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = Trainer(model, optimizer=optimizer, default_hooks=dict(optimizer=None), max_iters=10**9, work_dir="run",
    train_step=lambda trainer, batch: model(batch).sum(), train_loader=Endless(),
    hooks=[CheckpointHook(interval=2)])
print("built", flush=True)
input()
with graceful_interrupt(trainer, hint="asked once"):
    trainer.train()
"""


@pytest.mark.slow
def test_a_script_ends_although_a_save_hangs(tmp_path: Path) -> None:
    """The interpreter's exit waits for no save that was given up, and does not abort over it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        process.stdout.readline()
        os.mkfifo(tmp_path / "hold")
        process.stdin.write("go\n")
        process.stdin.flush()
        with open(tmp_path / "hold", "wb"):  # opened: the save is under way, and reads from the pipe
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == "asked once\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()

    assert process.returncode == -signal.SIGINT, errors
    assert errors.startswith("checkpoint run/iter_2 was given up; older ones are intact\n")
    assert "\nKeyboardInterrupt\n" in errors
    assert sorted(os.listdir(tmp_path / "run")) == ["costs.json", "heartbeat.json", "run.json"]
