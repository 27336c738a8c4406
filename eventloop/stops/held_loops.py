"""Store the generators of a hand-written loop, so that `Trainer.close` can close an unfinished loop."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator, Sequence
from typing import Any
from weakref import ref


class HeldLoops:
    """Weak references to the generators of one hand-written loop, the outermost first, and its thread."""

    def __init__(self) -> None:
        self._loops: list[ref[Generator[Any]]] = []  # the generator of epochs, then those of batches
        self.thread = threading.current_thread()

    def begin(self, loop: Generator[Any]) -> None:
        """Store the generator of the epochs of a new loop, and drop those of an earlier loop."""
        self._loops = [ref(loop)]

    def add(self, loop: Generator[Any]) -> None:
        """Store a generator of the batches of an epoch."""
        self._loops.append(ref(loop))

    def may_be_closed(self) -> bool:
        """Return whether there is an unfinished loop that the calling thread may close.

        The outermost generator must be suspended and no generator running. The loop must belong to this
        thread, or to a thread that has ended.
        """
        generators = [each for reference in self._loops if (each := reference()) is not None]
        states = [inspect.getgeneratorstate(generator) for generator in generators]
        is_suspended = states[:1] == [inspect.GEN_SUSPENDED] and inspect.GEN_RUNNING not in states
        return is_suspended and (self.thread is threading.current_thread() or not self.thread.is_alive())

    def close(self) -> None:
        """Close all generators."""
        _close(self._loops)

    def close_inner(self) -> None:
        """Close the generators of batches, so that they do not continue in the next run."""
        _close(self._loops[1:])


def _close(loops: Sequence[ref[Generator[Any]]]) -> None:
    """Close generators, the innermost first; skip a generator that is executing."""
    for reference in reversed(loops):
        generator = reference()
        if generator is not None and not generator.gi_running:
            generator.close()
