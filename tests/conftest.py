"""What the tests share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import torch

from eventloop.bus import Bus
from eventloop.checkpoint.saving.saver import Saver
from tests import forked
from tests.support.internals import substitute
from tests.support.trainers import (
    default_handlers,
    ended,
    gate,
    late,
    make_saver,
    make_trainer,
    reads,
    received,
    stuck,
)

__all__ = [
    "default_handlers",
    "ended",
    "gate",
    "late",
    "make_saver",
    "make_trainer",
    "reads",
    "received",
    "stuck",
]

count_frozen = gc.get_freeze_count
"""It counts them one by one, some 30 ms: too long for every training of the tests, which are told a number."""

DEADLINE = 60.0
"""Seconds against hangs; no test waits as long while all is well."""

sys.dont_write_bytecode = False  # else each of some hundred processes compiles some hundred modules again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if "PYTEST_XDIST_WORKER" in os.environ:  # there is one for each core
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the first n cases of a `representative(n)` test in the fast suite, and mark the others slow."""
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        marker = item.get_closest_marker("representative")
        if marker is not None:
            test = item.path, item.name.partition("[")[0]
            cases[test] += 1
            if cases[test] > marker.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def frozen() -> Iterator[None]:
    """A training of the tests lasts milliseconds: too short for the long collection at its begin that pays off in a
    real one. Where somebody has frozen objects, GarbageCollectionHook leaves that to him."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.sum().backward()
    torch.optim.SGD([parameter]).step()  # imports half of torch: objects that would be walked again and again
    gc.collect()
    gc.freeze()
    count = count_frozen()
    gc.get_freeze_count = lambda: count
    yield
    if "triton" in sys.modules:  # see tests.fork_server
        gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> None:
    """Freeze what the modules before this one have imported: each validation of a training collects, and would walk it,
    which was two fifths of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def children() -> Iterator[None]:
    """What is started by a test hears of Ctrl-C, also where the suite does not, as in a script's background: a
    handler is not inherited, "ignore" is. Scripts that are forked have a server, which ends with the session."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    forked.end()


@pytest.fixture(autouse=True)
def saver_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread write the checkpoints of hooks, unless a test is slow or marked `saver_process`.

    A process takes 0.1 s to start, longer than most trainings of the tests.
    """
    if not any(request.node.get_closest_marker(name) for name in ("slow", "saver_process")):
        substitute(monkeypatch, "pending.Saver", partial(Saver, process=False))


@pytest.fixture
def bus() -> Iterator[Bus]:
    """A bus, closed at the end of the test."""
    with Bus(drain_timeout=DEADLINE) as bus:
        yield bus


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program in an interpreter of its own, in an empty folder, and return what it printed."""

    def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        root = str(Path(__file__).parents[1])
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={"PATH": "", "PYTHONPATH": root, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Wait, at the end of the test, for the threads that its buses have started; another test counts its own."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("eventloop "):
            thread.join(DEADLINE)
            assert not thread.is_alive(), thread


class Held:
    """A background subscriber that waits, from its first delivery on, until it is let go."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __call__(self, event: Any) -> None:
        self.entered.set()
        self.gate.wait(DEADLINE)
        self.seen.append(event)

    async def in_a_task(self, event: Any) -> None:
        """The same as a coroutine, which leaves the loop free."""
        self.entered.set()
        await anyio.to_thread.run_sync(self.gate.wait, DEADLINE, abandon_on_cancel=True)
        self.seen.append(event)

    async def on_the_loop(self, event: Any) -> None:
        """A coroutine that blocks the loop, which it should not."""
        self(event)

    def let_go(self) -> None:
        """Let every delivery return."""
        self.gate.set()


@pytest.fixture
def held(bus: Bus) -> Iterator[Held]:
    """A subscriber that hangs, let go before its bus is closed."""
    held = Held()
    yield held
    held.let_go()
