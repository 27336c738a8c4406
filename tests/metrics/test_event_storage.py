"""A storage as a context: loops without a trainer, and `get_event_storage` in code that is given neither."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop import Bus, EventStorage, get_event_storage
from eventloop.events import ScalarsLogged
from eventloop.events.run import Run
from eventloop.hooks import PreciseBN
from eventloop.writers import JSONLWriter, read_jsonl
from tests.support.trainers import MakeTrainer, batches, tiny_model

OUTSIDE = r"found no storage on this thread: call it inside `with EventStorage\(start_iter\) as storage:`, or while a Trainer runs"


class Counting(torch.nn.Module):
    """A model of detectron2's habit: its forward pass puts a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny_model()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Put how many samples there are."""
        get_event_storage().put_scalar("samples", len(inputs))
        found: torch.Tensor = self.norm(self.layers(inputs))
        return found


def refused() -> bool:
    """Whether there is no storage here."""
    with pytest.raises(RuntimeError, match=OUTSIDE):
        get_event_storage()
    return True


# --- a loop without a trainer --------------------------------------------------------------------------------


def test_a_loop_of_ones_own() -> None:
    """Values belong to the iteration that `step` has counted up to, and are read back as from a trainer's metrics."""
    with EventStorage(5) as storage:
        for value in (4.0, 1.0, 2.0):
            storage.put_scalar("loss", torch.tensor(value))
            storage.put_scalar("lr", 0.1, smoothing_hint=False)
            storage.step()

    history = storage.history("loss")
    assert (storage.iter, history.values()) == (8, [(4.0, 5), (1.0, 6), (2.0, 7)])
    assert (history.latest(), history.median(20), history.avg(2)) == (2.0, 2.0, 1.5)
    assert history.global_avg() == 7 / 3
    assert storage.latest_with_smoothing_hint(20) == {"loss": (2.0, 7), "lr": (0.1, 7)}


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        ("x", TypeError, "start_iter must be an int, got 'x'"),
        (-1, ValueError, "start_iter must be at least 0, got -1"),
    ],
)
def test_a_bad_start_is_refused(start: Any, error: type[Exception], message: str) -> None:
    """The first iteration is an int of at least 0."""
    with pytest.raises(error, match=message):
        EventStorage(start)


def test_several_by_keyword() -> None:
    """`put_scalars` takes numbers as `dict` does: of a mapping, by keyword, or both."""
    storage = EventStorage()
    storage.put_scalars(time=0.5, loss=2.0)
    storage.put_scalars({"box/AP": 1.0}, time=0.25, cur_iter=3)

    assert storage.latest() == {"time": (0.25, 3), "loss": (2.0, 0), "box/AP": (1.0, 3)}
    with pytest.raises(TypeError, match=r"time.*'fast'"):
        storage.put_scalars(loss=1.0, time="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a mapping .*, got 'loss': use put_scalar\('loss', value\)"):
        storage.put_scalars("loss", 1.0)  # type: ignore[arg-type]


def test_writers_of_a_loop_without_a_trainer(tmp_path: Path) -> None:
    """What `collect` returns may be posted on a bus, whose writers get the mean of each interval."""
    with Bus() as bus, EventStorage() as storage:
        JSONLWriter().attach(bus, lambda: Run(work_dir=str(tmp_path)))
        for value in (1.0, 3.0, 5.0, 9.0):
            storage.put_scalars(loss=torch.tensor(value))
            storage.step()
            if storage.iter % 2 == 0:
                bus.post(storage.collect(), ScalarsLogged)

    written = [(line["step"], line["loss"]) for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert written == [(2, 2.0), (4, 7.0)]


# --- the innermost -------------------------------------------------------------------------------------------


def test_the_innermost_with() -> None:
    """The storage of the `with` around, also of one that is entered twice or left by an error; outside there is none."""
    with EventStorage() as outer:
        with EventStorage() as inner, outer:
            with inner:
                assert get_event_storage() is inner
            with pytest.raises(KeyError, match="of the loop"), inner:
                raise KeyError("of the loop")
            assert get_event_storage() is outer
        assert get_event_storage() is outer
    assert refused()


def test_a_thread_has_its_own() -> None:
    """One that is started inside has no storage, not even in a copy of the context, and may enter another."""
    seen: list[object] = []

    def check_inner() -> None:
        seen.append(refused())
        with EventStorage() as own:
            seen.append(get_event_storage() is own)
        seen.append(refused())

    with EventStorage() as storage:
        for target in (check_inner, contextvars.copy_context().run):
            thread = threading.Thread(target=target, args=() if target is check_inner else (check_inner,))
            thread.start()
            thread.join()
        assert get_event_storage() is storage
    assert seen == [True] * 6


def test_tasks_do_not_mix() -> None:
    """Tasks that run in turn on one thread have a storage each, or that of the code which created them."""

    async def count(start: int | None, times: int) -> list[int]:
        if start is None:
            return [get_event_storage().iter]
        found = []
        with EventStorage(start):
            for _ in range(times):
                await asyncio.sleep(0)
                found.append(get_event_storage().iter)
        return found

    async def main() -> list[list[int]]:
        with EventStorage(7):
            return [*await asyncio.gather(count(1, 3), count(2, 2), count(None, 1))]

    assert asyncio.run(main()) == [[1, 1, 1], [2, 2], [7]]


def test_a_generator_that_is_closed_elsewhere() -> None:
    """One that was left within its `with` may be closed in a context that never entered it."""

    def loop() -> Generator[EventStorage]:
        with EventStorage() as storage:
            yield storage

    running = loop()
    contextvars.copy_context().run(next, running)
    running.close()
    assert refused()


# --- in a trainer's run --------------------------------------------------------------------------------------


def test_a_model_puts_numbers_of_its_own(make_trainer: MakeTrainer) -> None:
    """While a trainer runs, a model that is given no trainer finds its metrics; afterwards they are no longer current."""
    trainer = make_trainer(model=Counting(), train_loader=batches(3, size=4), max_epochs=1)
    with EventStorage() as around:
        trainer.train()
        assert get_event_storage() is around

    assert trainer.metrics.history("samples").values() == [(4.0, 0), (4.0, 1), (4.0, 2)]
    assert refused()


def test_a_hand_written_loop_that_is_left(make_trainer: MakeTrainer) -> None:
    """The metrics are current in the body of its loops, and not after an error or a `break` ends them."""
    trainer = make_trainer(train_loader=None)

    def loop(error: Exception | None) -> None:
        for _ in trainer.epochs():
            for inputs, _ in trainer.batches(batches(2)):
                assert get_event_storage() is trainer.metrics
                if error is not None:
                    raise error
                trainer.outputs = {"loss": trainer.model(inputs).sum()}
            break

    with pytest.raises(KeyError, match="of the loop"):
        loop(KeyError("of the loop"))
    assert refused()
    loop(None)
    assert refused()


def test_what_precise_bn_runs_is_not_logged(make_trainer: MakeTrainer) -> None:
    """The numbers a model puts in its pass are not training's."""
    trainer = make_trainer(model=Counting(), max_epochs=1, hooks=[PreciseBN(num_iter=5)])
    trainer.train()

    assert len(trainer.metrics.history("samples")) == 3
