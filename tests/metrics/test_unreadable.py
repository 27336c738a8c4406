"""Values that cannot become floats: refused where that can be seen, and otherwise lost alone, and named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eventloop.events import Event, ScalarsLogged
from eventloop.hooks import LoggerHook
from eventloop.metrics import EventStorage
from eventloop.metrics.rows import RunLimits
from eventloop.metrics.storage import CHECK_EVERY
from tests.support.trainers import MakeTrainer, batches

COMPLEX = torch.tensor(1j)
META = torch.empty((), device="meta")


def scalars(events: list[Event]) -> list[tuple[int, dict[str, float]]]:
    """The step and the scalars of each."""
    return [(event.step, event.scalars) for event in events if isinstance(event, ScalarsLogged)]


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's messages about values that cannot be read, up to the error itself."""
    return [r.getMessage().partition(":")[0] for r in caplog.records if "cannot be read" in r.getMessage()]


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor(1.0), 0.1, 0, torch.qint8)


# --- refused where they are put ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: COMPLEX,
            r"scalar 'x' must be a real number, got torch.complex64: put its real part, or its abs",
        ),
        (lambda: torch.tensor(1j).requires_grad_() * 2, "got torch.complex64"),
        (lambda: META, "got a tensor of the meta device, which holds no values"),
        (lambda: torch.ones(1).to_sparse(), r"got a tensor of layout torch.sparse_coo: put its to_dense\(\)"),
        (lambda: torch.empty((), dtype=torch.bits8), "got torch.bits8, whose elements cannot be read"),
        (quantized, r"got quantized torch.qint8: put its dequantize\(\)"),
    ],
    ids=["complex", "result", "meta", "sparse", "bits", "quantized"],
)
def test_a_tensor_whose_kind_has_no_floats_is_refused(make: Callable[[], torch.Tensor], message: str) -> None:
    """By `put_scalar` and `put_scalars`, each time, until the name has had a number; nothing is put."""
    storage, value = EventStorage(), make()
    for _ in range(2):
        with pytest.raises(TypeError, match=message):
            storage.put_scalar("x", value)
        with pytest.raises(TypeError, match=message):
            storage.put_scalars({"a": 1.0, "x": value})

    assert (storage.pending, storage.latest()) == (0, {})


@pytest.mark.parametrize(
    "value",
    [COMPLEX, META, torch.ones(1).to_sparse(), np.complex64(1j), np.array("1.5"), 10**400, 1j],
    ids=repr,
)
def test_an_output_that_is_no_number_is_left_alone(value: Any) -> None:
    """`put_numbers` leaves it out, as it does any other output of a step."""
    storage = EventStorage()
    for storage.iter in range(2):
        storage.put_numbers({"loss": torch.tensor(1.5), "other": value, "n": 3})
        storage.put_numbers({"other": value})

    assert storage.latest() == {"loss": (1.5, 1), "n": (3.0, 1)}
    assert not storage.unreadable


