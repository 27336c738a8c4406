"""The number of samples of a batch, over which the metrics of a validation are averaged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eventloop import Trainer
from eventloop.evaluation.batch_sizes import batch_size
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, batches, tiny_model


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(5, 2), 5),
        ((torch.ones(5, 2), torch.ones(5)), 5),
        ((np.ones((5, 2)), np.ones(5)), 5),
        ({"image": torch.ones(5, 2)}, 5),
        ({"name": "x", "image": torch.ones(5, 2)}, 5),
        ({"anchors": torch.ones(9, 4), "image": torch.ones(5, 3), "label": torch.ones(5)}, 5),
        ({"image": torch.ones(5, 2), "size": (480, 640)}, 5),
        ([["a", "b", "c"], torch.ones(3)], 3),
        ([["a", "b", "c"], ["d", "e", "f"]], 3),
        ([{"image": torch.ones(7, 2)}, {"image": torch.ones(7, 2)}], 2),
        (([torch.ones(3, 5, 5)] * 4, [{"labels": torch.zeros(2)}] * 4), 4),
        (([torch.ones(3, 5, 5)], [{"labels": torch.zeros(2)}]), 1),
        (([torch.ones(3, 5, 5)] * 4, [0, 1, 2, 0]), 4),
        (([torch.ones(5, 2), torch.ones(5, 3)], None), 5),
        ({"views": [torch.ones(5, 2), torch.ones(5, 2)]}, 5),
        ({"image": [torch.ones(3, 5, 5), torch.ones(1, 5, 5)]}, 2),
        ([(torch.ones(3, 5, 5), 1)] * 5, 5),
        ([(torch.ones(3, 5, 5), torch.tensor(1))] * 5, 5),
        ([(torch.ones(3, 5, 5), torch.ones(5, 5))] * 4, 4),  # an image and its mask
        ([(torch.ones(3, 5, 5), {"boxes": torch.ones(size, 4)}) for size in (2, 3)], 2),
        ([(torch.ones(3, 5, 5), "a.png")] * 5, 5),
        ([("a", "b", "c"), ("d", "e", "f")], 3),
        ([(torch.ones(5, 2), torch.ones(5, 2))] * 2, 5),
        ((torch.ones(4, 3), {"boxes": [torch.ones(6, 4)] * 4, "names": ["a"] * 9}), 4),
        (([torch.ones(5, 2), torch.ones(5, 3)], torch.ones(5)), 5),  # two inputs, and the target
        (["a", "b", "c"], 3),
        ([], 1),
        (torch.ones(()), 1),
        ("text", 1),
    ],
    ids=str,
)
def test_batch_size(batch: Any, size: int) -> None:
    """It is the first dimension that most tensors have; a list of samples counts its length."""
    assert batch_size(batch) == size


def _losses(trainer: Trainer, batch: Any) -> Mapping[str, Any]:
    """Give the loss 1 in the first batch, 6 in the second."""
    return {"loss": 1.0 if trainer.batch is trainer.val_loader[0] else 6.0}  # type: ignore[index]


@pytest.mark.parametrize(
    "loader",
    [
        [([torch.ones(3, 5, 5)] * n, [{"labels": torch.zeros(2)}] * n) for n in (4, 1)],
        [{"anchors": torch.ones(9, 4), "image": torch.ones(n, 3), "label": torch.ones(n)} for n in (4, 1)],
    ],
    ids=["lists of samples", "a dict"],
)
def test_a_mean_is_over_the_samples(loader: Any, make_trainer: MakeTrainer) -> None:
    """The mean of 4 samples with loss 1 and one with loss 6 is 2."""
    assert make_trainer(val_loader=loader, val_step=_losses).val() == {"loss": 2.0}


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            [{"anchors": torch.ones(9, 4), "image": torch.ones(4, 3), "label": torch.ones(4)}] * 2,
            r"different sizes \(anchors 9, image 4, label 4\).* as 4 .*num_samples=",
        ),
        ([([torch.ones(4, 3)] * 2, None)] * 2, r"lists of tensors \(\[0\]: 2 of 4\).* as 4 .*num_samples="),
        ([SimpleNamespace(x=torch.ones(4))] * 2, "type SimpleNamespace, whose size is unknown, counts as 1 "),
    ],
    ids=["tensors disagree", "a list of tensors", "unknown"],
)
def test_a_doubtful_size_is_logged_once(
    loader: Any, message: str, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the parts of the batch, the number that is taken, and how to give another."""
    trainer = make_trainer(val_loader=loader, val_step=lambda trainer, batch: {"loss": 1.0})

    trainer.val()
    trainer.val()

    (record,) = caplog.records
    assert re.search(message, record.getMessage())


