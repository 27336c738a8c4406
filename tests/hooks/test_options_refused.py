"""Options of hooks that cannot be: the constructor names the option, what is expected and what it got."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from eventloop.hooks import (
    CostsHook,
    EarlyStoppingHook,
    EmptyCacheHook,
    GarbageCollectionHook,
    IterationTimer,
    LoggerHook,
    MemoryHook,
    PeriodicWriter,
    ProfilerHook,
    TestHook,
    TraceHook,
    VisualizationHook,
    on,
)
from eventloop.writers import JSONLWriter

SCHEDULE = {"wait": 1, "warmup": 1, "active": 1}
TB_TRACE, LOG_TRACE = {"type": "tb_trace"}, {"type": "log_trace"}


def stopping(**options: Any) -> EarlyStoppingHook:
    return EarlyStoppingHook(**{"monitor": "acc", **options})


def statistic(**entry: Any) -> LoggerHook:
    return LoggerHook(custom_cfg=[entry])


class OfDetectron2:
    """A writer that reads a global storage."""

    def write(self) -> None: ...


WRONG_TYPES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (CostsHook, {"interval_seconds": "30"}, "interval_seconds must be a number of seconds, got '30'"),
    (CostsHook, {"interval_seconds": True}, "interval_seconds must be a number of seconds, got True"),
    (CostsHook, {"interval_seconds": None}, "interval_seconds must be a number of seconds, got None"),
    (CostsHook, {"log_seconds": "30"}, "log_seconds must be a number of seconds, got '30'"),
    (EmptyCacheHook, {"after_epoch": "no"}, "after_epoch must be True or False, got 'no'"),
    (GarbageCollectionHook, {"interval": 2.5}, "interval must be an int, got 2.5"),
    (GarbageCollectionHook, {"freeze": 1}, "freeze must be True or False, got 1"),
    (IterationTimer, {"warmup_iter": 1.5}, "warmup_iter must be an int, got 1.5"),
    (LoggerHook, {"interval": 2.5}, "interval must be an int, got 2.5"),
    (LoggerHook, {"reduce": "mean"}, r"reduce must be True or False, got 'mean': .*reduce_max=\["),
    (LoggerHook, {"reduce_max": "memory"}, r"list of names, got 'memory': write reduce_max=\["),
    (LoggerHook, {"reduce_max": None}, "reduce_max must be a list of names, got None"),
    (LoggerHook, {"custom_cfg": ["loss"]}, r"custom_cfg must be a dict\(data_src=.*got 'loss'"),
    (MemoryHook, {"interval": 0.5}, "interval must be an int, got 0.5"),
    (PeriodicWriter, {"period": 2.0}, "period must be an int, got 2.0"),
    (PeriodicWriter, {"reduce": 1}, "reduce must be True or False, got 1"),
    (PeriodicWriter, {"reduce_max": ["memory", 3]}, "reduce_max must be a list of names, got 3 in it"),
    (PeriodicWriter, {"writers": [JSONLWriter]}, r"got the class JSONLWriter: write JSONLWriter\(\)"),
    (PeriodicWriter, {"writers": [OfDetectron2()]}, r"detectron2 writer, whose write\(\) reads a global"),
    (ProfilerHook, {"schedule": 3}, r"schedule must be a dict\(wait=\.\.\., .*got 3"),
    (ProfilerHook, {"on_trace_ready": 3}, "on_trace_ready must be a function, a dict.* or a path; got 3"),
    (TestHook, {"num_warmup": 2.5}, "num_warmup must be an int, got 2.5"),
    (TraceHook, {"begin": 1.5}, "begin must be a number of iterations, got 1.5"),
    (TraceHook, {"windows": [5]}, r"windows must be pairs \(first iteration, .*\), got 5"),
    (TraceHook, {"windows": [(1, 2.5)]}, r"windows must be pairs .*, got \(1, 2\.5\)"),
    (VisualizationHook, {"max_images": "16"}, "max_images must be an int, got '16'"),
    (VisualizationHook, {"draw": True}, r"draw must be a function \(trainer, event\) -> .*got True"),
    (stopping, {"monitor": ""}, "monitor must be the name of a metric, got ''"),
    (stopping, {"monitor": ["acc"]}, r"monitor must be the name of a metric, got \['acc'\]"),
    (stopping, {"patience": 1.5}, "patience must be an int, got 1.5"),
    (stopping, {"min_delta": "0.1"}, "min_delta must be a number, got '0.1'"),
    (stopping, {"stopping_threshold": True}, "stopping_threshold must be a number, got True"),
]

WRONG_VALUES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (CostsHook, {"interval_seconds": 0}, "interval_seconds must be above 0 seconds, got 0"),
    (CostsHook, {"log_seconds": 0}, "log_seconds must be above 0 seconds, got 0"),
    (CostsHook, {"interval_seconds": -1.0}, "interval_seconds must be above 0 seconds, got -1"),
    (CostsHook, {"interval_seconds": math.nan}, "interval_seconds must be above 0 seconds, got nan"),
    (GarbageCollectionHook, {"interval": 0}, "interval must be at least 1, got 0"),
    (IterationTimer, {"warmup_iter": -1}, "warmup_iter must be at least 0, got -1"),
    (LoggerHook, {"interval": 0}, "interval must be at least 1, got 0"),
    (MemoryHook, {"interval": 0}, "interval must be at least 1, got 0"),
    (MemoryHook, {"device": "cpu"}, "needs a CUDA device, got device='cpu'"),
    (PeriodicWriter, {"period": 0}, "period must be at least 1, got 0"),
    (ProfilerHook, {"profile_times": 0}, "profile_times must be at least 1, got 0"),
    (ProfilerHook, {"activity_with_cpu": False}, "ProfilerHook has nothing to record"),
    (ProfilerHook, {"schedule": {"waits": 1}}, "schedule has no argument 'waits': did you mean 'wait'"),
    (ProfilerHook, {"schedule": {"wait": 1}}, r"schedule lacks warmup, active, got \{'wait': 1\}"),
    (
        ProfilerHook,
        {"schedule": {**SCHEDULE, "active": 0}},
        "active of the schedule must be at least 1, got 0",
    ),
    (ProfilerHook, {"schedule": {**SCHEDULE, "wait": -1}}, "wait of the schedule must be at least 0, got -1"),
    (
        ProfilerHook,
        {"on_trace_ready": {"type": "tb_tracer"}},
        "type of on_trace_ready must be .*, got 'tb_tracer': did you mean",
    ),
    (ProfilerHook, {"on_trace_ready": {**LOG_TRACE, "rows": 1}}, "log_trace has no argument 'rows'"),
    (ProfilerHook, {"on_trace_ready": TB_TRACE, "json_trace_path": "a"}, "tb_trace and json_trace_path"),
    (
        ProfilerHook,
        {"on_trace_ready": "b.json", "json_trace_path": "a"},
        "on_trace_ready and json_trace_path",
    ),
    (TestHook, {"logperiod": 0}, "logperiod must be at least 1, got 0"),
    (TestHook, {"num_warmup": -1}, "num_warmup must be at least 0, got -1"),
    (TraceHook, {"begin": -1}, "begin must be at least 0 iterations, got -1"),
    (TraceHook, {"iterations": 0}, "iterations must be at least 1, got 0"),
    (TraceHook, {"every": 0}, "every must be at least 1, got 0"),
    (TraceHook, {"every": 19}, "windows of 20 iterations every 19 would overlap"),
    (TraceHook, {"limit": 0}, "limit must be at least 1, got 0"),
    (TraceHook, {"windows": [(1, 2)], "begin": 3}, "windows excludes begin, iterations and every"),
    (TraceHook, {"windows": []}, "windows is empty"),
    (TraceHook, {"windows": [(3, 3)]}, r"a window must begin at 0 or above .*, got \(3, 3\)"),
    (TraceHook, {"windows": [(5, 9), (1, 6)]}, r"the windows \(1, 6\) and \(5, 9\) overlap"),
    (VisualizationHook, {"interval": 0}, "interval must be at least 1, got 0"),
    (on, {"priority": "URGENT"}, "unknown priority name 'URGENT'"),
    (on, {"every": 0}, "every must be at least 1, got 0"),
    (on, {"start": -1}, "start must be at least 0, got -1"),
    (on, {"budget_us": -5}, "@on: budget_us, in microseconds, must be above 0"),
    (statistic, {"data_scr": "x"}, "custom_cfg has no argument 'data_scr': did you mean 'data_src'"),
    (statistic, {"method_name": "mean"}, "custom_cfg needs data_src, .*, got {'method_name': 'mean'}"),
    (statistic, {"data_src": "x", "method_name": "maen"}, "method_name .* mean, .*'maen': did you mean"),
    (statistic, {"data_src": "x", "window_size": 0}, "window_size must be a positive int, .*, got 0"),
    (statistic, {"data_src": "x", "window_size": True}, "window_size must be a positive int, .*, got True"),
    (statistic, {"data_src": "x", "method_name": "median"}, "method_name='median' needs the values"),
    (stopping, {"monitor": "score"}, "cannot infer from its name whether a greater 'score' is better"),
    (stopping, {"rule": "max"}, "rule must be 'greater' or 'less', got 'max'"),
    (stopping, {"delta_mode": "relative"}, "delta_mode must be 'abs' or 'rel', got 'relative'"),
    (stopping, {"patience": -1}, "patience must be at least 0, got -1"),
    (stopping, {"min_delta": -0.1}, "min_delta must be at least 0, got -0.1"),
    (stopping, {"min_delta": math.nan}, "min_delta must be a finite number, got nan"),
    (stopping, {"stopping_threshold": math.inf}, "stopping_threshold must be a finite number, got inf"),
]


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        *((make, options, TypeError, message) for make, options, message in WRONG_TYPES),
        *((make, options, ValueError, message) for make, options, message in WRONG_VALUES),
        (on, {"once": 1}, (TypeError, ValueError), "once must be True or False, got 1"),
        (on, {"when": 3}, (TypeError, ValueError), "when must be a function \\(event\\), got 3"),
    ],
)
def test_an_option_that_cannot_be_is_refused(
    make: Callable[..., Any], options: dict[str, Any], error: Any, message: str
) -> None:
    """A value of another type raises TypeError, one out of range ValueError, before there is a trainer."""
    with pytest.raises(error, match=message):
        make(**options)
