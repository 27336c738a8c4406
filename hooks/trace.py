"""A hook that records windows of iterations, which `eventloop trace` converts for a viewer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain, count, pairwise
from typing import TYPE_CHECKING
from weakref import ref

from eventloop.bus.recording import Recording
from eventloop.bus.subscription import Subscription
from eventloop.costs.spans import LIMIT, SpanRecorder
from eventloop.events import AfterTrain, AfterTrainIter, BeforeTrain
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.tracing.window import TraceWindow
from eventloop.tracing.writer import TraceWriter
from eventloop.training.scopes import AT_ONCE_SECONDS, ends_at_once
from eventloop.util.checks import positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

WRITE_SECONDS = 10.0
"""Seconds that the end of a run waits for the trace file."""
Extent = tuple[int, int]
"""The first iteration of a window, and the one after its last."""


class TraceHook(Hook):
    """Record windows of iterations: phases, events, handlers, background deliveries and queue lengths.

        default_hooks=dict(trace=dict(begin=100, iterations=50))
        default_hooks=dict(trace=dict(every=10_000))             # 20 iterations of each 10 000
        default_hooks=dict(trace=dict(windows=[(1000, 1020), (50_000, 50_020)]))

    `eventloop trace RUN -o trace.json` converts the recording to the format of Perfetto and Chrome's tracing.
    A thread of its own appends the windows to `trace.jsonl` in the work_dir. The training thread's part is
    written when the window ends, and survives a kill of the process after that. Deliveries of the window's
    events are recorded for two more seconds at most.

    Outside of a window nothing is recorded, and after the last one the hook has no subscription left. Before
    a window each iteration checks for its start. Within a window an event costs about 2 us more, and each
    handler 1 us. Only rank 0 records, because it writes. On a GPU these are the times of the training thread,
    which runs ahead of the device; `ProfilerHook` records kernels.

    Args:
        begin: iterations before the first window, counted from where this process begins to train, so that a
            resumed run has a window too. If fewer than `begin + iterations` are left in the run, the last
            ones are recorded.
        iterations: the length of a window.
        every: begin another window every so many iterations; by default there is one.
        windows: in place of the three options above, pairs (first iteration, the one after the last) of the
            run, 0-based. A resumed run leaves out windows that are already over.
        limit: the most spans, and queue lengths, of a window; further ones are counted and left out.

    Raises:
        TypeError, ValueError: windows overlap, or a number is of the wrong type or out of range.
    """

    priority = Priority.HIGHEST

    def __init__(
        self,
        begin: int = 20,
        iterations: int = 20,
        *,
        every: int | None = None,
        windows: Sequence[tuple[int, int]] | None = None,
        limit: int = LIMIT,
    ) -> None:
        if windows is not None and (begin, iterations, every) != (20, 20, None):
            raise ValueError("windows excludes begin, iterations and every: pass windows, or the other three")
        if isinstance(begin, bool) or not isinstance(begin, int):
            raise TypeError(f"begin must be a number of iterations, got {begin!r}")
        if begin < 0:
            raise ValueError(f"begin must be at least 0 iterations, got {begin}")
        positive("iterations", iterations)
        if every is not None:
            positive("every", every)
            if every < iterations:
                raise ValueError(f"windows of {iterations} iterations every {every} would overlap")
        SpanRecorder(limit)  # raises for an invalid limit
        self._begin, self._iterations, self._every, self._limit = begin, iterations, every, limit
        self._given = None if windows is None else _sorted_windows(windows)
        self._later_windows: Iterator[Extent] | None = None
        self._next: Extent | None = None
        self._waiting: Subscription | None = None
        self._window: TraceWindow | None = None
        self._recording: ref[Recording] | None = None  # the background owns it until it is complete
        self._writer: TraceWriter | None = None

    def check(self, trainer: Trainer) -> None:
        """Refuse windows that the run cannot reach.

        Raises:
            ValueError: a window begins after the last iteration.
        """
        total = trainer.max_iters
        for begin, end in self._given or ():
            if total is not None and begin >= total:
                raise ValueError(
                    f"the window ({begin}, {end}) begins after the last iteration of the run, {total - 1}"
                )

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Start the trace writer, and open the next window or wait for it."""
        if trainer.rank != 0:
            return
        if self._later_windows is None:
            self._later_windows = self._extents(trainer.iter, trainer.max_iters)
            self._next = next(self._later_windows, None)
        if self._next is not None:
            self._writer = TraceWriter(trainer.work_dir.absolute())
            trainer.during_run.callback(self._end_run, trainer)
            self._open_or_wait(trainer, trainer.iter)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Close a window whose end the training does not reach."""
        if self._waiting is not None:
            self._waiting.cancel()
        if self._window is not None:
            self._close(self._window)

    def _extents(self, start: int, total: int | None) -> Iterator[Extent]:
        """Return the windows from iteration `start` on, in a run of `total` iterations."""
        if self._given is not None:
            return iter([(max(begin, start), end) for begin, end in self._given if end > start])
        begin, iterations = self._begin, self._iterations
        if total is not None:
            left = total - start
            begin, iterations = min(begin, max(0, left - iterations)), min(iterations, left)
        if iterations < 1:
            return iter(())
        begins = [start + begin] if self._every is None else count(start + begin, self._every)
        return ((first, first + iterations) for first in begins)

    def _open_or_wait(self, trainer: Trainer, iteration: int) -> None:
        """Open the next window if the next iteration, `iteration`, is in it, else wait for it."""
        assert self._later_windows is not None
        while self._next is not None and self._next[1] <= iteration:  # skipped by a loaded checkpoint
            self._next = next(self._later_windows, None)
        if self._next is None:
            return
        begin, _ = self._next
        if begin <= iteration:
            self._open(trainer, iteration)
            return

        def window_begins(event: AfterTrainIter) -> bool:
            return event.iter >= begin - 1

        self._waiting = trainer.bus.subscribe(
            self._last_before, AfterTrainIter, priority=Priority.LOWEST, when=window_begins, once=True
        )

    def _last_before(self, trainer: Trainer, event: AfterTrainIter) -> None:
        self._waiting = None
        self._open(trainer, event.iter + 1)

    def _open(self, trainer: Trainer, first: int) -> None:
        assert self._next is not None
        assert self._later_windows is not None
        (_, end), self._next = self._next, next(self._later_windows, None)

        def over() -> None:
            assert self._window is not None
            self._close(self._window)
            self._open_or_wait(trainer, trainer.iter)

        try:
            self._window = TraceWindow(trainer, first, end, self._limit, over)
        except RuntimeError as error:  # another recording is open
            logger.warning("iterations %d..%d are not traced: %s", first, end - 1, error)
            self._open_or_wait(trainer, first)

    def _close(self, window: TraceWindow) -> None:
        """Write the training thread's part now, and the background's when its deliveries are recorded."""
        self._window, writer = None, self._writer
        assert writer is not None
        facts, recorder, last = window.leave(), window.recorder, self._next is None

        def close() -> None:
            writer.close_window(facts.key, recorder)
            if last:
                writer.end_soon()

        self._recording = ref(window.recording)
        if window.iterations:
            writer.write(facts, recorder)
            window.recording.stop(close)
        else:  # the training ended before the window's first iteration: the next training opens it again
            window.recording.stop()
            self._return_window(window.extent)

    def _return_window(self, extent: Extent) -> None:
        assert self._later_windows is not None
        self._later_windows = (
            self._later_windows if self._next is None else chain([self._next], self._later_windows)
        )
        self._next = extent

    def _end_run(self, trainer: Trainer) -> None:
        """Complete the trace file after everything was delivered."""
        recording = None if self._recording is None else self._recording()
        if recording is not None:
            recording.finish()
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.end_soon()
        if not writer.join(AT_ONCE_SECONDS if ends_at_once(trainer) else WRITE_SECONDS):
            logger.warning("the trace is still being written, and may be incomplete")


def _sorted_windows(windows: Sequence[Extent]) -> list[Extent]:
    """Check the windows, and return them in ascending order.

    Raises:
        TypeError, ValueError: an element is not a pair, a window is empty, or windows overlap.
    """
    pairs: list[Extent] = []
    for window in windows:
        pair = tuple(window) if isinstance(window, list | tuple) else ()
        if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in pair):
            raise TypeError(f"windows must be pairs (first iteration, one after the last), got {window!r}")
        begin, end = pair
        if not 0 <= begin < end:
            raise ValueError(f"a window must begin at 0 or above and before its end, got {window!r}")
        pairs.append((begin, end))
    if not pairs:
        raise ValueError("windows is empty: use default_hooks=dict(trace=None) to remove the hook")
    pairs.sort()
    for one, other in pairwise(pairs):
        if other[0] < one[1]:
            raise ValueError(f"the windows {one} and {other} overlap")
    return pairs
