"""Rows of `hook_cost`: hooks that measure where time goes, and the same work by hand."""

from __future__ import annotations

import gc
import io
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.helpers.hook_bench import (
    AFTER_ITER,
    BY_HAND,
    EVENTS,
    FOREVER,
    HISTORY,
    INTERVAL,
    OURS,
    Bench,
    loader,
    no_stderr,
    remember,
)
from benchmarks.helpers.timing import Case
from eventloop.costs.spans import SpanRecorder
from eventloop.costs.step_clock import BACKWARD_BEGINS, BACKWARD_ENDS, FORWARD_ENDS, OPTIMIZER_ENDS
from eventloop.events import (
    AfterTestIter,
    AfterTrain,
    AfterTrainIter,
    BeforeRun,
    BeforeTestEpoch,
    BeforeTrain,
    BeforeTrainEpoch,
)
from eventloop.hooks.costs import CostsHook
from eventloop.hooks.iter_timer import IterTimerHook
from eventloop.hooks.iteration_timer import IterationTimer
from eventloop.hooks.pet_timer import TestHook
from eventloop.hooks.preemption import PreemptionHook
from eventloop.hooks.profiler import ProfilerHook
from eventloop.hooks.trace import TraceHook
from eventloop.tracing.window import TracedPhases
from eventloop.writers import ConsoleWriter

TIMES = ("time", "data_time", "step_time", "hook_time")
PROFILED = 20
PROFILES = 10
"""In a block; a single one is over in half a millisecond, and would tell how cold the caches of its code are."""
"""Iterations of a profile."""
TESTED = tuple(AfterTestIter(batch_idx=index) for index in range(INTERVAL))

# --- the times of an iteration -----------------------------------------------------------------------------

SPLIT = (
    "now = clock(); keep((now - last, 7)); keep((waited, 7)); keep((took, 7)); "
    "keep((now - last - waited - took, 7)); last = now"
)


def iter_timer(bench: Bench) -> list[Case]:
    """The time of the iteration and its three parts, put."""
    return _timer(bench, IterTimerHook(), SPLIT)


def iteration_timer(bench: Bench) -> list[Case]:
    """The same behind the warm-up, and added up for what is said at the end."""
    return _timer(bench, IterationTimer(warmup_iter=0), f"{SPLIT}; worked += waited + took; counted += 1")


def _timer(bench: Bench, hook: IterTimerHook, by_hand: str) -> list[Case]:
    trainer = bench.trainer()
    if isinstance(hook, IterationTimer):
        hook.before_train(trainer, BeforeTrain())
    hook.before_train_epoch(trainer, BeforeTrainEpoch())
    remember(trainer.metrics, TIMES, HISTORY)
    kept: list[Any] = []
    names = {
        "clock": perf_counter,
        "keep": kept.append,
        "last": 0.0,
        "waited": 0.001,
        "took": 0.002,
        "worked": 0.0,
        "counted": 0,
    }
    return [
        bench.hook_and_collect({"hook": hook, "trainer": trainer}, trainer.metrics),
        bench.iterations(BY_HAND, by_hand, names, part=2, after=kept.clear),
        bench.background(lambda: hook.after_train_iter(trainer, EVENTS[7]), trainer.metrics),
    ]


def pet_timer(bench: Bench) -> list[Case]:
    """Four timers of each batch of a test, and each 10 batches a line for the console, which writes it in the
    background. By hand: three readings of the clock, and the line is printed."""
    trainer = bench.trainer(test_loader=loader(), writers=[ConsoleWriter(stream=io.StringIO())])
    hook = TestHook(logperiod=INTERVAL, num_warmup=0)
    hook.before_test_epoch(trainer, BeforeTestEpoch())
    calls = ("before_test_iter", "after_test_iter", "_end_batch")
    body = "; ".join(f"hook.{call}(trainer, event)" for call in calls)
    names = {"hook": hook, "trainer": trainer, "events": TESTED}
    part = "now = clock(); {0} += now - last; last = now"
    by_hand = "; ".join(part.format(name) for name in ("data", "infer", "post")) + "; done += 1"
    begun = {"clock": perf_counter, "last": 0.0, "data": 0.0, "infer": 0.0, "post": 0.0, "done": 0}
    plain = {"say": partial(_say, io.StringIO()), **begun}
    return [
        bench.iterations(OURS, body, names, part=2, head="for event in events", after=trainer.bus.flush),
        bench.iterations(BY_HAND, by_hand, plain, part=2, end="say(done, data, infer, post)"),
    ]


def _say(console: io.StringIO, done: int, *seconds: float) -> None:
    parts = " + ".join(f"{each / done:.3f}s" for each in seconds)
    left = timedelta(seconds=int(sum(seconds) / done * (1000 - done)))
    print(f"[Testing][{done}/1000][{sum(seconds) / done:.3f}s = {parts}][eta: {left}]", file=console)


def costs(bench: Bench) -> list[Case]:
    """An iteration in which no write is due; a thread writes at most every 30 seconds."""
    trainer, hook = bench.trainer(), CostsHook(interval_seconds=float("inf"))
    hook.before_run(trainer, BeforeRun())
    return [
        bench.iterations(OURS, AFTER_ITER, {"hook": hook, "trainer": trainer}, head="for event in events"),
        bench.iterations(
            BY_HAND, "if clock() >= due: raise RuntimeError", {"clock": monotonic, "due": float("inf")}
        ),
    ]


