"""ProfilerHook: traces of the first iterations, and that the profiler is always ended."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from eventloop import Trainer
from eventloop.events import TextLogged
from eventloop.hooks import CallbackHook, ProfilerHook
from tests.hooks.conftest import Make
from tests.support.cuda import set_cuda
from tests.support.internals import substitute


def names_in(path: Path) -> list[str]:
    """The names of a trace's events."""
    return [str(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]]


def steps_in(path: Path) -> list[int]:
    """The numbers of the steps a trace has."""
    names = {name for name in names_in(path) if name.startswith("ProfilerStep#")}
    return sorted(int(name.removeprefix("ProfilerStep#")) for name in names)


def optimizer_steps(path: Path) -> int:
    return names_in(path).count("Optimizer.step#SGD.step")


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("options", "run", "expected"),
    [
        ({"by_epoch": False, "profile_times": 3}, {"batches": 6}, 3),
        ({}, {"max_epochs": 2}, 4),  # in a run measured in epochs one is the default
        ({"by_epoch": True}, {"max_epochs": 2}, 4),
        ({"profile_times": 2}, {"max_iters": 6}, 2),
    ],
)
def test_iterations_are_profiled(
    make_trainer: Make, options: dict[str, Any], run: dict[str, int], expected: int
) -> None:
    """The trace has as many optimizer steps as were asked for, however long the run; either option takes its path."""
    for path in ("json_trace_path", "on_trace_ready"):
        given: dict[str, Any] = {**options, path: "traces/trace.json"}
        trainer = make_trainer(hooks=[ProfilerHook(**given)], **run)

        trainer.train()

        assert optimizer_steps(trainer.work_dir / "traces" / "trace.json") == expected
        (trainer.work_dir / "traces" / "trace.json").unlink()


def test_schedule_makes_several_traces(make_trainer: Make) -> None:
    """Each has the steps of its cycle; the last step begins no further, empty one."""
    schedule = {"skip_first": 1, "wait": 0, "warmup": 1, "active": 1}
    hook = ProfilerHook(by_epoch=False, profile_times=5, schedule=schedule, json_trace_path="trace.json")
    trainer = make_trainer(batches=9, hooks=[hook])

    trainer.train()

    traces = sorted(path.name for path in trainer.work_dir.glob("trace*.json"))
    assert traces == ["trace.json", "trace_2.json"]
    assert [steps_in(trainer.work_dir / name) for name in traces] == [[2], [4]]


def test_schedule_over_an_epoch_of_a_hand_written_loop(
    make_trainer: Make, make_batches: Callable[[int], Any]
) -> None:
    """The loader is known when its pass is open, and not before; its end begins no further trace."""
    seen: list[int] = []
    schedule = {"wait": 0, "warmup": 1, "active": 2}
    hook = ProfilerHook(by_epoch=True, schedule=schedule, on_trace_ready=lambda p: seen.append(p.step_num))
    trainer = make_trainer(batches=3, hooks=[hook])

    for _ in trainer.epochs():
        for inputs, target in trainer.batches(make_batches(6)):
            trainer.outputs = {"loss": (trainer.model(inputs) - target).square().mean()}

    assert seen == [3, 5]


def test_function_gets_the_profiler(make_trainer: Make) -> None:
    """As `torch.profiler.profile` calls it."""
    seen: list[profile] = []
    hook = ProfilerHook(by_epoch=False, profile_times=2, on_trace_ready=seen.append)

    make_trainer(hooks=[hook]).train()

    assert [type(profiler) for profiler in seen] == [profile]
    assert "aten::linear" in {average.key for average in seen[0].key_averages()}


