"""A hook that writes the timeline of chosen iterations to files for Perfetto and Chrome's tracing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING
from weakref import ref

from eventloop.bus.recording import Recording
from eventloop.bus.subscription import Subscription
from eventloop.costs.spans import LIMIT, SpanRecorder
from eventloop.costs.waits import waiting
from eventloop.events import AfterTrain, AfterTrainIter, BeforeTrain
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.steering.protocols import CommandError
from eventloop.stops.ending import AT_ONCE_SECONDS, ends_at_once
from eventloop.tracing.chrome import WindowFacts
from eventloop.tracing.files import path_of_iterations, trace_path, write_trace
from eventloop.tracing.window import TraceWindow
from eventloop.util.checks import positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

WRITE_SECONDS = 10.0
"""Seconds for which the end of a run waits for the trace files."""
URGENT_SECONDS = 1.0
"""Seconds for which the end of a run waits for the trace files after a signal: a kill may follow soon."""
Extent = tuple[int, int]
"""The first iteration of a window, and the iteration after its last."""


class TraceHook(Hook):
    """Record phases, events, handlers, background deliveries and queue lengths of chosen iterations.

        default_hooks=dict(trace=dict(begin=100, iterations=50))
        default_hooks=dict(trace=dict(every=10_000))             # 20 iterations of each 10 000
        default_hooks=dict(trace=dict(windows=[(1000, 1020), (50_000, 50_020)]))

    A window is a range of iterations. The hook writes each window to a file in the folder `traces` of the
    work_dir, which Perfetto and chrome://tracing open; `eventloop trace RUN` lists the files. A separate
    thread writes the file when the window's events are delivered, at most two seconds after the window. A
    kill of the process after that does not lose the file.

    Outside of a window nothing is recorded, and after the last window the hook has no subscription. Before a
    window each iteration checks for its start. Within a window an event costs about 2 us more, and each
    handler 1 us. Each rank records the same iterations in a file of its own; `eventloop trace RUN --ranks`
    shows them on one timeline. On a GPU these are the times of the training thread, which runs ahead of the
    device; `ProfilerHook` records kernels.

    Args:
        begin: the number of iterations before the first window, counted from the first iteration of this
            process, so that a resumed run has a window too. If fewer than `begin + iterations` iterations are
            left in the run, the window is at its end.
        iterations: the number of iterations in a window.
        every: the number of iterations from the start of a window to the start of the next; by default there
            is one window.
        windows: instead of the three options above, pairs (first iteration, iteration after the last), where
            the run's first iteration is 0. A resumed run skips windows that are over.
        limit: the most spans, and the most queue lengths, that a window records; more of them are counted,
            not recorded.

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
        self._given_windows = None if windows is None else _sorted_windows(windows)
        self._first: int | None = None  # the first iteration of the first window
        self._subscription: Subscription | None = None  # to the iteration before the next window
        self._window: TraceWindow | None = None
        self._recording: ref[Recording] | None = None  # the background holds it until it is complete
        self._unwritten: list[threading.Event] = []  # for each window an event that its written file sets

    def check(self, trainer: Trainer) -> None:
        """Refuse windows that the run cannot reach.

        Raises:
            ValueError: a window begins after the last iteration.
        """
        max_iters = trainer.max_iters
        for begin, end in self._given_windows or ():
            if max_iters is not None and begin >= max_iters:
                raise ValueError(
                    f"the window ({begin}, {end}) begins after the last iteration of the run, {max_iters - 1}"
                )

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Open a window that contains the first iteration, or subscribe to the start of the next window."""
        if self._first is None:
            self._place_first_window(trainer.iter, trainer.max_iters)
        if self._next_window(trainer.iter) is not None:
            trainer.during_run.callback(self._await_files, trainer)
            # an interrupt may prevent `after_train` from closing the window
            trainer.during_run.callback(self._close_open, trainer)
            self._open_or_subscribe(trainer, trainer.iter)

    def trace_now(self, trainer: Trainer, iterations: int) -> Path:
        """Start to record the next iterations, for a command; return the path that the file will have.

        Raises:
            CommandError: a window is being recorded already.
        """
        if self._window is not None:
            raise CommandError("a trace is being recorded already")
        if self._subscription is not None:
            self._subscription.cancel()
            self._subscription = None
        directory, first = trainer.work_dir.absolute(), trainer.iter
        trainer.during_run.callback(self._await_files, trainer)
        trainer.during_run.callback(self._close_open, trainer)
        self._open(trainer, first, first + iterations)
        if self._window is None:
            raise CommandError("another recording of the bus is open")
        return path_of_iterations(directory, first, iterations)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Close the window that is still open, if there is one."""
        self._close_open(trainer)

    def _close_open(self, trainer: Trainer) -> None:
        """Cancel the subscription to the next window, and close an open window."""
        if self._subscription is not None:
            self._subscription.cancel()
        if self._window is not None:
            self._close(self._window, trainer.work_dir.absolute())

    def _place_first_window(self, iteration: int, max_iters: int | None) -> None:
        """Set the first iteration of the first window, and shorten the windows to a shorter run.

        Args:
            iteration: the first iteration of this process.
            max_iters: the number of iterations in the run; None if unknown.
        """
        begin = self._begin
        if max_iters is not None:
            remaining = max(0, max_iters - iteration)
            self._iterations = min(self._iterations, remaining)
            begin = min(begin, remaining - self._iterations)
        self._first = iteration + begin

    def _next_window(self, iteration: int) -> Extent | None:
        """Return the window that contains `iteration`, cut to begin there, or else the next window."""
        for begin, end in self._given_windows or self._computed_windows(iteration):
            if end > iteration:
                return max(begin, iteration), end
        return None

    def _computed_windows(self, iteration: int) -> list[Extent]:
        """Return the last window that begins at or before `iteration`, and the next one after it.

        Without `every` there is only the first window.
        """
        assert self._first is not None
        if self._every is None:
            begins = [self._first]
        else:
            index = max(0, iteration - self._first) // self._every  # of the window, counted from 0
            begins = [self._first + index * self._every, self._first + (index + 1) * self._every]
        # no window if no iteration is left in the run, for which `_place_first_window` has set 0
        return [(begin, begin + self._iterations) for begin in begins if self._iterations]

    def _open_or_subscribe(self, trainer: Trainer, iteration: int, after: int = 0) -> None:
        """Open a window that contains `iteration`, or subscribe to the start of the next window.

        Args:
            iteration: the next iteration.
            after: nothing is recorded before this iteration, as when another recording is open until then.
        """
        extent = self._next_window(max(iteration, after))
        if extent is None:
            return
        begin, end = extent
        if begin <= iteration:
            self._open(trainer, begin, end)
            return

        def precedes_window(event: AfterTrainIter) -> bool:
            return event.iter >= begin - 1

        self._subscription = trainer.bus.subscribe(
            self._open_next, AfterTrainIter, priority=Priority.LOWEST, when=precedes_window, once=True
        )

    def _open_next(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Open the window that begins with the next iteration."""
        self._subscription = None
        self._open_or_subscribe(trainer, event.iter + 1)

    def _open(self, trainer: Trainer, first: int, end: int) -> None:
        """Record the iterations from `first` until before `end`, unless another recording is open."""
        # absolute, because the program may change its working directory during the window
        directory = trainer.work_dir.absolute()

        def end_window() -> None:
            assert self._window is not None
            self._close(self._window, directory)
            self._open_or_subscribe(trainer, trainer.iter)

        try:
            self._window = TraceWindow(trainer, first, end, self._limit, end_window)
        except RuntimeError as error:  # another recording is open
            logger.warning("iterations %d..%d are not traced: %s", first, end - 1, error)
            self._open_or_subscribe(trainer, first, after=end)

    def _close(self, window: TraceWindow, directory: Path) -> None:
        """Close the window, and have its file written once its events are delivered."""
        self._window = None
        facts, recorder = window.close(), window.recorder
        self._recording = ref(window.recording)
        if not facts.iterations:  # no iteration was completed: the next training opens the window again
            window.recording.stop()
            return
        # appended before `stop`, whose callback may run on another thread when `_await_files` waits already
        written = threading.Event()
        self._unwritten = [*(event for event in self._unwritten if not event.is_set()), written]
        window.recording.stop(lambda: self._start_writing(directory, facts, recorder, written))

    def _start_writing(
        self, directory: Path, facts: WindowFacts, recorder: SpanRecorder, written: threading.Event
    ) -> None:
        """Start a thread that writes the file of a window, and then sets `written`, also after an error."""

        def write() -> None:
            """Write the file, and log an error, which must not end the training."""
            try:
                write_trace(directory, facts, recorder)
            except Exception as error:
                logger.warning("the trace was not written to %s: %s", trace_path(directory, facts), error)
            finally:
                written.set()

        try:
            threading.Thread(target=write, name="eventloop trace", daemon=True).start()
        except RuntimeError:  # Python 3.12 starts no thread once the main thread has ended
            write()

    def _await_files(self, trainer: Trainer) -> None:
        """Wait until the trace files are written; called at the end of a run, when events are delivered."""
        recording = None if self._recording is None else self._recording()
        if recording is not None:
            recording.finish()
        if ends_at_once(trainer):  # by a second Ctrl-C
            seconds = AT_ONCE_SECONDS
        else:
            seconds = WRITE_SECONDS if trainer.bus.overtime else URGENT_SECONDS
        deadline = monotonic() + seconds
        with waiting("background", "the files of TraceHook"):
            all_written = all(event.wait(max(0.0, deadline - monotonic())) for event in self._unwritten)
        if not all_written:
            logger.warning("a trace is still being written, and may be missing")


def _sorted_windows(windows: Sequence[Extent]) -> list[Extent]:
    """Return the windows in ascending order; raise TypeError or ValueError for a wrong or overlapping one."""
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
    for window, next_window in pairwise(pairs):
        if next_window[0] < window[1]:
            raise ValueError(f"the windows {window} and {next_window} overlap")
    return pairs
