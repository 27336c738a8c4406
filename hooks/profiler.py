"""Where the time and the memory of the first iterations go, by PyTorch's profiler."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler
from torch.profiler import schedule as torch_schedule

from eventloop.events import AfterTrain, AfterTrainEpoch, AfterTrainIter, BeforeTrainEpoch
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.hooks.report import report
from eventloop.util.checks import check_bools, check_optional_bools, length_of, positive
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

TraceHandler = Callable[[profile], object]

_TRACE_TYPES = ["log_trace", "tb_trace"]
_TRACE_OPTIONS = {
    "log_trace": ["sort_by", "row_limit", "max_src_column_width", "max_name_column_width",
                  "max_shapes_column_width", "header", "top_level_events_only"],
    "tb_trace": ["dir_name", "worker_name", "use_gzip"],
}  # fmt: skip


class ProfilerHook(Hook):
    """Profiles the first iterations, or the first epoch, of a training with `torch.profiler`.

        ProfilerHook(by_epoch=False, profile_times=20, json_trace_path="trace.json")
        ProfilerHook(by_epoch=False, profile_times=8, schedule=dict(wait=2, warmup=2, active=4, repeat=1),
                     on_trace_ready=dict(type="log_trace", sort_by="self_cpu_time_total", row_limit=20))

    It begins with the first epoch that is trained, so loading a checkpoint is no part of it, a resumed run is profiled
    where it goes on, and every iteration is one step of `schedule`. It ends early with the training, whatever ends
    that. The training thread makes the trace, and is slowed down by the profiling itself.

    Args:
        by_epoch: the unit of `profile_times`; by default that of the run.
        profile_times: how much to profile; one epoch at most, whose trace is large already.
        activity_with_cpu, activity_with_cuda: what is recorded.
        schedule: arguments of `torch.profiler.schedule`: `wait`, `warmup`, `active`, `repeat`, `skip_first`; by
            default everything is one trace.
        on_trace_ready: what to do with each trace: a function of the profiler; `dict(type="log_trace", ...)` with the
            arguments of `key_averages().table()`, said as a text `profile`; `dict(type="tb_trace", dir_name=...)` for
            TensorBoard's plugin, `tf_tracing_logs` by default; or a path, the same as `json_trace_path`.
        record_shapes, profile_memory, with_stack, with_flops: as for `torch.profiler.profile`.
        json_trace_path: a file for Chrome's and Perfetto's viewers; the second trace of a schedule goes to
            `trace_2.json`, that of rank 1 to `trace_rank1.json`. A ".gz" at its end compresses it.

    Paths are relative to the trainer's work_dir.

    Raises:
        TypeError, ValueError: arguments that contradict each other: see the message.
    """

    priority = Priority.VERY_LOW

    def __init__(
        self,
        *,
        by_epoch: bool | None = None,
        profile_times: int = 1,
        activity_with_cpu: bool = True,
        activity_with_cuda: bool = False,
        schedule: Mapping[str, int] | None = None,
        on_trace_ready: TraceHandler | Mapping[str, Any] | str | PathLike[str] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        json_trace_path: str | PathLike[str] | None = None,
    ) -> None:
        positive("profile_times", profile_times)
        check_optional_bools(by_epoch=by_epoch)
        flags = {
            "record_shapes": record_shapes, "profile_memory": profile_memory,
            "with_stack": with_stack, "with_flops": with_flops,
        }  # fmt: skip
        check_bools(activity_with_cpu=activity_with_cpu, activity_with_cuda=activity_with_cuda, **flags)
        self._by_epoch, self._times = by_epoch, profile_times
        if isinstance(on_trace_ready, str | PathLike):
            if json_trace_path is not None:
                raise ValueError("on_trace_ready and json_trace_path are two paths of one trace: give one")
            on_trace_ready, json_trace_path = None, on_trace_ready
        _check_handler(on_trace_ready, json_trace_path)
        self._on_trace_ready = on_trace_ready
        self._json_path = None if json_trace_path is None else Path(json_trace_path)
        self._options: dict[str, Any] = {
            "activities": _activities(cpu=activity_with_cpu, cuda=activity_with_cuda),
            "schedule": _schedule(schedule), **flags,
        }  # fmt: skip
        self._needs = _steps_to_first_trace(schedule)
        self._profile: profile | None = None
        self._advance: Callable[[], None] | None = None
        self._done = False
        self._total = self._left = self._traces = 0

    def check(self, trainer: Trainer) -> None:
        """Settle the unit, and refuse what would give no trace, or never end.

        Raises:
            ValueError: the run is shorter than what is to be profiled, or that shorter than the schedule.
        """
        by_epoch = trainer.by_epoch if self._by_epoch is None else self._by_epoch
        if by_epoch and not trainer.by_epoch:
            raise ValueError(
                "ProfilerHook(by_epoch=True) in a run measured in iterations would profile all of it: leave by_epoch out"
            )
        if by_epoch and self._times > 1:
            raise ValueError(
                f"ProfilerHook profiles one epoch at most, got profile_times={self._times} epochs: for iterations say "
                "by_epoch=False"
            )
        total, steps = trainer.max_iters, length_of(trainer.train_loader) if by_epoch else self._times
        if not by_epoch and total is not None and self._times > total:
            raise ValueError(f"profile_times={self._times} is more than the {total} iterations of the run")
        if steps is not None and steps < self._needs:
            raise ValueError(
                f"the schedule needs {self._needs} iterations for a trace (skip_first + wait + warmup + active), and "
                f"{steps} are profiled: raise profile_times, or shorten the schedule"
            )
        self._by_epoch = by_epoch

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Begin, in the first epoch."""
        if self._done or self._profile is not None:
            return
        ready = None
        if self._on_trace_ready is not None or self._json_path is not None:
            ready = partial(self._trace_ready, trainer)
        profiler = self._profile = profile(on_trace_ready=ready, **self._options)
        self._advance = self._step_of(profiler)
        self._total = self._left = 0 if self._by_epoch else self._times
        profiler.__enter__()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """One more step; end after the last one."""
        if self._profile is None:
            return
        if not self._total:
            # known since the pass is open; -1 never comes down to 0: the end of the epoch ends its profile
            self._total = self._left = trainer.position.length or -1
        self._left -= 1
        if not self._left:
            # a step beyond the last would begin another trace of the schedule, with nothing in it
            if not self._by_epoch:
                self._end()
        elif self._advance is not None:
            try:
                self._advance()
            except BaseException:
                # torch ends the process by a segmentation fault when a profiler whose step raised is stopped
                self._let_go()
                raise

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """End a profile of the epoch."""
        if self._by_epoch:
            self._end()

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """End with the training: a profiler that goes on would stand in the way of the next one."""
        self._end()

    def _step_of(self, profiler: profile) -> Callable[[], None] | None:
        """What makes a step. Without a schedule, a device or a daemon PyTorch's own does nothing but count: that
        is left to the end."""
        if self._options["schedule"] is not None:
            return partial(_step_quietly, profiler)
        if self._options["activities"] == [ProfilerActivity.CPU] and not os.environ.get("KINETO_USE_DAEMON"):
            return None
        return profiler.step

    def _end(self) -> None:
        if (profiler := self._profile) is None:
            return
        if self._advance is None:
            # the last iteration is none that was stepped to, and an epoch without one has made no step
            profiler.step_num = max(0, self._total - self._left - (not self._left))
        self._let_go()
        profiler.__exit__(None, None, None)

    def _let_go(self) -> None:
        self._profile, self._advance, self._done = None, None, True

    def _trace_ready(self, trainer: Trainer, profiler: profile) -> None:
        self._traces += 1
        handler = self._on_trace_ready
        if isinstance(handler, Mapping):
            options = {key: value for key, value in handler.items() if key != "type"}
            if handler["type"] == "log_trace":
                report(trainer, "profile", "\n" + profiler.key_averages().table(**options))
            else:
                options["dir_name"] = str(trainer.work_dir / options.get("dir_name", "tf_tracing_logs"))
                tensorboard_trace_handler(**options)(profiler)
        elif callable(handler):
            handler(profiler)
        if self._json_path is not None:
            path = trainer.work_dir / _numbered(self._json_path, self._traces, trainer)
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))


