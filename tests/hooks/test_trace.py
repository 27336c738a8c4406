"""TraceHook: windows of iterations, recorded into the run's directory."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from eventloop import SkipIteration, Trainer
from eventloop.costs.spans import SpanRecorder
from eventloop.events import Event
from eventloop.hooks import CheckpointHook, Hook, TraceHook
from eventloop.model.device_clock import DeviceClock
from eventloop.writers import JSONLWriter
from tests import no_threads
from tests.conftest import DEADLINE
from tests.forked import ROOT, Forked
from tests.support.traces import Span, Window, inside, read_windows

Make = Callable[..., Trainer]


def windows(trainer: Trainer) -> list[Window]:
    return read_windows(trainer.work_dir)


def extents(trainer: Trainer) -> list[tuple[int, int]]:
    """First iteration and number of iterations of each window."""
    iterations = [spans_of(window, "iteration") for window in windows(trainer)]
    return [(spans[0].iter or 0, len(spans)) for spans in iterations]


def spans_of(window: Window, kind: str, name: str = "") -> list[Span]:
    return [span for span in window.spans if span.kind == kind and name in ("", span.name)]


# --- what a window holds -----------------------------------------------------------------------------------


def test_by_default_one_early_window_is_recorded(make_trainer: Make) -> None:
    """Iterations 20 to 39: each default handler in the plan's order, and the writer's deliveries and queue."""
    trainer = make_trainer(batches=50, writers=[JSONLWriter()])
    order = [row.name for row in trainer.bus.plan("after_train_iter") if not row.filter]

    trainer.train()

    (window,) = windows(trainer)
    assert (window.about["iterations"], window.about["not recorded"]) == ("iterations 20..39", "nothing")
    assert [s.iter for s in spans_of(window, "iteration")] == list(range(20, 40))
    third = [s.name for s in spans_of(window, "handler") if s.iter == 22 and s.event == "after_train_iter"]
    assert [name for name in third if name in order] == order
    assert {span.track for span in spans_of(window, "delivery")} == {"JSONLWriter (thread)"}
    assert "queue of JSONLWriter" in window.queues


def test_the_phases_lie_within_their_iteration(make_trainer: Make) -> None:
    """In order, on the training thread's track; backward and optimizer within the optimizer hook's call."""
    trainer = make_trainer(batches=50)

    trainer.train()

    (window,) = windows(trainer)
    iterations = spans_of(window, "iteration")
    calls = spans_of(window, "handler", "OptimizerHook.after_train_iter")
    for iteration, call in zip(iterations, calls, strict=True):
        phases = [s for s in spans_of(window, "phase") if s.iter == iteration.iter]
        assert [s.name for s in phases] == ["data", "forward", "backward", "optimizer"]
        assert all(s.track == "training thread" and inside(s, iteration) for s in phases)
        assert all(one.ended <= other.began for one, other in pairwise(phases))
        assert all(inside(s, call) for s in phases[2:])
        assert inside(call, iteration)
    assert all(one.ended <= other.began for one, other in pairwise(iterations))


def test_an_evaluation_is_recorded(make_trainer: Make, make_batches: Callable[[int], list[Any]]) -> None:
    """Between two iterations; its events are emitted in a window even if nothing else subscribes to them."""
    trainer = make_trainer(batches=5, max_epochs=10, val_loader=make_batches(2))

    trainer.train()

    (window,) = windows(trainer)
    before, after = spans_of(window, "event", "before_val"), spans_of(window, "event", "after_val")
    assert len(before) == len(after) == 4  # after 20 iterations (before the first one here), 25, 30 and 35
    last, first = spans_of(window, "iteration")[4:6]
    assert last.ended <= before[1].began
    assert after[1].ended <= first.began


def test_a_checkpoint_is_recorded(make_trainer: Make) -> None:
    """The saver's time has a track of its own, and begins within the hook's call."""
    hook = CheckpointHook(25, by_epoch=False)
    trainer = make_trainer(batches=50, default_hooks={"checkpoint": None}, hooks=[hook])

    @trainer.bus.on("after_train_iter", priority=100, start=24, once=True)
    def durable_within_the_window(event: Event) -> None:
        until(lambda: hook.saves.saver is not None and not hook.saves.saver.busy)

    trainer.train()

    (window,) = windows(trainer)
    saves = spans_of(window, "save")
    assert {s.track for s in saves} == {"checkpoint saver"}
    calls = {s.iter: s for s in spans_of(window, "handler", "CheckpointHook.after_train_iter")}
    first = next(s for s in saves if int(s.name.split("_")[1]) - 1 in calls)
    call = calls[int(first.name.split("_")[1]) - 1]
    assert call.began <= first.began <= call.ended


def test_batches_that_were_skipped_are_data(make_trainer: Make) -> None:
    """The wait for the batch that was trained goes back to the first that was not."""

    class Skips(Hook):
        def before_train_iter(self, trainer: Trainer, event: Any) -> None:
            if event.batch_idx in (3, 4):
                raise SkipIteration

    trainer = make_trainer(batches=8, hooks=[Skips(), TraceHook(0, 6)])

    trainer.train()

    (window,) = windows(trainer)
    data, asked = spans_of(window, "phase", "data"), spans_of(window, "event", "before_train_iter")
    assert len(asked) == 8
    assert [sum(inside(event, s) for event in asked) for s in data] == [0, 0, 0, 3, 0, 0]


def test_a_loop_of_ones_own_is_recorded(make_trainer: Make) -> None:
    """Forward is what its body does."""
    trainer = make_trainer(batches=3)

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(trainer.train_loader or []):
            trainer.outputs = {"loss": (trainer.model(inputs) - target).square().mean()}

    (window,) = windows(trainer)
    assert [len(spans_of(window, "phase", name)) for name in ("data", "forward", "backward")] == [3, 3, 3]


# --- which windows -----------------------------------------------------------------------------------------


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("batches", "options", "expected"),
    [
        (50, {}, [(20, 20)]),
        (30, {}, [(10, 20)]),
        (4, {}, [(0, 4)]),
        (1, {}, [(0, 1)]),
        (12, {"begin": 3, "iterations": 2}, [(3, 2)]),
        (12, {"begin": 0, "iterations": 1}, [(0, 1)]),
        (12, {"begin": 1, "iterations": 2, "every": 5}, [(1, 2), (6, 2), (11, 1)]),
        (6, {"begin": 0, "iterations": 2, "every": 2}, [(0, 2), (2, 2), (4, 2)]),
        (12, {"windows": [(7, 9), (2, 3), (9, 10)]}, [(2, 1), (7, 2), (9, 1)]),
        (12, {"windows": [(10, 20)]}, [(10, 2)]),
    ],
)
def test_which_iterations_are_recorded(
    make_trainer: Make, batches: int, options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    """A run that is too short for a window has its last iterations recorded."""
    trainer = make_trainer(batches=batches, hooks=[TraceHook(**options)])

    trainer.train()

    assert extents(trainer) == expected
    recorded = [i for first, count in expected for i in range(first, first + count)]
    assert [s.iter for w in windows(trainer) for s in spans_of(w, "iteration")] == recorded


def test_a_resumed_run_has_a_window_of_its_own(make_trainer: Make) -> None:
    """Where it goes on, behind that of the run before in the same file; windows it has behind it are left out."""
    saves = {"checkpoint": {"interval": 1}}
    make_trainer(batches=6, default_hooks=saves, hooks=[TraceHook(2, 2)]).train()
    resumed = make_trainer(batches=6, max_epochs=2, default_hooks=saves, hooks=[TraceHook(2, 2)])
    resumed.resume("auto")
    resumed.train()
    again = make_trainer(
        batches=6, max_epochs=3, default_hooks=saves, hooks=[TraceHook(windows=[(1, 2), (11, 14), (16, 17)])]
    )
    again.resume("auto")
    again.train()

    assert extents(again) == [(2, 2), (8, 2), (12, 2), (16, 1)]


def test_a_second_call_does_not_begin_anew(make_trainer: Make) -> None:
    """One hook records its windows once."""
    trainer = make_trainer(batches=6, hooks=[TraceHook(windows=[(2, 3), (4, 5)])])
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("half"), "after_train_iter", start=3, once=True)

    trainer.train()
    assert extents(trainer) == [(2, 1)]
    trainer.train()

    assert extents(trainer) == [(2, 1), (4, 1)]


def test_each_rank_records_a_file_of_its_own(make_trainer: Make) -> None:
    """The file of another rank than 0 has the rank in its name, and in it."""
    trainer = make_trainer(batches=6, hooks=[TraceHook(2, 2)])
    trainer.rank, trainer.world_size = 1, 2

    trainer.train()

    (file,) = (trainer.work_dir / "traces").iterdir()
    assert file.name == "iterations_2-3.rank1.json"
    about = json.loads(file.read_bytes())["otherData"]
    assert (about["rank"], about["world_size"]) == (1, 2)


@pytest.mark.parametrize(("how", "last"), [("stop", 5), ("error", 4)])
def test_a_run_that_ends_within_a_window_keeps_it(make_trainer: Make, how: str, last: int) -> None:
    """Its description says that it was cut short."""

    def end(trainer: Trainer, event: Any) -> None:
        if how == "error":
            raise ArithmeticError("on purpose")
        trainer.stop("enough")

    trainer = make_trainer(batches=20, hooks=[TraceHook(2, 10)])
    trainer.bus.subscribe(end, "after_train_iter", start=5, once=True)
    with suppress(ArithmeticError):
        trainer.train()

    (window,) = windows(trainer)
    assert window.about["iterations"] == f"iterations 2..{last}, cut short by the end of the training"


def test_a_run_that_ends_before_its_window_leaves_none(make_trainer: Make) -> None:
    """Nor a handler on the bus."""
    trainer = make_trainer(batches=40, hooks=[TraceHook(10, 5)])
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=3)
    plan = trainer.bus.plan("after_train_iter")

    trainer.train()

    assert not (trainer.work_dir / "traces").exists()
    assert trainer.bus.plan("after_train_iter") == plan


# --- what it costs -----------------------------------------------------------------------------------------


def test_behind_its_window_nothing_is_left_of_it(make_trainer: Make) -> None:
    """No handler, no recorder, no thread; and the clock is as it was."""
    trainer = make_trainer(batches=30, hooks=[TraceHook(2, 3)])
    plans: dict[int, list[str]] = {}
    recorded: dict[int, bool] = {}

    def writing() -> bool:
        return "eventloop trace" in {thread.name for thread in threading.enumerate()}

    def record_plan(trainer: Trainer, event: Any) -> None:
        plans[event.iter] = [row.name for row in trainer.bus.plan("after_train_iter")]
        recorded[event.iter] = trainer.clock.device is not None
        if event.iter == 29:  # it is written once the background is done with the window
            trainer.bus.flush(DEADLINE)
            until(lambda: (trainer.work_dir / "traces").exists() and not writing())

    trainer.bus.subscribe(record_plan, "after_train_iter", priority=1)
    names = [row.name for row in trainer.bus.plan("after_train_iter")]
    trainer.train()

    assert [i for i, plan in plans.items() if plan != names] == [0, 1]
    assert [i for i, there in recorded.items() if there] == [2, 3, 4]
    assert not writing()


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread, or a process."""
    deadline = monotonic() + DEADLINE
    while not condition():
        assert monotonic() < deadline
        sleep(0.002)