@pytest.mark.parametrize("daemon", ["", "1"])
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"by_epoch": False, "profile_times": 3}, 2),
        ({"by_epoch": True}, 4),
        ({"by_epoch": False, "profile_times": 3, "schedule": {"wait": 0, "warmup": 1, "active": 2}}, 2),
    ],
)
def test_the_profiler_knows_how_many_steps_it_made(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], steps: int, daemon: str
) -> None:
    """Whether each was a call of its `step`, or, where that would only count, nothing but the number at the end."""
    monkeypatch.setenv("KINETO_USE_DAEMON", daemon)
    seen: list[int] = []
    hook = ProfilerHook(on_trace_ready=lambda profiler: seen.append(profiler.step_num), **options)

    make_trainer(batches=5, hooks=[hook]).train()

    assert seen == [steps]


LOG = {"type": "log_trace", "sort_by": "self_cpu_time_total", "row_limit": 3}


def test_log_trace_is_a_text(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The table, sorted and cut as the arguments say; in the log where no writer takes texts."""
    caplog.set_level(logging.INFO, "eventloop")
    trainer = make_trainer(hooks=[ProfilerHook(by_epoch=False, profile_times=2, on_trace_ready=LOG)])
    with trainer.bus.capture(TextLogged) as seen:
        trainer.train()

    (text,) = (event for event in seen if isinstance(event, TextLogged))
    assert text.name == "profile"
    assert "Self CPU time total" in text.text
    assert len(re.findall(r"^ +\S+::?\S* .*(?:us|ms)", text.text, re.MULTILINE)) <= 3
    assert not caplog.text

    make_trainer(hooks=[ProfilerHook(by_epoch=False, on_trace_ready=LOG)]).train()
    assert "Self CPU time total" in caplog.text


@pytest.mark.parametrize(("given", "folder"), [({}, "tf_tracing_logs"), ({"dir_name": "own"}, "own")])
def test_tb_trace_is_a_file_for_tensorboard(make_trainer: Make, given: dict[str, str], folder: str) -> None:
    """In a folder of the work directory."""
    trace = {"type": "tb_trace", "worker_name": "me", **given}
    trainer = make_trainer(hooks=[ProfilerHook(by_epoch=False, on_trace_ready=trace)])

    trainer.train()

    files = [path.name for path in (trainer.work_dir / folder).iterdir()]
    assert len(files) == 1
    assert re.fullmatch(r"me\.\d+\.pt\.trace\.json", files[0])


def test_trace_can_be_compressed(make_trainer: Make) -> None:
    """A name that ends in .gz says so."""
    trainer = make_trainer(hooks=[ProfilerHook(by_epoch=False, json_trace_path="trace.json.gz")])

    trainer.train()

    assert (trainer.work_dir / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_options_are_those_of_the_profiler(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be recorded is passed on."""
    given: list[dict[str, Any]] = []

    def spy(**options: Any) -> profile:
        given.append(options)
        return profile(**{**options, "with_stack": False})

    substitute(monkeypatch, "profiler.profile", spy)
    recorded = {"record_shapes": True, "profile_memory": True, "with_stack": True, "with_flops": True}

    make_trainer(hooks=[ProfilerHook(by_epoch=False, **recorded)]).train()  # type: ignore[arg-type]

    assert [{name: options[name] for name in recorded} for options in given] == [recorded]
    assert given[0]["activities"] == [torch.profiler.ProfilerActivity.CPU]


def test_run_cut_short_keeps_what_was_recorded(make_trainer: Make) -> None:
    """An error of a step ends the profile and writes the trace; the next training profiles as if nothing was."""

    def fail(event: Any) -> None:
        raise ZeroDivisionError("on purpose")

    hook = ProfilerHook(by_epoch=False, profile_times=4, json_trace_path="cut.json")
    trainer = make_trainer(hooks=[hook])
    trainer.bus.subscribe(fail, "before_train_iter", start=2)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    again = make_trainer(hooks=[ProfilerHook(by_epoch=False, json_trace_path="again.json")])
    again.train()

    assert optimizer_steps(trainer.work_dir / "cut.json") == 2
    assert optimizer_steps(trainer.work_dir / "again.json") == 1


@pytest.mark.parametrize("times", [2, 4], ids=["last step", "step in between"])
def test_error_of_the_function_is_the_error_of_the_run(make_trainer: Make, times: int) -> None:
    """torch's profiler does not survive being stopped after that; the process does."""

    def fail(profiler: profile) -> None:
        raise ZeroDivisionError("on purpose")

    schedule = {"wait": 0, "warmup": 1, "active": 1}
    hook = ProfilerHook(by_epoch=False, profile_times=times, schedule=schedule, on_trace_ready=fail)

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        make_trainer(hooks=[hook]).train()


def test_second_training_is_not_profiled(make_trainer: Make) -> None:
    """What was asked for was given."""
    seen: list[int] = []
    hook = ProfilerHook(by_epoch=False, on_trace_ready=lambda profiler: seen.append(1))
    trainer = make_trainer(max_epochs=2, hooks=[hook])
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("half"), "after_train_epoch", once=True)

    trainer.train()
    trainer.train()

    assert (trainer.epoch, seen) == (2, [1])


