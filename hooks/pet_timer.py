"""A hook that times a test with named timers, and logs its progress and the time left, as in Pet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from eventloop.bus import Bus
from eventloop.data.loader_info import named_loaders
from eventloop.events import AfterTestIter, BeforeTestEpoch, BeforeTestIter
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.hooks.log_text import log_text
from eventloop.util.checks import at_least, check_bools, positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

DEFAULT_TIMERS = ("iter", "data", "infer", "post")
"""The names of the timers that the hook runs in a test."""


class Timer:
    """Measure the seconds from each `tic` to its `toc`, in total and on average."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all measurements."""
        self.total_time = self.diff = 0.0
        self.calls = 0
        self._start: float | None = None

    @property
    def average_time(self) -> float:
        """Return the mean seconds of a measurement; 0.0 before the first one."""
        return self.total_time / self.calls if self.calls else 0.0

    @property
    def running(self) -> bool:
        """True between `tic` and `toc`."""
        return self._start is not None

    def tic(self) -> None:
        """Start the timer."""
        self._start = perf_counter()

    def toc(self, average: bool = True) -> float:
        """Stop the timer; return the mean seconds of all measurements, or of the last with `average=False`.

        Raises:
            ValueError: the timer is not running.
        """
        if self._start is None:
            raise ValueError("toc without tic: the timer is not running")
        self.diff = perf_counter() - self._start
        self.total_time += self.diff
        self.calls += 1
        self._start = None
        return self.average_time if average else self.diff

    def drop(self) -> None:
        """Stop the timer, and discard the measurement."""
        self._start = None


