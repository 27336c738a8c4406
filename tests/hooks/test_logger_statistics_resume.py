"""The statistics of LoggerHook(custom_cfg=...) in checkpoints: a resumed run logs what the uninterrupted one does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import CheckpointHook, Hook, LoggerHook
from eventloop.metrics import EventStorage
from eventloop.metrics.statistics import LogStatistics
from tests.hooks.conftest import Make
from tests.support.internals import substitute
from tests.support.meeting import Meeting, Rank, poll_in_turn

Logged = list[tuple[int, dict[str, float]]]

STATISTICS: list[dict[str, Any]] = [
    {"data_src": "x", "log_name": "mean"},
    {"data_src": "x", "log_name": "least", "method_name": "min"},
    {"data_src": "x", "log_name": "most", "method_name": "max", "window_size": "epoch"},
    {"data_src": "x", "log_name": "of_epoch", "window_size": "epoch"},
    {"data_src": "x", "log_name": "last_five", "method_name": "median", "window_size": 5},
    {"data_src": "x", "log_name": "spread", "method_name": lambda v: max(v) - min(v), "window_size": 4},
    {"data_src": "loss", "method_name": "mean", "log_name": "loss_so_far"},
]


class PutX(Hook):
    """Puts a number that goes up and down, as a float or as a tensor."""

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Put it in time for the log of this iteration."""
        x = float(7 * event.iter % 10)
        trainer.metrics.put_scalar("x", x if event.iter % 2 else torch.tensor(x))


def train(make_trainer: Make, resume: str = "", interval: int = 3, **options: Any) -> Logged:
    """Train two epochs of six iterations with a checkpoint of each, or go on from one; what the statistics were."""
    entries = options.pop("custom_cfg", STATISTICS)
    hooks = [PutX(), LoggerHook(interval, custom_cfg=entries), CheckpointHook(1, by_epoch=False)]
    trainer = make_trainer(batches=6, max_epochs=2, hooks=hooks, **options)
    seen: Logged = []
    names = {entry["log_name"] for entry in entries}
    trainer.bus.subscribe(
        lambda event: seen.append((event.step, {k: v for k, v in event.scalars.items() if k in names})),
        "scalars_logged",
        offload="thread",
    )
    if resume:
        trainer.resume(resume)
    trainer.train()
    return [(step, scalars) for step, scalars in seen if scalars]


@pytest.mark.representative(2)
@pytest.mark.parametrize("interval", [1, 3, 4])
@pytest.mark.parametrize("resume", ["iter_2", "iter_6", "iter_7"])
def test_resumed_run_logs_what_the_uninterrupted_one_does(
    make_trainer: Make, interval: int, resume: str
) -> None:
    """Every window goes on, bit for bit, from a checkpoint between two logs, or between two epochs, too."""
    whole = train(make_trainer, interval=interval)
    resumed = train(make_trainer, resume, interval)

    begin = int(resume.removeprefix("iter_"))
    assert resumed == [(step, scalars) for step, scalars in whole if step > begin]
    assert resumed


def test_stopped_run_goes_on(make_trainer: Make, tmp_path: Any) -> None:
    """A run that a stop ended between two logs, and that logged its rest, is gone on with as if it had not ended."""
    whole = train(make_trainer, work_dir=tmp_path / "whole")
    hooks = [PutX(), LoggerHook(3, custom_cfg=STATISTICS), CheckpointHook()]
    stopped = make_trainer(batches=6, max_epochs=2, hooks=hooks)
    stopped.bus.subscribe(lambda t, e: t.stop("enough") if e.iter == 6 else None, "after_train_iter")
    stopped.train()

    resumed = train(make_trainer, "auto")

    assert resumed == [(step, scalars) for step, scalars in whole if step > 7]


def test_state_is_of_plain_numbers(make_trainer: Make) -> None:
    """A checkpoint with it is read with `weights_only=True`; the state has what was put, logged or not."""
    train(make_trainer, interval=4, custom_cfg=STATISTICS[:1] + STATISTICS[4:5])
    path = make_trainer().work_dir / "iter_7" / "state.pth"

    assert torch.load(path, weights_only=True)["hooks"]["logger"] == {
        "mean": {
            "source": "x",
            "window": "global",
            "count": 7,
            "sum": 27.0,
            "least": 0.0,
            "most": 8.0,
            "current": 2.0,
            "epoch": 0,
        },
        "last_five": {"source": "x", "window": "last", "values": [4.0, 1.0, 8.0, 5.0, 2.0]},
    }


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("saved", "resumed", "expected"),
    [
        (None, None, []),
        (None, STATISTICS, ["no state of the hook logger, which starts afresh"]),
        (STATISTICS, None, ["a state of the hook logger, which is not stateful here; the state is ignored"]),
    ],
)
def test_statistics_in_one_of_two_runs(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, saved: Any, resumed: Any, expected: list[str]
) -> None:
    """Only a logger with statistics has a state; a run that resumes without, or with new ones, warns, and trains."""
    make_trainer(hooks=[PutX(), LoggerHook(custom_cfg=saved), CheckpointHook()]).train()
    trainer = make_trainer(hooks=[PutX(), LoggerHook(custom_cfg=resumed)], max_epochs=2)

    with caplog.at_level(logging.WARNING, "eventloop"):
        path = trainer.resume()
    trainer.train()

    hooks = torch.load(path / "state.pth", weights_only=True)["hooks"]
    assert ("logger" in hooks) == (saved is not None)
    told = [record.getMessage() for record in caplog.records if "the hook logger" in record.getMessage()]
    assert told == [f"{path} has {text}" for text in expected]
    assert trainer.iter == 8


