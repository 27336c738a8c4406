"""A hook that profiles the time and memory of the first iterations with PyTorch's profiler."""

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
from eventloop.hooks.log_text import log_text
from eventloop.util.checks import (
    at_least,
    check_bools,
    check_choice,
    check_keys,
    check_optional_bools,
    positive,
)

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

TraceHandler = Callable[[profile], object]

_TRACE_TYPES = ["log_trace", "tb_trace"]
"""The values of `type` in `on_trace_ready=dict(type=...)`."""
_TRACE_OPTIONS = {
    "log_trace": [
        "sort_by",
        "row_limit",
        "max_src_column_width",
        "max_name_column_width",
        "max_shapes_column_width",
        "header",
        "top_level_events_only",
    ],
    "tb_trace": ["dir_name", "worker_name", "use_gzip"],
}
"""The other options of `on_trace_ready`, by its type."""


class ProfilerHook(Hook):
    """Profile the first iterations, or the first epoch, of a training with `torch.profiler`.

        ProfilerHook(by_epoch=False, profile_times=20, json_trace_path="trace.json")
        ProfilerHook(by_epoch=False, profile_times=8, schedule=dict(wait=2, warmup=2, active=4, repeat=1),
                     on_trace_ready=dict(type="log_trace", sort_by="self_cpu_time_total", row_limit=20))

    The profile begins with the first epoch that this process trains, so it does not include the loading of a
    checkpoint, and a resumed run is profiled from its first iteration after the resume. Every iteration is
    one step of `schedule`. If the training ends, for whatever reason, the profile ends too. The training
    thread writes the trace, and the profiler slows the training down.

    Args:
        by_epoch: whether `profile_times` counts epochs; by default True in a run measured in epochs.
        profile_times: the number of iterations to profile, or 1 for one epoch; a trace of more epochs would
            be too large.
        activity_with_cpu, activity_with_cuda: whether to record activities of the CPU and of the CUDA device.
        schedule: arguments of `torch.profiler.schedule`: `wait`, `warmup`, `active`, `repeat`, `skip_first`.
            By default there is one trace of all profiled iterations.
        on_trace_ready: the handler of each trace: a function that takes the profiler; `dict(type="log_trace",
            ...)` with the arguments of `key_averages().table()`, which emits the table as a text named
            `profile`; `dict(type="tb_trace", dir_name=...)` for TensorBoard's plugin, `tf_tracing_logs` by
            default; or a path, which acts as `json_trace_path`.
        record_shapes, profile_memory, with_stack, with_flops: see `torch.profiler.profile`.
        json_trace_path: a file for Chrome's and Perfetto's viewers, such as `trace.json`. The second trace of
            a schedule goes to `trace_2.json`, the trace of rank 1 to `trace_rank1.json`. A file whose name
            ends in ".gz" is compressed.

    Paths are relative to the trainer's work_dir.

    Raises:
        TypeError, ValueError: an argument is of the wrong type, unknown, or contradicts another one.
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
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        check_bools(activity_with_cpu=activity_with_cpu, activity_with_cuda=activity_with_cuda, **flags)
        self._by_epoch, self._times = by_epoch, profile_times
        if isinstance(on_trace_ready, str | PathLike):
            if json_trace_path is not None:
                raise ValueError(
                    "on_trace_ready and json_trace_path are both paths of a trace: pass only one"
                )
            on_trace_ready, json_trace_path = None, on_trace_ready
        _check_handler(on_trace_ready, json_trace_path)
        self._on_trace_ready = on_trace_ready
        self._json_path = None if json_trace_path is None else Path(json_trace_path)
        self._options: dict[str, Any] = {
            "activities": _activities(cpu=activity_with_cpu, cuda=activity_with_cuda),
            "schedule": _schedule(schedule),
            **flags,
        }
        self._steps_needed = _steps_to_first_trace(schedule)
        self._profile: profile | None = None
        self._step: Callable[[], None] | None = None  # advances the profiler
        self._done = False  # whether the profile has ended
        self._total_steps = self._remaining_steps = 0  # the iterations of the profile, and those left
        self._traces = 0  # the number of finished traces

    def check(self, trainer: Trainer) -> None:
        """Choose the unit of `profile_times`, and refuse a profile that would be empty or would not end.

        Raises:
            ValueError: the run is shorter than the profile, or the profile is shorter than the schedule.
        """
        by_epoch = trainer.by_epoch if self._by_epoch is None else self._by_epoch
        if by_epoch and not trainer.by_epoch:
            raise ValueError(
                "ProfilerHook(by_epoch=True) in a run measured in iterations would profile the whole run: "
                "leave by_epoch out"
            )
        if by_epoch and self._times > 1:
            raise ValueError(
                f"ProfilerHook profiles one epoch at most, got profile_times={self._times} epochs: pass "
                "by_epoch=False to count iterations"
            )
        max_iters = trainer.max_iters
        epoch_length = trainer.counting.iterations(trainer.limits.length("train", trainer.train_loader))
        steps = epoch_length if by_epoch else self._times
        if not by_epoch and max_iters is not None and self._times > max_iters:
            raise ValueError(
                f"profile_times={self._times} is more than the {max_iters} iterations of the run"
            )
        if steps is not None and steps < self._steps_needed:
            raise ValueError(
                f"the schedule needs {self._steps_needed} iterations for a trace (skip_first + wait + warmup "
                f"+ active), got {steps}: raise profile_times, or shorten the schedule"
            )
        self._by_epoch = by_epoch

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Start the profiler before the first epoch."""
        if self._done or self._profile is not None:
            return
        handler = None
        if self._on_trace_ready is not None or self._json_path is not None:
            handler = partial(self._handle_trace, trainer)
        profiler = self._profile = profile(on_trace_ready=handler, **self._options)
        self._step = self._step_function(profiler)
        self._total_steps = self._remaining_steps = 0 if self._by_epoch else self._times
        profiler.__enter__()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Advance the profiler by one step, and stop it after the last profiled iteration."""
        if self._profile is None:
            return
        if not self._total_steps:  # the first iteration of a profile of one epoch
            # -1, for a loader without a length, never counts down to 0: `after_train_epoch` ends the profile
            length = trainer.counting.iterations(trainer.position.length)
            self._total_steps = self._remaining_steps = length or -1
        self._remaining_steps -= 1
        if not self._remaining_steps:
            # no step after the last iteration: it would begin another, empty trace of the schedule
            if not self._by_epoch:
                self._end()
        elif self._step is not None:
            try:
                self._step()
            except BaseException:
                # stopping a profiler whose step raised ends the process with a segmentation fault in torch
                self._drop_profile()
                raise

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Stop the profiler after the first epoch if `profile_times` counts epochs."""
        if self._by_epoch:
            self._end()

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Stop the profiler, because no other profiler can start while it runs."""
        self._end()

    def _step_function(self, profiler: profile) -> Callable[[], None] | None:
        """Return the function that advances the profiler after an iteration; None if none is needed.

        Without a schedule, a CUDA device or a Kineto daemon, PyTorch's `step` only counts steps, so `_end`
        sets their number instead.
        """
        if self._options["schedule"] is not None:
            return partial(_step_quietly, profiler)
        if self._options["activities"] == [ProfilerActivity.CPU] and not os.environ.get("KINETO_USE_DAEMON"):
            return None
        return profiler.step

    def _end(self) -> None:
        """Stop the profiler if it runs; it then calls the handler of the trace."""
        if (profiler := self._profile) is None:
            return
        if self._step is None:
            iterations = self._total_steps - self._remaining_steps
            # the last iteration of the profile makes no step
            profiler.step_num = max(0, iterations if self._remaining_steps else iterations - 1)
        self._drop_profile()
        profiler.__exit__(None, None, None)

    def _drop_profile(self) -> None:
        """Forget the profiler, and begin no other profile in this process."""
        self._profile, self._step, self._done = None, None, True

    def _handle_trace(self, trainer: Trainer, profiler: profile) -> None:
        """Call the handler of a finished trace, and write the file of `json_trace_path`."""
        self._traces += 1
        handler = self._on_trace_ready
        if isinstance(handler, Mapping):
            options = {key: value for key, value in handler.items() if key != "type"}
            if handler["type"] == "log_trace":
                log_text(trainer, "profile", "\n" + profiler.key_averages().table(**options))
            else:
                options["dir_name"] = str(trainer.work_dir / options.get("dir_name", "tf_tracing_logs"))
                tensorboard_trace_handler(**options)(profiler)
        elif callable(handler):
            handler(profiler)
        if self._json_path is not None:
            path = trainer.work_dir / _trace_file(self._json_path, self._traces, trainer)
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))


def _step_quietly(profiler: profile) -> None:
    """Advance the profiler without PyTorch's warning that events of earlier cycles are cleared.

    Nothing is lost, because the handler of each cycle's trace has run by then.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")
        profiler.step()


