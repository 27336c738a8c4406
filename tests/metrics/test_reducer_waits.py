"""Ranks that do not come to a reduction of metrics: the others log their own values, and wait for a bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from eventloop.bus import Bus
from eventloop.events import ScalarsLogged
from eventloop.metrics import EventStorage
from eventloop.metrics.packet import Packet
from eventloop.metrics.reduce import Reducer
from tests.conftest import DEADLINE
from tests.ranks import run_ranks
from tests.support.internals import substitute
from tests.support.meeting import Meeting, Rank, poll_in_turn


@pytest.fixture
def meeting() -> Meeting:
    """Two ranks'."""
    return Meeting(2)


@pytest.fixture
def ranks(meeting: Meeting) -> list[Rank]:
    """Two."""
    return [Rank(meeting, number) for number in range(2)]


def process_group(monkeypatch: pytest.MonkeyPatch, *, gloo: bool) -> None:
    """Let there seem to be one, of two ranks."""
    for name, value in {"is_initialized": True, "get_world_size": 2, "is_gloo_available": gloo}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)


def log(rank: Rank, iteration: int, loss: float = 0.0) -> None:
    rank.log(iteration, loss=loss)
    rank.poll()


def test_nobody_waits_beyond_the_limit(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank whose others do not come logs its own values, warns once, keeps nothing of them, and reduces again once
    the others have come."""
    first, second = ranks
    log(first, 0)
    assert first.logged == []

    substitute(monkeypatch, "reduce.WAIT_SECONDS", 0.0)
    log(first, 1)
    assert first.scalars == [(0, {"loss": 0.0}), (1, {"loss": 0.0})]
    assert first.reducer.waiting == 0

    substitute(monkeypatch, "reduce.WAIT_SECONDS", DEADLINE)
    for iteration in (0, 1, 2):
        second.log(iteration, loss=1.0)
    first.log(2, loss=0.0)
    poll_in_turn(*ranks)
    assert first.scalars[2:] == second.scalars[2:] == [(2, {"loss": 0.5})]
    assert [rank.reducer.waiting for rank in ranks] == [0, 0]
    (late,) = [record.message for record in caplog.records if "has waited" in record.message]
    assert late.startswith("rank 0 logs its own metrics: it has waited ")
    assert late.endswith(" s for the other ranks, and reduces again once all have answered")


def test_a_run_that_has_ended_waits_less(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the seconds that the close leaves; the next run waits as long as ever."""
    log(ranks[0], 0)
    assert ranks[0].logged == []

    ranks[0].reducer.limit_wait(0.0)
    ranks[0].poll()
    assert ranks[0].scalars == [(0, {"loss": 0.0})]

    process_group(monkeypatch, gloo=True)
    ranks[0].reducer.begin_run()
    log(ranks[0], 1)
    assert len(ranks[0].logged) == 1


def test_a_rank_that_is_gone(ranks: list[Rank], meeting: Meeting, caplog: pytest.LogCaptureFixture) -> None:
    """What waits, and all that comes, is logged with the rank's own values, after one warning."""
    ranks[0].log(0, loss=0.0)
    log(ranks[0], 1, 1.0)
    meeting.disconnect()
    ranks[0].poll()
    log(ranks[0], 2, 2.0)

    assert ranks[0].scalars == [(iteration, {"loss": float(iteration)}) for iteration in range(3)]
    (message,) = [record.message for record in caplog.records]
    assert message == (
        "rank 0 logs its own metrics from here on: the exchange with the other ranks failed "
        "(RuntimeError: Connection closed by peer)"
    )
    assert not ranks[0].reducer.reduces


def test_a_run_that_failed_waits_for_nobody(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its values are logged at once as the rank's own. The next run warns that it does not reduce, as the ranks may be
    at different iterations."""
    log(ranks[0], 0)
    ranks[0].reducer.stop()
    ranks[0].poll()

    assert ranks[0].scalars == [(0, {"loss": 0.0})]
    assert caplog.records == []

    process_group(monkeypatch, gloo=True)
    ranks[0].reducer._world = dist.group.WORLD
    ranks[0].reducer.begin_run()
    assert not ranks[0].reducer.reduces
    assert "metrics are no longer reduced: an earlier run failed or lost a rank" in caplog.text


def test_a_close_keeps_its_deadline(meeting: Meeting) -> None:
    """A bus that closes while values wait for another rank closes in time, and counts what it has not delivered."""
    rank, seen = Rank(meeting, 0), list[ScalarsLogged]()
    bus = Bus()
    subscription = bus.subscribe(seen.append, ScalarsLogged, offload="thread")
    rank.put(0, loss=0.0)
    bus.post(rank.reducer.reduce(rank.storage.collect(), 0), ScalarsLogged)

    assert not bus.close(0.1).complete
    assert (seen, subscription.stats.dropped) == ([], 1)


def test_a_process_without_others_reduces_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its packets are posted as they are; a build of PyTorch without a backend for the host says so."""
    alone = Reducer(["data_time"])
    alone.begin_run()
    assert isinstance(alone.reduce(EventStorage().collect(), 0), Packet)
    assert not alone.reduces

    process_group(monkeypatch, gloo=False)
    alone.begin_run()
    assert not alone.reduces
    assert "metrics are not reduced: this build of PyTorch lacks gloo" in caplog.text


# --- two processes -----------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist

torch.set_num_threads(1)
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)

from eventloop import Bus, Trainer
from eventloop.events import ScalarsLogged
from eventloop.hooks import LoggerHook

def step(trainer, batch):
    if rank == 1 and trainer.iter == 5:  # both have been told of the first three by then
        print("{}", flush=True)
        os._exit(0)
    if trainer.iter == 4:
        trainer.bus.flush(60)
    trainer.metrics.put_scalar("number", trainer.iter + 10.0 * rank, smoothing_hint=False)
    return trainer.model(batch).sum()

model = torch.nn.Linear(2, 1)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_step=step, max_iters=20,
    train_loader=[torch.ones(1, 2)] * 20, hooks=[LoggerHook(3, reduce=True)], default_hooks={"checkpoint": None},
    work_dir="run", bus=Bus(drain_timeout=60.0))
logged = []
trainer.bus.subscribe(logged.append, ScalarsLogged, offload="thread")
try:
    trainer.train()
except RuntimeError as error:
    failed = type(error).__name__
(stats,) = [row for row in trainer.bus.stats() if row.runs_on == "thread" and "append" in row.name]
print(json.dumps({"logged": [(e.iter, e.scalars["number"]) for e in logged], "closed": trainer.bus.closed,
                  "failed": failed, "dropped": stats.dropped, "iter": trainer.iter}))
"""


@pytest.mark.slow
def test_a_run_whose_other_rank_is_killed(tmp_path: Path) -> None:
    """Values that both have are reduced, later ones are the rank's own; its run ends by the error, and drops nothing."""
    first, _ = run_ranks(PROGRAM, tmp_path)

    assert first["failed"] == "RuntimeError"
    assert (first["closed"], first["dropped"]) == (True, 0)
    assert first["logged"][:3] == [[iteration, iteration + 5.0] for iteration in range(3)]
    assert first["logged"][3:] == [[iteration, iteration] for iteration in range(3, first["iter"])]
    assert first["iter"] >= 5