def test_sizes_that_agree_are_not_logged(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """A list of images with a list of their targets has one size, whatever the size of an image."""
    loader = [([torch.ones(3, 5, 5)] * 4, [{"labels": torch.zeros(2)}] * 4)]

    make_trainer(val_loader=loader, val_step=lambda trainer, batch: {"loss": 1.0}).val()

    assert caplog.records == []


@pytest.mark.parametrize("number", [int, np.int64, torch.tensor], ids=["int", "NumPy", "a tensor"])
def test_val_step_says_the_size(
    number: Any, make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    """`num_samples` weights the batch whatever its form, and is no metric."""

    def val_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        return {"loss": batch.loss, "num_samples": number(batch.graphs)}

    loader = [SimpleNamespace(loss=1.0, graphs=4), SimpleNamespace(loss=6.0, graphs=1)]

    assert make_trainer(val_loader=loader, val_step=val_step).val() == {"loss": 2.0}
    assert caplog.records == []


def test_tokens_as_weights(make_trainer: MakeTrainer) -> None:
    """With the tokens of each batch as `num_samples`, the mean of masked batches is the mean over all tokens."""
    values, mask = torch.arange(30.0).reshape(10, 3), torch.arange(30).reshape(10, 3) % 7 < 3

    def val_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        kept = batch[0][batch[1]]
        return {"loss": kept.mean(), "num_samples": int(batch[1].sum())}

    loader = list(zip(values.split(4), mask.split(4), strict=True))
    got = make_trainer(val_loader=loader, val_step=val_step).val()

    assert got["loss"] == pytest.approx(float(values[mask].mean()))
    assert len({int(part.sum()) for _, part in loader}) > 1


def test_a_sum_is_trained_on_and_a_value_per_sample_logged(make_trainer: MakeTrainer) -> None:
    """A train step that returns both is trained as plain PyTorch trains on the sum, and both are metrics."""

    def errors(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def train_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        loss = errors(trainer.model, batch)
        return {"loss": loss, "loss_per_sample": loss / len(batch[0])}

    trainer = make_trainer(train_step=train_step, max_epochs=1, train_loader=batches(2))
    torch.manual_seed(0)
    trainer.train()

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(0)
    for batch in batches(2):
        optimizer.zero_grad()
        (loss := errors(model, batch)).backward()
        optimizer.step()
    assert_same(model.state_dict(), trainer.model.state_dict())
    assert trainer.metrics.latest()["loss_per_sample"].value == pytest.approx(loss.item() / 4)


def test_a_batch_of_no_samples_does_not_count(make_trainer: MakeTrainer) -> None:
    """The mean over the tokens of a batch that is masked as a whole is NaN, and the metric is that of the others."""

    def val_step(trainer: Trainer, batch: float) -> dict[str, Any]:
        return {"loss": batch, "tensor": torch.tensor(batch), "num_samples": 0 if math.isnan(batch) else 2}

    trainer = make_trainer(val_loader=[1.0, math.nan, 3.0], val_step=val_step)

    assert trainer.val() == {"loss": 2.0, "tensor": 2.0}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (-1, ValueError, "num_samples must be at least 0, got -1"),
        (2.5, TypeError, "num_samples must be an int.* got 2.5"),
        (torch.ones(3), TypeError, "num_samples must be an int.* got tensor"),
        (torch.ones(1, device="meta"), TypeError, "num_samples must be an int.* on meta"),
    ],
    ids=str,
)
def test_a_size_that_is_none_is_refused(
    given: Any, error: type[Exception], message: str, make_trainer: MakeTrainer
) -> None:
    """`num_samples` is an int of at least 0, known to the host."""
    trainer = make_trainer(
        val_loader=[0], val_step=lambda trainer, batch: {"loss": 1.0, "num_samples": given}
    )

    with pytest.raises(error, match=message):
        trainer.val()
