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


class Timer:
    """Measure the seconds that one activity takes, in total and per call."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all measurements."""
        self.total_time = self.diff = 0.0
        self.calls = 0
        self._began: float | None = None

    @property
    def average_time(self) -> float:
        """Return the mean seconds of a measurement; 0.0 before the first one."""
        return self.total_time / self.calls if self.calls else 0.0

    @property
    def running(self) -> bool:
        """True between `tic` and `toc`."""
        return self._began is not None

    def tic(self) -> None:
        """Start the timer."""
        self._began = perf_counter()

    def toc(self, average: bool = True) -> float:
        """Stop the timer; return the mean seconds of all measurements, or with `average=False` the last."""
        if self._began is None:
            raise ValueError("toc without tic: the timer is not running")
        self.diff = perf_counter() - self._began
        self.total_time += self.diff
        self.calls += 1
        self._began = None
        return self.average_time if average else self.diff

    def drop(self) -> None:
        """Stop the timer, and discard the measurement."""
        self._began = None


class TestHook(Hook):
    """Time a test, and log its progress and the time left every `logperiod` batches.

        [Testing][range:1-500 of 500][120/500][0.041s = 0.003s + 0.035s + 0.003s][eta: 0:00:15]

    The times are means per batch, of `iter = data + infer + post`. In `trainer.test()` the hook measures
    them: `data` is the wait for the loader, `infer` the model and the metrics, `post` all other handlers of
    the batch. If your code starts and stops one of these timers, the hook does not start or stop that timer.
    Timers with other names are logged in a second line:

        timer = TestHook()
        def val_step(trainer, batch):
            with timer.timing("nms"):      # or timer.tic("nms") ... timer.toc("nms"), or timer.nms_tic() ...
                ...

    Without a trainer, call `tic("iter")` ... `toc("iter")` for each batch, and then `log_stats`.

    Args:
        cfg_filename: text before the line, to distinguish runs.
        logperiod: batches between two lines; the last batch has one too.
        num_warmup: batches at the start of each test that are not measured.
        synchronize: wait for the CUDA device at each toc, as Pet does. False measures the host, which runs
            ahead of the device; True leaves the device idle while the host prepares the next work.

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
        """Number of batches that have begun."""
        self.timers: dict[str, Timer] = {}
        for name in DEFAULT_TIMERS:
            self.add_timer(name)
        self._synchronize = synchronize
        self._user_timers: set[str] = set()  # timers that the user's code starts and stops
        self._lengths: dict[str, int | None] = {}  # number of batches of each test loader

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
        """Reset all timers, and start the warm-up again."""
        self.iter = 0
        for timer in self.timers.values():
            timer.reset()

    def wait(self) -> None:
        """Wait for the CUDA device if there is one."""
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
        """Return `tic` or `toc` of a timer: `hook.nms_tic()` is `hook.tic("nms")`."""
        timer, _, call = name.rpartition("_")
        if timer and call in ("tic", "toc") and not name.startswith("_"):
            return partial(self.tic if call == "tic" else self.toc, timer)
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
        """Log the line of progress and times if it is due, at level INFO on the logger `eventloop`.

        A script shows the line with `logging.basicConfig(level=logging.INFO)`.

        Args:
            cur: number of batches done, counted from 1; a loop that counts from 0 passes `i + 1`.
            start, end, total: the first and last number of this process's part, and the number in total.
            ims_per_gpu: images of a batch, by which the times are divided if `cur` and `end` count images.
            suffix: text after the line.
            log_all: also log the timers other than iter, data, infer and post.
        """
        if self._due(cur, end):
            logger.info("%s", self._line(cur, (start, end, total), ims_per_gpu, suffix, log_all=log_all))

    def _due(self, cur: int, end: int | None) -> bool:
        return cur % self.logperiod == 0 or cur == end

    def _line(
        self, cur: int, span: tuple[int, int | None, int | None], images: int, suffix: str, *, log_all: bool
    ) -> str:
        start, end, total = span
        last, every = ("?" if number is None else number for number in (end, total))
        share = "?" if end is None else end - start + 1
        seconds = [self.timers[name].average_time / images for name in DEFAULT_TIMERS]
        timed = self.timers["iter"].calls > 0
        eta = str(timedelta(seconds=int(seconds[0] * (end - cur)))) if timed and end is not None else "?"
        cfg = f"[{self.cfg_filename}]" if self.cfg_filename else ""
        line = (
            f"{cfg}[Testing][range:{start}-{last} of {every}][{cur}/{share}]"
            f"[{seconds[0]:.3f}s = {seconds[1]:.3f}s + {seconds[2]:.3f}s + {seconds[3]:.3f}s][eta: {eta}]"
        )
        others = [name for name in self.timers if name not in DEFAULT_TIMERS]
        if log_all and others:
            line += "\n|" + "".join(f"{n}: {self.timers[n].average_time / images:.3f}s|" for n in others)
        return line + suffix

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
        self._auto_toc("data")
        self._auto_tic("infer")

    def after_test_iter(self, trainer: Trainer, event: AfterTestIter) -> None:
        """Stop timing the model, and start timing the other handlers."""
        self._auto_toc("infer")
        self._auto_tic("post")

    def _end_batch(self, trainer: Trainer, event: AfterTestIter) -> None:
        self._auto_toc("post")
        self._auto_toc("iter")
        done, length = event.batch_idx + 1, self._lengths.get(event.loader)
        if self._due(done, length):
            log_text(trainer, "", self._line(done, (1, length, length), 1, "", log_all=True))
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._auto_tic("iter")
        self._auto_tic("data")

    def _auto_tic(self, name: str) -> None:
        if name not in self._user_timers:
            self._tic(name)

    def _auto_toc(self, name: str) -> None:
        if name not in self._user_timers and self.timers[name].running:
            self._toc(name)

    def _tic(self, name: str) -> None:
        self.iter += name == "iter"
        timer = self.timers.get(name)
        (timer if timer is not None else self.add_timer(name)).tic()

    def _toc(self, name: str) -> float | None:
        timer = self.timers[name]
        if self.iter <= self.num_warmup:
            timer.drop()
            return None
        if self._synchronize:
            self.wait()
        return timer.toc(average=False)