def _step_quietly(profiler: profile) -> None:
    """A step of a schedule: each trace is dealt with when it is ready, so nobody misses the events of the last one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        profiler.step()


def _activities(*, cpu: bool, cuda: bool) -> list[ProfilerActivity]:
    if not cpu and not cuda:
        raise ValueError(
            "ProfilerHook has nothing to record: switch activity_with_cpu or activity_with_cuda on"
        )
    if cuda and not torch.cuda.is_available():
        raise ValueError("activity_with_cuda=True needs a CUDA device, and torch finds none")
    return [ProfilerActivity.CPU] * cpu + [ProfilerActivity.CUDA] * cuda


def _schedule(schedule: Mapping[str, int] | None) -> Callable[[int], Any] | None:
    if schedule is None:
        return None
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule must be a dict(wait=..., warmup=..., active=...), got {schedule!r}")
    known = ["wait", "warmup", "active", "repeat", "skip_first"]
    for key, value in schedule.items():
        if key not in known:
            raise ValueError(f"schedule has no argument {key!r}{suggest(str(key), known)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < (key == "active"):
            least = int(key == "active")
            raise ValueError(f"{key} of the schedule must be an int of at least {least}, got {value!r}")
    if missing := [key for key in known[:3] if key not in schedule]:
        raise ValueError(f"the schedule lacks {', '.join(missing)}, got {dict(schedule)!r}")
    made: Callable[[int], Any] = torch_schedule(**schedule)
    return made


def _steps_to_first_trace(schedule: Mapping[str, int] | None) -> int:
    return 0 if schedule is None else sum(value for key, value in schedule.items() if key != "repeat")


def _check_handler(handler: object, json_path: object) -> None:
    if handler is None:
        return
    if not isinstance(handler, Mapping):
        if not callable(handler):
            raise TypeError(
                f"on_trace_ready must be a function, a dict(type='log_trace' or 'tb_trace'), or a path; got {handler!r}"
            )
        return
    kind = handler.get("type")
    if kind not in _TRACE_OPTIONS:
        raise ValueError(f"unknown type {kind!r} of on_trace_ready{suggest(str(kind), _TRACE_TYPES)}")
    for key in handler:
        if key != "type" and key not in _TRACE_OPTIONS[kind]:
            raise ValueError(f"{kind} has no argument {key!r}{suggest(str(key), _TRACE_OPTIONS[kind])}")
    if kind == "tb_trace" and json_path is not None:
        raise ValueError(
            "a trace can be written once: tb_trace writes the file that json_trace_path would; give one of the two"
        )


def _numbered(path: Path, number: int, trainer: Trainer) -> Path:
    rank = f"_rank{trainer.rank}" if trainer.world_size > 1 else ""
    count = f"_{number}" if number > 1 else ""
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}{rank}{count}{dot}{suffixes}")