def _activities(*, cpu: bool, cuda: bool) -> list[ProfilerActivity]:
    """Return the activities to record; refuse to record none, or a CUDA device that is missing."""
    if not cpu and not cuda:
        raise ValueError(
            "ProfilerHook has nothing to record: set activity_with_cpu=True or activity_with_cuda=True"
        )
    if cuda and not torch.cuda.is_available():
        raise ValueError("activity_with_cuda=True needs a CUDA device, and torch finds none")
    return [ProfilerActivity.CPU] * cpu + [ProfilerActivity.CUDA] * cuda


def _schedule(schedule: Mapping[str, int] | None) -> Callable[[int], Any] | None:
    """Check the arguments of `torch.profiler.schedule`, and return the schedule; None without arguments."""
    if schedule is None:
        return None
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule must be a dict(wait=..., warmup=..., active=...), got {schedule!r}")
    known = ["wait", "warmup", "active", "repeat", "skip_first"]
    check_keys("schedule", schedule, known)
    for key, value in schedule.items():
        at_least(f"{key} of the schedule", value, 1 if key == "active" else 0)
    if missing := [key for key in known[:3] if key not in schedule]:
        raise ValueError(f"the schedule lacks {', '.join(missing)}, got {dict(schedule)!r}")
    action_of_step: Callable[[int], Any] = torch_schedule(**schedule)
    return action_of_step