class TestHook(Hook):
    """Time a test, and log its progress and the time left every `logperiod` batches.

        [Testing][range:1-500 of 500][120/500][0.041s = 0.003s + 0.035s + 0.003s][eta: 0:00:15]

    The seconds are means per batch, of the timers `iter = data + infer + post`. In `trainer.test()` the hook
    runs these timers: `data` is the wait for the loader, `infer` the model and the metrics, `post` all other
    handlers of the batch. If your code starts and stops one of these timers, the hook does not start or stop
    that timer. Timers with other names are logged in a second line:

        timer = TestHook()
        def val_step(trainer, batch):
            with timer.timing("nms"):      # or timer.tic("nms") ... timer.toc("nms"), or timer.nms_tic() ...
                ...

    Without a trainer, call `tic("iter")` ... `toc("iter")` for each batch, and then `log_stats`.

    Args:
        cfg_filename: text before the line, to distinguish runs.
        logperiod: batches between two lines; a line is also logged after the last batch.
        num_warmup: the number of batches at the start of each test that are not measured.
        synchronize: True waits for the CUDA device at each toc, as Pet does, and so leaves the device idle
            while the host prepares the next work. False measures the host, which runs ahead of the device.

    Raises:
        TypeError, ValueError: `logperiod` is not a positive int, `num_warmup` is not an int of at least 0, or
            `synchronize` is not a bool.
    """

    __test__ = False  # pytest must not collect it as a test class
    priority = Priority.HIGHEST

    def __init__(
        self, cfg_filename: str = "", logperiod: int = 10, num_warmup: int = 5, *, synchronize: bool = False
    ) -> None:
        positive("logperiod", logperiod)
        check_bools(synchronize=synchronize)
        at_least("num_warmup", num_warmup, 0)
        self.cfg_filename, self.logperiod, self.num_warmup = cfg_filename, logperiod, num_warmup
        self.iter = 0
        """The number of batches that have begun."""
        self.timers: dict[str, Timer] = {}
        for name in DEFAULT_TIMERS:
            self.add_timer(name)
        self._synchronize = synchronize
        self._user_timers: set[str] = set()  # the names of timers that the user's code starts and stops
        self._lengths: dict[str, int | None] = {}  # the number of batches of each test loader

    # --- timers --------------------------------------------------------------------------------------------

    def add_timer(self, name: str) -> Timer:
        """Add a timer and return it; `tic` also adds a timer for a new name.

        Raises:
            ValueError: a timer of that name exists.
        """
        if name in self.timers:
            raise ValueError(f"there is a timer {name!r} already: choose another name")
        timer = self.timers[name] = Timer()
        return timer

    def reset_timer(self) -> None:
        """Reset all timers and the count of batches, so that the warm-up begins again."""
        self.iter = 0
        for timer in self.timers.values():
            timer.reset()

    def wait(self) -> None:
        """Wait until the CUDA device, if there is one, has done all queued work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def tic(self, name: str) -> None:
        """Start the timer `name`; `tic("iter")` also counts a batch."""
        self._user_timers.add(name)
        self._tic(name)

    def toc(self, name: str) -> float | None:
        """Stop the timer `name`; return the seconds since its `tic`, or None in the warm-up.

        Raises:
            ValueError: there is no such timer, or it is not running.
        """
        timer = self.timers.get(name)
        if timer is None:
            raise ValueError(f"there is no timer {name!r} to toc: known are {', '.join(self.timers)}")
        if not timer.running:
            raise ValueError(f"the timer {name!r} is not running: call tic first")
        return self._toc(name)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Time the block of a `with` statement."""
        self.tic(name)
        try:
            yield
        finally:
            self.toc(name)

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """Return the function that starts or stops a timer: `hook.nms_tic()` calls `hook.tic("nms")`."""
        timer, _, method = name.rpartition("_")
        if timer and method in ("tic", "toc") and not name.startswith("_"):
            return partial(self.tic if method == "tic" else self.toc, timer)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- the line ------------------------------------------------------------------------------------------

    def log_stats(
        self,
        cur: int,
        start: int,
        end: int,
        total: int,
        ims_per_gpu: int = 1,
        suffix: str = "",
        log_all: bool = False,
    ) -> None:
        """Log the line of progress and times, every `logperiod` batches and after the last batch.

        It is logged at level INFO on the logger `eventloop`, so a script shows it with
        `logging.basicConfig(level=logging.INFO)`.

        Args:
            cur: the number of batches done; a loop whose index `i` begins at 0 passes `i + 1`.
            start, end: the numbers of the first and the last batch that this process tests.
            total: the number of batches of all processes.
            ims_per_gpu: if `cur`, `start`, `end` and `total` count images, the number of images in a batch.
            suffix: text after the line.
            log_all: True also logs the timers other than iter, data, infer and post.
        """
        if self._is_due(cur, end):
            line = self._progress_line(cur, (start, end, total), ims_per_gpu)
            other_timers = self._other_timers_line(ims_per_gpu) if log_all else ""
            logger.info("%s", line + other_timers + suffix)

    def _is_due(self, done: int, end: int | None) -> bool:
        """Return whether a line is logged after `done` batches; `end` is the number of the last batch."""
        return done % self.logperiod == 0 or done == end

    def _progress_line(self, done: int, span: tuple[int, int | None, int | None], images: int) -> str:
        """Return the line of progress and mean times.

        Args:
            done: the number of batches, or images, done.
            span: the first and the last number of this process, and the total number; None if unknown.
            images: the number of images in a batch if these numbers count images, else 1.
        """
        start, end, total = span
        own_total = None if end is None else end - start + 1
        seconds = [self.timers[name].average_time / images for name in DEFAULT_TIMERS]
        is_measured = self.timers["iter"].calls > 0
        eta = timedelta(seconds=int(seconds[0] * (end - done))) if is_measured and end is not None else None
        end_text, total_text, own_total_text, eta_text = (
            "?" if value is None else value for value in (end, total, own_total, eta)
        )
        prefix = f"[{self.cfg_filename}]" if self.cfg_filename else ""
        return (
            f"{prefix}[Testing][range:{start}-{end_text} of {total_text}][{done}/{own_total_text}]"
            f"[{seconds[0]:.3f}s = {seconds[1]:.3f}s + {seconds[2]:.3f}s + {seconds[3]:.3f}s]"
            f"[eta: {eta_text}]"
        )

    def _other_timers_line(self, images: int) -> str:
        """Return a second line with the mean times of the user's own timers; "" without any."""
        others = {name: timer for name, timer in self.timers.items() if name not in DEFAULT_TIMERS}
        if not others:
            return ""
        return "\n|" + "".join(f"{name}: {each.average_time / images:.3f}s|" for name, each in others.items())

    # --- in the trainer's test -----------------------------------------------------------------------------

    def attach(self, bus: Bus) -> None:
        """Subscribe the event methods, and a handler that ends a batch after all other handlers."""
        super().attach(bus)
        bus.subscribe(self._end_batch, AfterTestIter, priority=Priority.LOWEST, budget_us=self.budget_us)

    def before_test_epoch(self, trainer: Trainer, event: BeforeTestEpoch) -> None:
        """Reset the timers, and start to time the wait for the first batch."""
        self.reset_timer()
        loaders = named_loaders(trainer.test_loader)
        self._lengths = {name: trainer.limits.length("test", loader) for name, loader in loaders.items()}
        self._begin_batch()

    def before_test_iter(self, trainer: Trainer, event: BeforeTestIter) -> None:
        """Stop timing the wait for the batch, and start timing the model."""
        self._stop_own("data")
        self._start_own("infer")

    def after_test_iter(self, trainer: Trainer, event: AfterTestIter) -> None:
        """Stop timing the model, and start timing the other handlers."""
        self._stop_own("infer")
        self._start_own("post")

    def _end_batch(self, trainer: Trainer, event: AfterTestIter) -> None:
        """Stop the timers of this batch, log the line if it is due, and start the timers of the next."""
        self._stop_own("post")
        self._stop_own("iter")
        done, length = event.batch_idx + 1, self._lengths.get(event.loader)
        if self._is_due(done, length):
            span = 1, length, length  # this process tests the batches 1 to `length`, which are all
            line = self._progress_line(done, span, images=1)  # 1, because `done` and `span` count batches
            log_text(trainer, "", line + self._other_timers_line(images=1))
        self._begin_batch()

    def _begin_batch(self) -> None:
        """Start to time a batch, and its first part, the wait for the loader."""
        self._start_own("iter")
        self._start_own("data")

    def _start_own(self, name: str) -> None:
        """Start a timer of this hook; do nothing if the user's code starts and stops the timer."""
        if name not in self._user_timers:
            self._tic(name)

    def _stop_own(self, name: str) -> None:
        """Stop a running timer of this hook; do nothing if the user's code starts and stops the timer."""
        if name not in self._user_timers and self.timers[name].running:
            self._toc(name)

    def _tic(self, name: str) -> None:
        """Start a timer, and create it at its first use; count the iterations."""
        if name == "iter":
            self.iter += 1
        timer = self.timers.get(name)
        if timer is None:
            timer = self.add_timer(name)
        timer.tic()

    def _toc(self, name: str) -> float | None:
        """Stop a running timer, and return its seconds; in the warm-up discard them, and return None."""
        timer = self.timers[name]
        if self.iter <= self.num_warmup:
            timer.drop()
            return None
        if self._synchronize:
            self.wait()
        return timer.toc(average=False)