def test_the_training_is_the_same(make_trainer: Make, tmp_path: Path) -> None:
    """Weights and counts of calls do not depend on the trace."""

    def trained(folder: str, **options: Any) -> tuple[torch.Tensor, dict[str, int]]:
        trainer = make_trainer(batches=60, work_dir=tmp_path / folder, writers=[JSONLWriter()], **options)
        trainer.train()
        assert (trainer.work_dir / "traces").exists() == (not options)
        stats = {s.name: s.calls for s in trainer.bus.stats() if s.runs_on == "sync"}
        return next(trainer.model.parameters()).detach(), stats

    weights, calls = trained("with")
    others, other_calls = trained("without", default_hooks={"trace": None})

    assert torch.equal(weights, others)
    own = {("TraceHook.before_train", 1), ("TraceHook.after_train", 1)}
    assert calls.items() - other_calls.items() == own


def test_the_devices_clock_goes_on(make_trainer: Make) -> None:
    """It is told what the window is told, and is back in its place afterwards."""
    told: list[Any] = []

    class Told(DeviceClock):
        def __init__(self) -> None:
            self.samples = 7

        def begin(self, iterations: int) -> None:
            told.append("begin")

        def mark(self, what: int) -> None:
            told.append(what)

        def end(self) -> None:
            told.append("end")

    trainer = make_trainer(batches=6, hooks=[TraceHook(2, 2)], default_hooks={"costs": None})
    clock = trainer.clock.device = Told()
    seen: list[Any] = []
    trainer.bus.subscribe(
        lambda trainer, event: seen.append((trainer.clock.device is clock, trainer.clock.device.samples)),
        "after_train_iter",
    )

    trainer.train()

    assert seen == [(True, 7)] * 2 + [(False, 7)] * 2 + [(True, 7)] * 2
    assert told == ["begin", 1, 2, 3, 4, "end"] * 6


