"""`predict(to=...)`: outputs that a function or a writer receives in the background, batch by batch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from eventloop.evaluation.encoding import encode, outputs_of
from eventloop.events import BatchPredicted, Event
from eventloop.writers import Writer
from tests.support.internals import substitute
from tests.support.predicting import COUNT, expected_of, loader_of
from tests.support.trainers import (
    DEADLINE,
    MakeTrainer,
)


def test_a_function_receives_each_batch(make_trainer: MakeTrainer) -> None:
    """It is called in the background, in the order of the loader; everything has arrived when predict returns None."""
    trainer = make_trainer()
    got: list[Any] = []
    threads: set[int] = set()

    def save(outputs: Any) -> None:
        got.append(outputs)
        threads.add(threading.get_ident())

    assert trainer.predict(loader_of(), to=save) is None

    assert [len(each) for each in got] == [4, 4, 3]
    torch.testing.assert_close(torch.cat(got), expected_of(trainer))
    assert threads.isdisjoint({threading.get_ident()})
    assert trainer.predict(loader_of()).shape == (COUNT, 3)  # the subscription has ended
    assert len(got) == 3


def test_a_coroutine_function_receives_each_batch(make_trainer: MakeTrainer) -> None:
    """It runs on the bus's event loop."""
    trainer = make_trainer(predict_step=lambda trainer, batch: {"n": len(batch[0])})
    got: list[Any] = []

    async def upload(outputs: Any) -> None:
        got.append(outputs["n"])

    trainer.predict(loader_of(), to=upload)

    assert got == [4, 4, 3]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2).to_sparse(),
    ],
    ids=["number", "empty", "bfloat16", "bool", "transposed", "conjugated", "sparse"],
)
def test_outputs_are_decoded_as_they_were(tensor: torch.Tensor) -> None:
    """A tensor of any type and layout comes back with its values, and can be written to; so do other objects."""
    outputs = outputs_of(BatchPredicted(data=encode({"x": tensor, "rest": ("a", [1], np.ones(2))})))

    back = outputs["x"]
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(back.to_dense(), tensor.to_dense())
    back.zero_()
    assert outputs["rest"][:2] == ("a", [1])
    assert outputs["rest"][2].tolist() == [1.0, 1.0]


class Predictions(Writer):
    """Writes the rows of each batch at their indices."""

    events = (BatchPredicted,)

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self.closed = False

    def write(self, event: Event) -> None:
        assert isinstance(event, BatchPredicted)
        self.rows |= zip(event.indices, outputs_of(event), strict=True)

    def close(self) -> None:
        self.closed = True


def test_a_writer_receives_events(make_trainer: MakeTrainer) -> None:
    """The event has the indices of the samples; the writer is closed when predict returns, and may be used again."""
    trainer = make_trainer()
    writer = Predictions()

    for _ in range(2):
        writer.rows.clear()
        writer.closed = False
        trainer.predict(loader_of(shuffle=True), to=writer)

        rows = torch.stack([writer.rows[index] for index in range(COUNT)])
        torch.testing.assert_close(rows, expected_of(trainer))
        assert writer.closed


def test_the_model_does_not_wait_for_the_function(make_trainer: MakeTrainer) -> None:
    """The function may wait for the last batch of the pass: all are computed before it has received the first."""
    trainer = make_trainer()
    last, got = threading.Event(), list[int]()
    trainer.bus.subscribe(
        lambda event: last.set(), "after_predict_iter", when=lambda event: event.batch_idx == 2
    )

    def save(outputs: Any) -> None:
        assert last.wait(DEADLINE)
        got.append(len(outputs))

    trainer.predict(loader_of(), to=save)

    assert got == [4, 4, 3]


def test_memory_is_bounded(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most the limit waits for a function that is slower than the model."""
    size = 10_000
    substitute(monkeypatch, "prediction.BACKLOG_BYTES", 3 * 4 * size)
    computed: list[int] = []
    ahead: list[int] = []
    trainer = make_trainer(predict_step=lambda trainer, batch: torch.zeros(1, size))
    trainer.bus.subscribe(lambda event: computed.append(event.batch_idx), "after_predict_iter")

    def save(outputs: Any) -> None:
        for _ in range(50):  # as slow as the reading of a limited queue needs
            torch.zeros(100_000).sum()
        ahead.append(len(computed) - len(ahead))

    trainer.predict([torch.zeros(1)] * 40, to=save)

    assert len(ahead) == 40
    assert max(ahead) <= 3 + 3  # those that wait, under way, on their way to the host, and computed meanwhile


def fail(outputs: Any) -> None:
    """Raise at each batch."""
    raise OSError(f"no room for {len(outputs)}")


async def fail_later(outputs: Any) -> None:
    """Raise at each batch, in a coroutine."""
    fail(outputs)


class Broken(Predictions):
    """Fails at its second event."""

    def write(self, event: Event) -> None:
        if self.rows:
            raise OSError("the disk is full")
        super().write(event)


@pytest.mark.parametrize(
    ("to", "error", "message"),
    [
        (fail, OSError, "no room for 4"),
        (fail_later, OSError, "no room for 4"),
        (
            Broken(),
            RuntimeError,
            r"predict\(to=\.\.\.\): Broken received 1 of 3 batches - .*the disk is full",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_errors_of_the_receiver_are_raised(
    make_trainer: MakeTrainer, to: Any, error: type[Exception], message: str
) -> None:
    """Predictions are not lost silently, and the model has its mode again."""
    trainer = make_trainer()

    with pytest.raises(error, match=message):
        trainer.predict(loader_of(), to=to)

    assert trainer.model.training
    assert all("batch_predicted" not in each.event for each in trainer.bus.stats())
    trainer.predict(loader_of())  # nothing of it is raised again
