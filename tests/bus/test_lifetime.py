"""The edges of a process: exit, fork, pickling."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from eventloop.bus import Bus
from eventloop.bus import process_exit as lifetime
from eventloop.events import AfterTrainIter
from tests import no_threads
from tests.conftest import DEADLINE
from tests.no_threads import AT_EXIT
from tests.support.internals import substitute

Run = Callable[..., subprocess.CompletedProcess[str]]

SETUP = """
import os, sys, threading, time, warnings
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, AfterVal
bus = Bus(drain_timeout=float(os.environ.get("DRAIN", 20)))
async def task(event):
    print("task", event.iter, flush=True)
def function(event):
    print("thread", event.iter, flush=True)
"""


def test_the_exit_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bus has its own time, and all of them no more than the longest: while one is waited for the others deliver.
    The last ones get what a close needs."""
    now, given = 0.0, list[float]()

    def hang(background: object, timeout: float) -> None:
        nonlocal now
        given.append(timeout)
        now += timeout

    buses = {object(): (timeout, lambda: None) for timeout in (3.0, 10.0, 10.0, 2.0)}
    substitute(monkeypatch, "process_exit._open", buses)
    substitute(monkeypatch, "process_exit.close", hang)
    substitute(monkeypatch, "process_exit.monotonic", lambda: now)

    lifetime._drain_all()

    assert given == [3.0, 7.0, lifetime.EXIT_AT_LEAST_SECONDS, lifetime.EXIT_AT_LEAST_SECONDS]


@pytest.mark.parametrize(
    ("drain_timeout", "error", "message"),
    [
        ("10", TypeError, "drain_timeout must be a number of seconds, got '10'"),
        (True, TypeError, "drain_timeout must be a number of seconds, got True"),
        (-1, ValueError, "drain_timeout must be at least 0 seconds, got -1"),
        (float("nan"), ValueError, "drain_timeout must be at least 0 seconds, got nan"),
    ],
)
def test_a_bad_drain_timeout_is_refused(drain_timeout: Any, error: type[Exception], message: str) -> None:
    """At the line that gives it, and not when the bus is closed."""
    with pytest.raises(error, match=message):
        Bus(drain_timeout=drain_timeout)