# --- lost alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [COMPLEX, META], ids=["complex", "meta"])
@pytest.mark.parametrize("hint", [True, False])
def test_a_value_that_cannot_be_read_is_lost_alone(
    bad: torch.Tensor, hint: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The others of its name, and of its interval, are delivered; it is counted, and logged with name and iteration."""
    storage = EventStorage()
    for storage.iter in range(4):
        storage.put_scalar("loss", torch.tensor(1.0))
        storage.put_scalar("z", bad if storage.iter == 2 else torch.tensor(float(storage.iter)), hint)

    events = storage.collect(RunLimits()).events()

    values = {value for _, row in scalars(events) for name, value in row.items() if name == "z"}
    assert (4, {"loss": 1.0, "z": 4 / 3 if hint else 3.0}) in scalars(events)
    assert values == ({4 / 3} if hint else {0.0, 1.0, 3.0})
    assert storage.unreadable == {"z": 1}
    assert reported(caplog) == ["metric 'z' of iteration 2 cannot be read and is left out (1 so far)"]
    assert storage.history("z").values() == [(0.0, 0), (1.0, 1), (3.0, 3)]


def test_values_that_were_put_together_are_lost_apart() -> None:
    """Of a mapping those that can be read are delivered, and those before and after it with their names."""
    storage = EventStorage()
    for storage.iter, z in enumerate([torch.tensor(5.0), COMPLEX, torch.tensor(7.0)]):
        storage.put_scalars({"a": 1.0, "z": z, "b": torch.tensor(2.0)}, smoothing_hint=False)

    assert scalars(storage.collect().events()) == [
        (1, {"a": 1.0, "z": 5.0, "b": 2.0}),
        (2, {"a": 1.0, "b": 2.0}),
        (3, {"a": 1.0, "z": 7.0, "b": 2.0}),
    ]


def test_a_name_is_logged_the_1st_2nd_4th_time(caplog: pytest.LogCaptureFixture) -> None:
    """A value that is bad in every iteration does not fill the log; the count is exact."""
    storage = EventStorage()
    storage.put_scalars({"y": 1.0, "z": 1.0})
    for storage.iter in range(1, 8):
        storage.put_scalars({"y": COMPLEX, "z": COMPLEX})
    storage.collect().events()

    assert storage.unreadable == {"y": 7, "z": 7}
    assert [line for line in reported(caplog) if "'z'" in line] == [
        f"metric 'z' of iteration {n} cannot be read and is left out ({n} so far)" for n in (1, 2, 4)
    ]


def test_reading_early_raises_nothing() -> None:
    """`latest` gives the readable values and counts a bad one once; the later log is the same as without it."""
    storage = EventStorage()
    storage.put_scalars({"a": 1.0, "z": 1.0})
    for storage.iter in range(1, 4):
        storage.put_scalars({"a": torch.tensor(3.0), "z": COMPLEX})
        assert storage.latest() == {"a": (3.0, storage.iter), "z": (1.0, 0)}

    assert scalars(storage.collect().events()) == [(1, {"z": 1.0}), (4, {"a": 2.5})]
    assert storage.unreadable == {"z": 3}
    assert storage.history("a").values() == [(1.0, 0), (3.0, 1), (3.0, 2), (3.0, 3)]


def test_looking_at_what_waits_raises_nothing() -> None:
    """The training thread, which makes numbers of waiting tensors on the CPU, leaves the bad one to the background."""
    storage = EventStorage()
    for storage.iter in range(CHECK_EVERY + 1):
        storage.put_scalar("z", COMPLEX if storage.iter == 3 else torch.tensor(1.0))

    packet = storage.collect()
    assert [row.iteration for row in packet.rows if isinstance(row.values, torch.Tensor)] == [3]
    assert scalars(packet.events()) == [(CHECK_EVERY + 1, {"z": 1.0})]
    assert storage.unreadable == {"z": 1}


# --- of a run ----------------------------------------------------------------------------------------------


def test_an_output_that_ceases_to_be_a_number_is_named_at_the_end(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """The training goes on, the losses are all there, and log and summary name the lost values."""
    caplog.set_level(logging.ERROR, "eventloop")

    def step(trainer: Any, batch: Any) -> Any:
        loss = trainer.model(batch[0]).square().mean()
        return {"loss": loss, "z": COMPLEX if trainer.iter in (3, 4) else 1.0}

    trainer = make_trainer(
        train_step=step, train_loader=batches(6), max_epochs=1, hooks=[LoggerHook(interval=2)]
    )
    with trainer.bus.capture("scalars_logged") as seen:
        trainer.train()

    logged = scalars(seen)
    assert [step for step, row in logged if "loss" in row] == [2, 4, 6]
    assert [step for step, row in logged if "z" in row] == [2, 3, 6]
    assert reported(caplog)[0] == "metric 'z' of iteration 3 cannot be read and is left out (1 so far)"
    assert "metrics: values that could not be read: z (2)" in trainer.summary()

    trainer.metrics.unreadable.update({f"z{i}": 1 for i in range(12)})
    assert "z8 (1), and 3 names more" in trainer.summary()