def test_schedule_without_a_warm_up_warns() -> None:
    """torch's own warning, where the schedule is written."""
    with pytest.warns(UserWarning, match="won't be using warmup"):
        ProfilerHook(schedule={"wait": 1, "warmup": 0, "active": 1})


def test_resumed_run_is_profiled_where_it_goes_on(make_trainer: Make) -> None:
    """The iterations are counted from its start."""
    hook = ProfilerHook(by_epoch=False, profile_times=2, json_trace_path="trace.json")
    trainer = make_trainer(batches=4, max_epochs=3, hooks=[hook])
    trainer.iter, trainer.epoch = 4, 1

    trainer.train()

    assert optimizer_steps(trainer.work_dir / "trace.json") == 2


def test_each_rank_writes_its_own_trace(make_trainer: Make) -> None:
    """Several ranks share the work directory."""

    def be(rank: int, ranks: int) -> Callable[[Trainer], None]:
        return lambda trainer: vars(trainer).update(rank=rank, world_size=ranks)

    one_of_two = CallbackHook(before_train=be(1, 2), after_train_epoch=be(0, 1), priority="HIGHEST")
    trainer = make_trainer(hooks=[one_of_two, ProfilerHook(by_epoch=False, json_trace_path="trace.json")])

    trainer.train()

    assert (trainer.work_dir / "trace_rank1.json").exists()


SCHEDULE = {"wait": 1, "warmup": 1, "active": 1}


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part of the trace would be empty."""
    set_cuda(monkeypatch, is_available=lambda: False)

    with pytest.raises(ValueError, match="activity_with_cuda=True needs a CUDA device"):
        ProfilerHook(activity_with_cuda=True)


@pytest.mark.parametrize(
    ("options", "unit", "message"),
    [
        ({"by_epoch": True}, {"max_iters": 4}, "measured in iterations would profile the whole run"),
        ({"profile_times": 2}, {"max_epochs": 3}, "one epoch at most, got profile_times=2 epochs"),
        ({"by_epoch": False, "profile_times": 9}, {"max_epochs": 2}, "=9 is more than the 8 iterations of"),
        (
            {"by_epoch": False, "profile_times": 2, "schedule": SCHEDULE},
            {"max_epochs": 2},
            "needs 3 .* got 2",
        ),
        ({"schedule": {**SCHEDULE, "wait": 4}}, {"max_epochs": 2}, "needs 6 iterations .* got 4"),
    ],
)
def test_hook_that_would_give_no_trace_is_refused(
    make_trainer: Make, options: dict[str, Any], unit: dict[str, int], message: str
) -> None:
    """The contradiction is an error when the trainer is built."""
    with pytest.raises(ValueError, match=message):
        make_trainer(hooks=[ProfilerHook(**options)], **unit)