def test_another_custom_cfg(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Entries are known by name, source and kind of window: another length or method goes on, the rest begins anew."""
    train(make_trainer, custom_cfg=STATISTICS)
    changed = [
        {"data_src": "x", "log_name": "mean", "method_name": "max"},
        {"data_src": "x", "log_name": "last_five", "method_name": max, "window_size": 2},
        {"data_src": "loss", "log_name": "least", "method_name": "min"},
        {"data_src": "x", "log_name": "most", "method_name": "max"},
        {"data_src": "x", "log_name": "new"},
    ]

    with caplog.at_level(logging.WARNING, "eventloop"):
        resumed = dict(train(make_trainer, "iter_11", interval=1, custom_cfg=changed))

    (record,) = caplog.records
    assert "custom_cfg start without values: least, most, new;" in record.getMessage()
    x = [float(7 * iteration % 10) for iteration in range(12)]
    assert {k: v for k, v in resumed[12].items() if k != "least"} == {
        "mean": max(x),
        "last_five": max(x[-2:]),
        "most": x[-1],
        "new": x[-1],
    }


def test_a_hook_of_ones_own_on_top(make_trainer: Make) -> None:
    """A subclass with a state of its own is saved, with statistics or without."""

    class Mine(LoggerHook):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 1, **super().state_dict()}

    assert Mine().stateful
    assert not LoggerHook().stateful
    assert Mine().state_dict() == {"mine": 1}


# --- what was posted, and not told -------------------------------------------------------------------------


@pytest.fixture
def statistics() -> LogStatistics:
    """Of all values of a loss."""
    return LogStatistics([{"data_src": "loss", "method_name": "mean"}])


def test_a_state_has_what_the_background_has_not_come_to(statistics: LogStatistics) -> None:
    """It takes them itself, once: what is told of them later is what it was then."""
    storage = EventStorage()
    told = []
    for storage.iter in range(3):
        storage.put_scalar("loss", torch.tensor(float(storage.iter)))
        told.append(statistics.wrap(storage.collect()))
    storage.put_scalar("loss", 9.0)

    state = statistics.state_dict(storage.read_pending())

    assert (state["loss"]["count"], state["loss"]["sum"]) == (4, 12.0)
    told.append(statistics.wrap(storage.collect()))
    events = [event for each in told for event in each.events()]
    assert [e.scalars["loss"] for e in events if isinstance(e, ScalarsLogged)] == [0.0, 0.5, 1.0, 3.0]
    assert statistics.state_dict([]) == state


def test_a_state_calls_no_function_of_the_users() -> None:
    """Only who logs asks for the statistic: a function that hangs, or fails, holds up no checkpoint."""

    def fails(values: Any) -> float:
        raise AssertionError("asked")

    statistics = LogStatistics([{"data_src": "loss", "method_name": fails, "window_size": 2}])
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    statistics.wrap(storage.collect())

    assert statistics.state_dict([])["loss"]["values"] == [1.0]


def both(meeting: Meeting, statistics: LogStatistics) -> Iterator[Rank]:
    """Two ranks that have put 1 and 3, and posted it, the first with statistics."""
    for number in range(2):
        rank = Rank(meeting, number)
        rank.put(0, loss=1.0 + 2 * number)
        reduced = rank.reducer.reduce(rank.storage.collect(), 0)
        rank.posted.append(reduced if number else statistics.wrap(reduced))
        yield rank


def test_a_state_is_of_all_ranks(monkeypatch: pytest.MonkeyPatch, statistics: LogStatistics) -> None:
    """Values that are reduced are waited for, and are in the state as they are told."""
    first, second = both(Meeting(2), statistics)
    substitute(monkeypatch, "statistics.sleep", lambda seconds: second.poll())

    state = statistics.state_dict([])

    poll_in_turn(first, second)
    assert state["loss"]["sum"] == 2.0
    assert first.scalars == [(0, {"loss": 2.0})]


def test_a_state_without_the_other_ranks(monkeypatch: pytest.MonkeyPatch, statistics: LogStatistics) -> None:
    """Where they do not answer for as long as a log would wait, it has the rank's own values."""
    substitute(monkeypatch, "statistics.WAIT_SECONDS", 0.01)
    [*both(Meeting(2), statistics)]

    assert statistics.state_dict([])["loss"]["sum"] == 1.0