# --- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["no folder", "no thread"])
def test_a_file_that_cannot_be_written_ends_nothing(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A warning names the window. Where no thread starts (Python 3.12 at the end) the ending thread writes it."""
    trainer = make_trainer(batches=8, hooks=[TraceHook(windows=[(1, 2)])])
    if why == "no folder":
        (trainer.work_dir / "traces").touch()
    else:
        no_threads.refuse(monkeypatch, "eventloop trace")

    with caplog.at_level(logging.WARNING, "eventloop"):
        trainer.train()

    assert trainer.iter == 8
    file = trainer.work_dir / "traces" / "iterations_1-1.json"
    said = [r.message.partition(": ")[0] for r in caplog.records if "trace" in r.message]
    assert said == ([f"the trace was not written to {file}"] if why == "no folder" else [])
    assert file.is_file() == (why == "no thread")


def test_who_records_by_hand_has_the_bus(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The window is left out, with a warning that names it; the next one is recorded."""
    trainer = make_trainer(batches=12, hooks=[TraceHook(windows=[(2, 4), (6, 8)])])
    recording = trainer.bus.record(SpanRecorder())
    trainer.bus.subscribe(
        lambda event: recording.stop(), "after_train_iter", when=lambda event: event.iter == 4
    )

    with caplog.at_level(logging.WARNING, "eventloop"):
        trainer.train()

    assert extents(trainer) == [(6, 2)]
    assert "iterations 2..3 are not traced: another recorder is on this bus" in caplog.text


KILLED = """
    import os, sys, time
    import torch
    import torch.nn.functional as F
    from eventloop import Trainer

    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.mse_loss, max_epochs=1,
        train_loader=[(torch.ones(3, 2), torch.ones(3, 1))] * 1000, work_dir="run", default_hooks=dict(checkpoint=None),
    )

    @trainer.bus.on("after_train_iter", when=lambda event: event.iter == 60)
    def wait_for_the_end(event):
        print("behind the window", flush=True)
        time.sleep(60)

    trainer.train()
"""


@pytest.mark.slow
def test_a_killed_run_has_its_window(tmp_path: Path) -> None:
    """Soon after the window its file is there, whole, and SIGKILL cannot take it back."""
    arguments, home = ["-c", textwrap.dedent(KILLED)], {**os.environ, "PYTHONPATH": ROOT}
    process = Forked(arguments, cwd=tmp_path, env=home, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "behind the window\n"
    file = tmp_path / "run" / "traces" / "iterations_20-39.json"
    until(file.exists)
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE)
    process.stdout.close()

    (window,) = read_windows(tmp_path / "run")
    assert window.about["iterations"] == "iterations 20..39"
    assert [s.iter for s in spans_of(window, "iteration")] == list(range(20, 40))


def test_a_window_that_is_recorded_again_replaces_its_file(make_trainer: Make, tmp_path: Path) -> None:
    """In a folder whose name is not UTF-8, too, where the run's name has a replacement mark."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    for _ in range(2):
        trainer = make_trainer(batches=4, work_dir=folder)
        trainer.train()

    (window,) = windows(trainer)
    assert len(spans_of(window, "iteration")) == 4
    assert window.about["run"] == "caf?"


def test_a_window_behind_the_runs_end_is_refused(make_trainer: Make) -> None:
    """When the trainer is built."""
    with pytest.raises(ValueError, match=r"window \(4, 6\) begins after the last iteration of the run, 3"):
        make_trainer(batches=4, hooks=[TraceHook(windows=[(1, 2), (4, 6)])])