# --- windows of iterations ---------------------------------------------------------------------------------


def profiler(bench: Bench) -> list[Case]:
    """The profile of 20 iterations in which nothing else happens: it is made, its begin, the steps, its end. What a
    block leaves, cycles of torch's with their results, is collected after it: in the heap it slows whoever is next."""
    bench.stack.enter_context(no_stderr())  # where PyTorch's library tells of every begin and end
    trainer = bench.trainer()
    hooks: list[ProfilerHook] = []
    body = f"hook.before_train_epoch(trainer, begin)\nfor event in events: {AFTER_ITER}"
    by_hand = "profiler = profile(activities=cpu)\nprofiler.start()\nfor _ in steps: profiler.step()\nprofiler.stop()"

    def again() -> None:
        gc.collect()
        hooks[:] = [ProfilerHook(by_epoch=False, profile_times=PROFILED) for _ in range(PROFILES)]

    again()
    names = {"hooks": hooks, "trainer": trainer, "begin": BeforeTrainEpoch(), "events": EVENTS[:1] * PROFILED}
    plain = {
        "profile": profile,
        "cpu": [ProfilerActivity.CPU],
        "steps": range(PROFILED - 1),
        "profiles": range(PROFILES),
    }
    return [
        bench.over(OURS, "for hook in hooks", body, PROFILED * PROFILES, names, again),
        bench.over(BY_HAND, "for _ in profiles", by_hand, PROFILED * PROFILES, plain, gc.collect),
    ]


def profiler_over(bench: Bench) -> list[Case]:
    """An iteration after the profile."""
    trainer, hook = bench.trainer(), ProfilerHook(by_epoch=False)
    return [
        bench.iterations(OURS, AFTER_ITER, {"hook": hook, "trainer": trainer}, head="for event in events"),
        bench.iterations(BY_HAND, "if profiler is not None: raise RuntimeError", {"profiler": None}),
    ]


def trace_ahead(bench: Bench) -> list[Case]:
    """An iteration before the window, whose begin a filter on the bus looks for."""
    trainer, hook = bench.trainer(), TraceHook(begin=50_000)
    hook.before_train(trainer, BeforeTrain())
    bench.stack.callback(trainer.during_run.close)
    bench.stack.callback(hook.after_train, trainer, AfterTrain(reason="completed"))
    assert hook._subscription is not None
    names = {"passes": hook._subscription.filter(AfterTrainIter)}
    return [
        bench.iterations(OURS, "passes(event)", names, head="for event in events"),
        bench.iterations(
            BY_HAND,
            "if event.iter >= begin: raise RuntimeError",
            {"begin": FOREVER},
            head="for event in events",
        ),
    ]


def trace(bench: Bench) -> list[Case]:
    """The spans of the five phases of an iteration in the window; those of events and handlers are the bus's."""
    trainer, recorder = bench.trainer(), SpanRecorder()
    ends = (FORWARD_ENDS, BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS)
    marks = "; ".join(f"mark({each})" for each in ends)
    trainer.clock.begin()
    phases = TracedPhases(trainer, recorder, ended=lambda iteration: None)
    names = {"begin": phases.begin, "mark": phases.mark, "end": phases.end}
    spans: list[Any] = []
    span = "now = clock(); keep(({0!r}, 7, last, now - last)); last = now"
    by_hand = "\n".join(
        "last = clock()" if phase is None else span.format(phase)
        for phase in ("data", "forward", None, "backward", "optimizer", "iteration")
    )
    return [
        bench.iterations(OURS, f"begin(7); {marks}; end()", names, part=2, after=recorder.spans.clear),
        bench.iterations(
            BY_HAND,
            by_hand,
            {"clock": perf_counter, "keep": spans.append, "last": 0.0},
            part=2,
            after=spans.clear,
        ),
    ]


# --- a run -------------------------------------------------------------------------------------------------


def preemption(bench: Bench) -> list[Case]:
    """The handler of SIGTERM installed when a run begins, and put back at its end; iterations cost nothing."""
    trainer, hook = bench.trainer(), PreemptionHook(signals=("SIGTERM",))
    names = {"hook": hook, "trainer": trainer, "event": BeforeRun(), "leave": trainer.during_run.close}
    by_hand = {"install": signal.signal, "signum": signal.SIGTERM, "handle": lambda signum, frame: None}
    return [
        bench.iterations(OURS, "hook.before_run(trainer, event); leave()", names, part=10),
        bench.iterations(
            BY_HAND, "before = install(signum, handle); install(signum, before)", by_hand, part=10
        ),
    ]


ROWS: dict[str, Callable[[Bench], list[Case]]] = {
    "IterTimerHook": iter_timer,
    "IterationTimer": iteration_timer,
    "TestHook, a batch of a test": pet_timer,
    "CostsHook, no write due": costs,
    "ProfilerHook, each of 20 profiled": profiler,
    "ProfilerHook, after its profile": profiler_over,
    "TraceHook, before its window": trace_ahead,
    "TraceHook, phases in its window": trace,
    "PreemptionHook, a run": preemption,
}
"""As `hook_rows.ROWS`."""