def _steps_to_first_trace(schedule: Mapping[str, int] | None) -> int:
    """Return the number of steps until the first trace of a schedule is complete; 0 without a schedule."""
    return 0 if schedule is None else sum(value for key, value in schedule.items() if key != "repeat")


def _check_handler(handler: object, json_path: object) -> None:
    """Refuse an `on_trace_ready` that is no function or config, or that writes the same trace as a path."""
    if handler is None:
        return
    if not isinstance(handler, Mapping):
        if not callable(handler):
            raise TypeError(
                "on_trace_ready must be a function, a dict(type='log_trace' or 'tb_trace'), or a path; "
                f"got {handler!r}"
            )
        return
    kind = handler.get("type")
    check_choice("type of on_trace_ready", kind, _TRACE_TYPES)
    assert kind is not None
    check_keys(kind, [key for key in handler if key != "type"], _TRACE_OPTIONS[kind])
    if kind == "tb_trace" and json_path is not None:
        raise ValueError(
            "a trace can be written only once, and both tb_trace and json_trace_path write it: pass only "
            "one of them"
        )


def _trace_file(path: Path, number: int, trainer: Trainer) -> Path:
    """Return the path of a trace: `path` with the rank, if there are several, and a number from 2 on."""
    rank = f"_rank{trainer.rank}" if trainer.world_size > 1 else ""
    count = f"_{number}" if number > 1 else ""
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}{rank}{count}{dot}{suffixes}")
