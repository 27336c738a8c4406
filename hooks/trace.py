"""A hook that records windows of iterations as files for Perfetto and Chrome's tracing."""

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
"""Seconds that the end of a run waits for the trace files."""
URGENT_SECONDS = 1.0
"""The same after a signal, when the program may be killed soon."""
Extent = tuple[int, int]
"""The first iteration of a window, and the one after its last."""


class TraceHook(Hook):
    """Record windows of iterations: phases, events, handlers, background deliveries and queue lengths.

        default_hooks=dict(trace=dict(begin=100, iterations=50))
        default_hooks=dict(trace=dict(every=10_000))             # 20 iterations of each 10 000
        default_hooks=dict(trace=dict(windows=[(1000, 1020), (50_000, 50_020)]))

    Each window is a file in the folder `traces` of the work_dir, which Perfetto and chrome://tracing open;
    `eventloop trace RUN` lists them. A separate thread writes the file when the window's events are
    delivered, at most two seconds after the window. From then on the file survives a kill of the process.

    Outside of a window nothing is recorded, and after the last one the hook has no subscription left. Before
    a window each iteration checks for its start. Within a window an event costs about 2 us more, and each
    handler 1 us. Each rank records the same iterations in a file of its own; `eventloop trace RUN --ranks`
    puts them on one timeline. On a GPU these are the times of the training thread, which runs ahead of the
    device; `ProfilerHook` records kernels.

    Args:
        begin: iterations before the first window, counted from where this process begins to train, so that a
            resumed run has a window too. If fewer than `begin + iterations` are left in the run, the last
            ones are recorded.
        iterations: the length of a window.
        every: begin another window every so many iterations; by default there is one.
        windows: in place of the three options above, pairs (first iteration, the one after the last) of the
            run, 0-based. A resumed run leaves out windows that are already over.
        limit: the most spans, and the most queue lengths, that a window records; further ones are only
            counted.

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
        self._first: int | None = None  # the first iteration of the first window
        self._waiting: Subscription | None = None
        self._window: TraceWindow | None = None
        self._recording: ref[Recording] | None = None  # the background owns it until it is complete
        self._unwritten: list[threading.Event] = []  # each is set once the file of a window is written

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
        """Open a window if the first iteration is in it, else subscribe to the start of the next window."""
        if self._first is None:
            self._begin_at(trainer.iter, trainer.max_iters)
        if self._next_window(trainer.iter) is not None:
            trainer.during_run.callback(self._end_run, trainer)
            trainer.during_run.callback(
                self._close_open, trainer
            )  # also after an interrupt before after_train
            self._open_or_wait(trainer, trainer.iter)

    def trace_now(self, trainer: Trainer, iterations: int) -> Path:
        """Record the next iterations, and return the path that their file will have; a command asks for it.

        Raises:
            CommandError: a window is being recorded already.
        """
        if self._window is not None:
            raise CommandError("a trace is being recorded already")
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        run, first = trainer.work_dir.absolute(), trainer.iter
        trainer.during_run.callback(self._end_run, trainer)
        trainer.during_run.callback(self._close_open, trainer)
        self._open(trainer, first, first + iterations)
        if self._window is None:
            raise CommandError("another recording of the bus is open")
        return path_of_iterations(run, first, iterations)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Close a window whose end the training does not reach."""
        self._close_open(trainer)

    def _close_open(self, trainer: Trainer) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        if self._window is not None:
            self._close(self._window, trainer.work_dir.absolute())

    def _begin_at(self, start: int, total: int | None) -> None:
        """Set the first iteration of the first window, for a run that starts or resumes at `start`.

        `total` is the number of iterations in the run, None if unknown.
        """
        begin = self._begin
        if total is not None:
            left = max(0, total - start)
            self._iterations = min(self._iterations, left)
            begin = min(begin, left - self._iterations)
        self._first = start + begin

    def _next_window(self, iteration: int) -> Extent | None:
        """Return the rest of the window that contains `iteration`, or else the next window."""
        assert self._first is not None
        windows = self._given
        if windows is None:
            each = self._every or 0
            passed = max(0, iteration - self._first) // each if each else 0
            begins = dict.fromkeys((self._first + passed * each, self._first + (passed + 1) * each))
            windows = [(begin, begin + self._iterations) for begin in begins]
        later = ((max(begin, iteration), end) for begin, end in windows)
        return next(((begin, end) for begin, end in later if begin < end), None)

    def _open_or_wait(self, trainer: Trainer, iteration: int, after: int = 0) -> None:
        """Open a window if it contains `iteration`, else subscribe to the start of the next window.

        Args:
            after: leave out windows, or their parts, before this iteration.
        """
        extent = self._next_window(max(iteration, after))
        if extent is None:
            return
        begin, end = extent
        if begin <= iteration:
            self._open(trainer, begin, end)
            return

        def window_begins(event: AfterTrainIter) -> bool:
            return event.iter >= begin - 1

        self._waiting = trainer.bus.subscribe(
            self._last_before, AfterTrainIter, priority=Priority.LOWEST, when=window_begins, once=True
        )

    def _last_before(self, trainer: Trainer, event: AfterTrainIter) -> None:
        self._waiting = None
        self._open_or_wait(trainer, event.iter + 1)

    def _open(self, trainer: Trainer, first: int, end: int) -> None:
        run = trainer.work_dir.absolute()  # now: the program may change its working directory

        def over() -> None:
            assert self._window is not None
            self._close(self._window, run)
            self._open_or_wait(trainer, trainer.iter)

        try:
            self._window = TraceWindow(trainer, first, end, self._limit, over)
        except RuntimeError as error:  # another recording is open
            logger.warning("iterations %d..%d are not traced: %s", first, end - 1, error)
            self._open_or_wait(trainer, first, after=end)

    def _close(self, window: TraceWindow, run: Path) -> None:
        """End the window; its file is written once its events are delivered."""
        self._window = None
        facts, recorder = window.close(), window.recorder
        self._recording = ref(window.recording)
        if not facts.iterations:  # the next training opens it again
            window.recording.stop()
            return
        done = threading.Event()  # noted here: the background may end the recording while the run ends
        self._unwritten = [*(each for each in self._unwritten if not each.is_set()), done]
        window.recording.stop(lambda: self._write_soon(run, facts, recorder, done))

    def _write_soon(
        self, run: Path, facts: WindowFacts, recorder: SpanRecorder, done: threading.Event
    ) -> None:
        """Start a thread that writes the file of a window."""

        def write() -> None:
            try:
                write_trace(run, facts, recorder)
            except Exception as error:
                logger.warning("the trace was not written to %s: %s", trace_path(run, facts), error)
            finally:
                done.set()

        try:
            threading.Thread(target=write, name="eventloop trace", daemon=True).start()
        except RuntimeError:  # Python 3.12 starts no thread once the main thread has ended
            write()

    def _end_run(self, trainer: Trainer) -> None:
        """Wait until the trace files are written; called when every event is delivered."""
        recording = None if self._recording is None else self._recording()
        if recording is not None:
            recording.finish()
        patience = WRITE_SECONDS if trainer.bus.overtime else URGENT_SECONDS
        end = monotonic() + (AT_ONCE_SECONDS if ends_at_once(trainer) else patience)
        with waiting("background", "the files of TraceHook"):
            written = all(done.wait(max(0.0, end - monotonic())) for done in self._unwritten)
        if not written:
            logger.warning("a trace is still being written, and may be missing")


def _sorted_windows(windows: Sequence[Extent]) -> list[Extent]:
    """Check the windows, and return them in ascending order."""
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
