"""Hold the generators of a hand-written loop, so that `Trainer.close` can end an unfinished loop."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator, Sequence
from typing import Any
from weakref import ref


class HeldLoops:
    """The generators of one hand-written loop, the outermost first, and the thread of its run."""

    def __init__(self) -> None:
        self._loops: list[ref[Generator[Any]]] = []
        self.thread = threading.current_thread()

    def begin(self, loop: Generator[Any]) -> None:
        """Hold the generator of the epochs, in place of those of an earlier loop."""
        self._loops = [ref(loop)]

    def add(self, loop: Generator[Any]) -> None:
        """Hold a generator of batches within the epochs."""
        self._loops.append(ref(loop))

    def may_be_closed(self) -> bool:
        """Return whether the calling thread may close a loop that is under way.

        It may if the loop's generator is suspended, and the loop runs on this thread or its thread has
        ended.
        """
        states = [inspect.getgeneratorstate(loop) for held in self._loops if (loop := held()) is not None]
        waits = states[:1] == [inspect.GEN_SUSPENDED] and inspect.GEN_RUNNING not in states
        return waits and (self.thread is threading.current_thread() or not self.thread.is_alive())

    def close(self) -> None:
        """Close all generators."""
        _close(self._loops)

    def close_inner(self) -> None:
        """Close the generators of batches: they must not continue in the next run."""
        _close(self._loops[1:])


def _close(loops: Sequence[ref[Generator[Any]]]) -> None:
    """Close generators, the innermost first. Skip a generator that is executing."""
    for held in reversed(loops):
        loop = held()
        if loop is not None and not loop.gi_running:
            loop.close()