def lines(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what it printed, once it is clear that it ended well."""
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.splitlines()


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("raise KeyError('mine')", 1, "KeyError: 'mine'\n"),
        ("", 0, ""),
        ("with bus: sys.exit(3)", 3, ""),
    ],
)
def test_exit_without_close_still_drains(python: Run, end: str, status: int, error: str) -> None:
    """However a program ends, what was emitted is delivered to tasks and threads, and `on_close` is called once."""
    program = (
        SETUP
        + f"""
bus.subscribe(task, "after_train_iter", on_close=lambda: print("task closed", flush=True))
bus.subscribe(function, "after_train_iter", offload="thread")
for i in range(100):
    bus.emit(AfterTrainIter(iter=i))
{end}
"""
    )

    ran = python(program)
    printed = ran.stdout.splitlines()

    assert [line for line in printed if line[:4] == "task"] == [
        *(f"task {i}" for i in range(100)),
        "task closed",
    ]
    assert [line for line in printed if line[:6] == "thread"] == [f"thread {i}" for i in range(100)]
    assert ran.returncode == status
    assert ran.stderr.endswith(error)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["thread", None])
def test_exit_does_not_wait_for_a_hung_subscriber(python: Run, offload: str | None) -> None:
    """A thread that hangs, or a coroutine that holds the loop, costs the exit its timeout, and is named."""
    program = (
        SETUP
        + f"""
{"" if offload else "async "}def hangs(event):
    time.sleep(3600)
bus.subscribe(hangs, "after_train_iter", offload={offload!r}, name="hung")
bus.emit(AfterTrainIter())
"""
    )

    ran = python(program, DRAIN="0.2")

    assert ran.returncode == 0
    assert "events left undelivered: hung (1)" in ran.stderr


@pytest.mark.slow
def test_exit_drains_where_no_thread_starts(python: Run, tmp_path: Path) -> None:
    """As from its main thread's end on in Python 3.12: tasks, threads and processes are served, also one whose
    worker starts only then."""
    program = (
        SETUP
        + AT_EXIT
        + """
from tests.support import process_handlers
bus.subscribe(task, "after_train_iter")
bus.subscribe(function, "after_train_iter", offload="thread", queue=16)
bus.subscribe(process_handlers.record, "after_train_iter", offload="process")
for i in range(100):
    bus.emit(AfterTrainIter(iter=i))
"""
    )

    printed = lines(python(program, LOG=str(tmp_path / "log")))

    for kind in ("task", "thread"):
        assert [line for line in printed if line.startswith(kind)] == [f"{kind} {i}" for i in range(100)]
    assert (tmp_path / "log").read_text().split() == [str(i) for i in range(100)]


FORK = (
    SETUP
    + """
bus.subscribe(task, "after_train_iter", on_close=lambda: print("closed in", os.getpid() == parent, flush=True))
bus.subscribe(function, "after_train_iter", offload="thread", overflow="block")
bus.subscribe(lambda event: print("sync", event.iter, flush=True), "after_train_iter")
parent = os.getpid()
bus.emit(AfterTrainIter(iter=1))
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)  # Python 3.12's, of any fork
child = os.fork()
bus.emit(AfterTrainIter(iter=2))
"""
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("leave", ["sys.exit(0)", "os._exit(0)"])
def test_forked_child_writes_nothing_twice(python: Run, leave: str) -> None:
    """A forked child's copy is inert: what was queued and what it emits is delivered by nobody, and it exits."""
    program = (
        FORK
        + f"""
if not child:
    {leave}
status = os.waitpid(child, 0)[1]
bus.close()
print("status", status, flush=True)
"""
    )

    printed = lines(python(program))

    assert sorted(printed) == [
        "closed in True",
        "status 0",
        "sync 1",
        "sync 2",
        "task 1",
        "task 2",
        "thread 1",
        "thread 2",
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_child_may_use_its_bus(python: Run) -> None:
    """Every method of an inert bus returns at once; a sync handler subscribed there works."""
    # nothing is printed during the fork: the child would inherit the lock of stdout, and wait for it for ever
    program = (
        FORK.replace("child = os.fork()", "assert bus.flush(20)\nchild = os.fork()")
        + """
if not child:
    assert not bus.wants(AfterTrainIter) and bus.stats() == [] and bus.plan(AfterTrainIter) == []
    assert bus.signal("after_train_iter").send(event=AfterTrainIter()) == []
    bus.subscribe(lambda event: print("child", event.iter, flush=True), "after_train_iter")
    for i in range(200):
        bus.emit(AfterTrainIter(iter=i))
    assert bus.flush() and bus.close()
    try:
        bus.subscribe(task, "after_train_iter")
    except RuntimeError as error:
        print("child:", error, flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )

    printed = [line for line in lines(python(program)) if line.startswith("child")]

    assert printed[:-1] == [f"child {i}" for i in range(200)]
    assert printed[-1].startswith("child: cannot subscribe task: the bus is closed")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_run_that_begins_in_forks_has_its_subscribers_there(python: Run, tmp_path: Path) -> None:
    """A bridge's bus delivers in each forked child that reopens it, once, and still does in the parent."""
    program = (
        SETUP
        + f"""
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)  # Python 3.12's, of any fork
log = []
async def task(event):
    log.append(f"task {{event.iter}}")
bus.begins_in_forks = True
bus.subscribe(lambda event: log.append(f"sync {{event.iter}}"), "after_train_iter")
bus.subscribe(lambda event: log.append(f"once {{event.iter}}"), "after_train_iter", once=True)
bus.subscribe(task, "after_train_iter")
bus.subscribe(lambda event: log.append(f"thread {{event.iter}}"), "after_train_iter", offload="thread")
children = []
for rank in range(2):
    child = os.fork()
    if not child:
        bus.for_runs = True
        bus.reopen()
        for i in range(2):
            bus.emit(AfterTrainIter(iter=i))
        assert bus.close(20).ok
        open(f"{tmp_path}/{{rank}}", "w").write(", ".join(sorted(log)))
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0] and not log
bus.emit(AfterTrainIter(iter=7))
assert bus.close(20).ok
print(", ".join(sorted(log)), flush=True)
"""
    )

    printed = lines(python(program))

    assert printed == ["once 7, sync 7, task 7, thread 7"]
    ranks = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert ranks == ["once 0, sync 0, sync 1, task 0, task 1, thread 0, thread 1"] * 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_takes_no_events_of_its_parent(python: Run) -> None:
    """The account of a subscriber begins at zero in a child, while the parent delivers what waits in its queue."""
    program = (
        SETUP
        + """
import threading
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)  # Python 3.12's, of any fork
gate, began = threading.Event(), threading.Event()
def slow(event):
    began.set()
    gate.wait(20)
bus.begins_in_forks = True
bus.subscribe(slow, "after_train_iter", offload="thread", queue=2)
for i in range(50):
    bus.emit(AfterTrainIter(iter=i))
assert began.wait(20)
child = os.fork()
gate.set()
if not child:
    bus.for_runs = True
    bus.reopen()
    bus.emit(AfterTrainIter(iter=0))
    assert bus.close(20).ok
    (stats,) = bus.stats()
    os._exit(0 if (stats.delivered, stats.dropped, stats.failed) == (1, 0, 0) else 1)
assert os.waitpid(child, 0)[1] == 0
assert bus.close(20).ok
print(bus.stats()[0].delivered, flush=True)
"""
    )

    assert lines(python(program)) == ["50"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_fork_with_full_queues_and_locks_held(python: Run) -> None:
    """A child forked while the loop is held and a subscriber's lock taken neither hangs nor reports for the parent."""
    program = (
        SETUP
        + """
release = threading.Event()
entered = threading.Event()
async def blocks(event):
    entered.set()
    release.wait(20)
bus.subscribe(blocks, "after_train_iter", stall_timeout=0.05, queue=10000)
bus.subscribe(lambda event: None, "after_val")
bus.emit(AfterTrainIter())
entered.wait(20)
for i in range(2000):
    bus.emit(AfterTrainIter(iter=i)) if not i % 3 else None
subscriber = bus._subscribers._subscriptions[0].subscriber
with subscriber.account.lock:
    child = os.fork()
    if not child:
        for i in range(2000):
            bus.emit(AfterVal())
        sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
release.set()
print("parent ends", flush=True)
"""
    )

    ran = python(program)

    assert (ran.returncode, ran.stdout) == (0, "parent ends\n")


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy], ids=lambda send: send.__name__)
def test_bus_cannot_be_pickled(bus: Bus, send: Callable[[object], object]) -> None:
    """A Dataset that holds the bus fails loudly before it reaches a worker."""
    held = {"dataset": SimpleNamespace(bus=bus)}

    with pytest.raises(TypeError, match="a Bus cannot be pickled: it belongs to the process that made it"):
        send(bus if send is copy.copy else held)


@pytest.mark.parametrize("running", [False, True])
def test_a_subscriber_without_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch, running: bool) -> None:
    """The line that subscribed it says why, and a close has nothing to wait for, whether the loop ran or not."""
    seen: list[int] = []

    async def task(event: AfterTrainIter) -> None:
        seen.append(event.iter)

    bus = Bus(drain_timeout=DEADLINE)
    if running:
        bus.subscribe(task, "after_train_iter")
    no_threads.refuse(monkeypatch)
    with pytest.raises(RuntimeError, match="can't create new thread at interpreter shutdown"):
        bus.subscribe(print, "after_train_iter", offload="thread")
    bus.emit(AfterTrainIter(iter=3))

    assert bus.close(DEADLINE).complete
    assert seen == ([3] if running else [])
    assert [stats.name for stats in bus.stats()] == (["task"] if running else [])


def test_a_loop_that_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line that needs it raises why; a later one may start it."""
    bus = Bus()

    async def task(event: AfterTrainIter) -> None: ...

    def no_descriptors(main: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(anyio, "run", no_descriptors)
        with pytest.raises(RuntimeError, match=r"the background loop could not be started: .*Too many open"):
            bus.subscribe(task, "after_train_iter")
    subscription = bus.subscribe(task, "after_train_iter")
    bus.emit(AfterTrainIter())

    assert bus.close(DEADLINE).complete
    assert subscription.stats.delivered == 1
