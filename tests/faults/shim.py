"""Stands between the checkpoint store and the disk: every operation of a commit goes by here."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from eventloop.checkpoint import disk
from eventloop.checkpoint.disk import Disk

OPERATIONS = ("make_directory", "create", "write", "sync", "sync_directory", "rename", "remove")
"""The methods of `Disk`."""


@dataclass
class Operation:
    """One call of a method of `Disk`, not made yet.

    Attributes:
        name: of the method.
        path: of what it is called for.
        target: the new name of a rename.
        data: the bytes of a write.
    """

    name: str
    path: Path
    target: Path | None
    data: bytes
    call: Callable[[memoryview], Any]

    def do(self, size: int | None = None) -> Any:
        """Make it; a write with the first `size` bytes alone."""
        return self.call(memoryview(self.data)[:size])

    def halve(self) -> None:
        """Make half of it: write half of the bytes, remove one of the files of a directory."""
        if self.name == "write":
            self.do(len(self.data) // 2)
        elif self.name == "remove" and self.path.is_dir():
            next(iter(sorted(self.path.iterdir()))).unlink()

    def __str__(self) -> str:
        return f"{self.name} {self.path.name}"


Around = Callable[[Operation], Any]


def _operation(name: str, call: Callable[..., Any], disk: Disk, subject: Any, argument: Any) -> Operation:
    path = subject if isinstance(subject, Path) else Path(subject.name)
    if name == "write":
        return Operation(name, path, None, bytes(argument), lambda data: call(disk, subject, data))
    arguments = (disk, subject) if argument is None else (disk, subject, argument)
    return Operation(name, path, argument, b"", lambda data: call(*arguments))


def install(around: Around) -> dict[str, Any]:
    """Let every operation of every `Disk` go by `around`, which makes it or does not; return what was there."""
    former = {name: Disk.__dict__[name] for name in OPERATIONS}

    def wrapper(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda disk, subject, argument=None: around(_operation(name, call, disk, subject, argument))

    for name, call in former.items():
        setattr(Disk, name, wrapper(name, call))
    return former


def clear_durable_directories() -> None:
    """Forget which directories are durable, which would spare their sync and shift the numbers of operations."""
    disk._durable.clear()


@contextmanager
def shimmed(around: Around) -> Iterator[None]:
    """The same for a block."""
    former = install(around)
    try:
        yield
    finally:
        for name, call in former.items():
            setattr(Disk, name, call)


@dataclass
class Record:
    """Makes every operation, and keeps it; the first one of another number may be made to fail.

    Args:
        fail_at: the number of the operation that fails, from 0 on.
        fault: what happens in its place; it may return or raise.
        lasting: all those after it fail too.
    """

    fail_at: int | None = None
    fault: Around | None = None
    lasting: bool = False
    made: list[Operation] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def __call__(self, operation: Operation) -> Any:
        with self.lock:  # syncs come from several threads
            number = len(self.made)
            self.made.append(operation)
        if self.fault is None or self.fail_at is None or number < self.fail_at:
            return operation.do()
        return self.fault(operation) if number == self.fail_at or self.lasting else operation.do()

    @property
    def failed(self) -> Operation:
        """The one that was made to fail."""
        assert self.fail_at is not None
        return self.made[self.fail_at]


@dataclass
class Kill:
    """Kills this process at a point that does not depend on time: the n-th call of a method, before it, in it or
    after it.

    Args:
        parent: the number of the parent, if that is to be killed first.
        mark: a file that is made then.
        file: a pattern; only calls for files or directories, or new names, that match it count.
        spared: this process goes on, and its parent alone is killed.
    """

    name: str
    when: str
    hit: int
    parent: int = 0
    mark: str = ""
    file: str = "*"
    spared: bool = False
    hits: Counter[str] = field(default_factory=Counter)
    lock: Any = field(default_factory=threading.Lock)

    def __call__(self, operation: Operation) -> Any:
        with self.lock:  # syncs come from several threads
            counts = fnmatch((operation.target or operation.path).name, self.file)
            self.hits[operation.name] += counts
            due = counts and operation.name == self.name and self.hits[operation.name] == self.hit
        if due and self.when == "in" and not self.spared:  # else it would be written once and a half
            operation.halve()
        if due and self.when != "after":
            self._die()
        result = operation.do()
        if due:
            self._die()
        return result

    def _die(self) -> None:
        if self.mark:
            Path(self.mark).touch()
        if self.parent > 1 and os.getppid() == self.parent:
            os.kill(self.parent, signal.SIGKILL)
        if not self.spared:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Slow:
    """Makes writes and syncs wait, as on a slow disk.

    Args:
        around: makes the operation afterwards.
        seconds: the longest wait.
    """

    around: Around
    seconds: float
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self, operation: Operation) -> Any:
        if operation.name in ("write", "sync"):
            time.sleep(self.chance.random() * self.seconds)
        return self.around(operation)
