"""Metrics of a validation: means over samples, and whatever evaluators make of predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from eventloop.evaluation.evaluation import Evaluation, accuracy, batch_size
from tests.support.trainers import MakeTrainer, batches, samples


class CountRight:
    """A metric object as torchmetrics' are."""

    def __init__(self) -> None:
        self.right = self.seen = self.resets = 0

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.right += int((preds.argmax(1) == target).sum())
        self.seen += len(target)

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.right / self.seen)

    def reset(self) -> None:
        self.right = self.seen = 0
        self.resets += 1


class Pair(CountRight):
    """A metric with two numbers."""

    def compute(self) -> Any:
        return {"right": self.right, "seen": torch.tensor(self.seen)}


def error_rate(preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A function of one batch."""
    return 1 - accuracy(preds, target)


def both(preds: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """A function with two numbers."""
    return {"right": accuracy(preds, target), "wrong": error_rate(preds, target)}


def unequal() -> list[Any]:
    """Batches of 4, 4 and 2 samples."""
    inputs, target = samples(10).tensors
    return list(zip(inputs.split(4), target.split(4), strict=True))


def test_means_are_over_samples(make_trainer: MakeTrainer) -> None:
    """Batches of unequal size count by their samples: the loss is that of the whole set."""
    trainer = make_trainer(val_loader=unequal())
    inputs, target = samples(10).tensors

    metrics = trainer.val()

    trainer.model.eval()
    with torch.no_grad():
        preds = trainer.model(inputs)
    assert metrics["loss"] == pytest.approx(F.cross_entropy(preds, target).item())
    assert metrics["accuracy"] == pytest.approx(accuracy(preds, target).item())


def test_numbers_of_a_val_step(make_trainer: MakeTrainer) -> None:
    """Every number val_step returns, of Python or of torch, is averaged over samples."""
    trainer = make_trainer(
        val_loader=unequal(),
        val_step=lambda trainer, batch: {"n": len(batch[1]), "t": torch.tensor(len(batch[1])), "flag": True},
    )

    assert trainer.val() == {"n": pytest.approx(3.6), "t": pytest.approx(3.6), "flag": 1.0}


@pytest.mark.parametrize(
    "value",
    [
        np.float32(2.5),
        np.float64(2.5),
        np.array(2.5),
        np.array([2.5]),
        torch.tensor([2.5]),
        torch.tensor(2.5).double(),
    ],
    ids=repr,
)
def test_numbers_of_numpy_count(make_trainer: MakeTrainer, value: Any) -> None:
    """As those of Python and of torch do."""
    trainer = make_trainer(
        val_loader=unequal(), val_step=lambda trainer, batch: {"x": value, "n": np.int64(3), "b": np.bool_(1)}
    )

    assert trainer.val() == {"x": 2.5, "n": 3.0, "b": 1.0}


@pytest.mark.parametrize("value", [0.85, 1 - 1e-12, 123456789.123, 2**53 - 1], ids=repr)
@pytest.mark.parametrize("where", ["val_step", "evaluator"])
def test_numbers_are_not_rounded(make_trainer: MakeTrainer, value: float, where: str) -> None:
    """A number of Python's is not brought through a device's floats: close scores do not tie."""
    step = {"preds": torch.ones(1), "target": torch.ones(1), **({"x": value} if where == "val_step" else {})}
    evaluator = {"x": lambda preds, target: value} if where == "evaluator" else {"y": lambda preds, target: 1}
    trainer = make_trainer(val_loader=unequal(), val_step=lambda trainer, batch: step, evaluator=evaluator)

    assert trainer.val()["x"] == value


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """Whatever comes before and after it."""
    evaluation = Evaluation(None)
    for value in (1.0, bad, 2.0):
        evaluation.add({"x": value, "t": torch.tensor(value)}, samples=4)

    metrics = evaluation.compute()

    assert metrics["x"] == metrics["t"] == bad or metrics["x"] != metrics["x"] != metrics["t"] != metrics["t"]


def test_numbers_and_tensors_of_one_name() -> None:
    """Are averaged together, by their samples."""
    evaluation = Evaluation(None)
    for value, count in ((1.0, 3), (torch.tensor(2.0), 1), (torch.tensor(4.0).double(), 4), (2, 0)):
        evaluation.add({"x": value}, count)

    assert evaluation.compute() == {"x": pytest.approx((3 + 2 + 16) / 8)}


@pytest.mark.parametrize("value", [None, "0.85", 1j, np.complex64(1j)], ids=repr)
def test_what_is_no_number_is_told_once(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    """By its name, in the first validation; lists and larger tensors are for handlers, and nothing is said of them."""
    outputs = {"a": 1.0, "b": value, "boxes": [1, 2], "scores": torch.ones(3), "empty": np.ones(0)}
    trainer = make_trainer(val_loader=unequal(), val_step=lambda trainer, batch: outputs)

    assert trainer.val() == trainer.val() == {"a": 1.0}

    (told,) = [line for line in caplog.messages if "becomes no metric" in line]
    assert f"val_step returned {value!r} as 'b'" in told


def test_predictions_of_one_sample_are_no_metric(make_trainer: MakeTrainer) -> None:
    """A last batch of one sample has a target of one element, which is still no number to average."""
    trainer = make_trainer(val_loader=batches(2, size=1))

    assert trainer.val().keys() == {"loss", "accuracy"}


def test_regression_has_no_accuracy(make_trainer: MakeTrainer) -> None:
    """Without class indices there is the loss alone."""
    loader = [(torch.ones(4, 2), torch.ones(4, 3))]
    trainer = make_trainer(val_loader=loader, loss_fn=F.mse_loss)

    assert trainer.val().keys() == {"loss"}


@pytest.mark.parametrize(
    ("evaluator", "names"),
    [
        (error_rate, {"error_rate"}),
        (CountRight(), {"CountRight"}),
        ([accuracy, error_rate], {"accuracy", "error_rate"}),
        ({"top1": accuracy, "object": CountRight()}, {"top1", "object"}),
        (both, {"right", "wrong"}),
        (Pair(), {"right", "seen"}),
    ],
    ids=["function", "object", "list", "mapping", "function of two", "object of two"],
)
def test_forms_of_evaluators(make_trainer: MakeTrainer, evaluator: Any, names: set[str]) -> None:
    """A function, a metric object, or several, each named by itself, by a mapping, or by what it returns."""
    trainer = make_trainer(val_loader=unequal(), evaluator=evaluator)

    assert trainer.val().keys() == {"loss", *names}


def test_functions_and_objects_agree(make_trainer: MakeTrainer) -> None:
    """A function averaged over samples gives what a metric object counts."""
    trainer = make_trainer(val_loader=unequal(), evaluator={"a": accuracy, "b": CountRight()})

    metrics = trainer.val()

    assert metrics["a"] == pytest.approx(metrics["b"])


def test_metric_objects_are_reset(make_trainer: MakeTrainer) -> None:
    """Every pass begins with empty metric objects."""
    metric = CountRight()
    trainer = make_trainer(val_loader=unequal(), evaluator=metric)

    assert trainer.val() == trainer.val()
    assert (metric.resets, metric.seen) == (2, 10)


def test_metrics_are_floats(make_trainer: MakeTrainer) -> None:
    """What a validation returns can be written down: floats, whatever they were."""
    trainer = make_trainer(val_loader=unequal(), evaluator=[Pair(), accuracy])

    assert {type(value) for value in trainer.val().values()} == {float}


@pytest.mark.parametrize(
    ("evaluator", "error", "message"),
    [
        (CountRight, TypeError, r"evaluator 'CountRight' is a class: give an object of it, CountRight\(\)"),
        ([CountRight(), CountRight()], ValueError, "two evaluators are named 'CountRight'"),
        ({"a": 3}, TypeError, "evaluator 'a' must be a function .preds, target. or a metric, got 3"),
    ],
)
def test_wrong_evaluators(
    make_trainer: MakeTrainer, evaluator: Any, error: type[Exception], message: str
) -> None:
    """What cannot evaluate, or would overwrite another's result, is refused when the trainer is built."""
    with pytest.raises(error, match=message):
        make_trainer(evaluator=evaluator)


@pytest.mark.parametrize("evaluator", [accuracy, CountRight()], ids=["function", "object"])
def test_two_sources_of_one_metric(make_trainer: MakeTrainer, evaluator: Any) -> None:
    """A name that val_step and an evaluator both return would mix two things: it is refused."""
    trainer = make_trainer(val_loader=batches(1), evaluator={"loss": evaluator})

    with pytest.raises(ValueError, match="'loss' comes from val_step and from evaluator 'loss'"):
        trainer.val()


def test_an_evaluator_without_predictions(make_trainer: MakeTrainer) -> None:
    """An evaluator whose val_step returns no predictions says what it needs."""
    trainer = make_trainer(
        val_loader=batches(1), evaluator=accuracy, val_step=lambda trainer, batch: {"score": 1.0}
    )

    with pytest.raises(ValueError, match=r"evaluators need 'preds' and 'target' .* returned \['score'\]"):
        trainer.val()


def test_evaluation_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are added up where they are: they are read at the end of the pass, not per batch."""
    reads: list[str] = []
    for name in ("item", "tolist", "__float__", "cpu"):
        original = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, original: Any = original, name: str = name) -> Any:
            reads.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, read)
    evaluation = Evaluation(None)
    for _ in range(5):
        evaluation.add({"loss": torch.tensor(1.0), "score": torch.tensor(2.0)}, samples=4)
    before = list(reads)

    metrics = evaluation.compute()

    assert before == []
    assert reads == ["tolist"]
    assert metrics == {"loss": 1.0, "score": 2.0}


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(5, 2), 5),
        ((torch.ones(5, 2), torch.ones(5)), 5),
        ({"image": torch.ones(5, 2)}, 5),
        ({"name": "x", "image": torch.ones(5, 2)}, 5),
        ([["a", "b", "c"], torch.ones(3)], 3),
        ([{"image": torch.ones(7, 2)}, {"image": torch.ones(7, 2)}], 2),
        (["a", "b", "c"], 3),
        (torch.ones(()), 1),
        ("text", 1),
    ],
    ids=str,
)
def test_batch_size(batch: Any, size: int) -> None:
    """The first dimension of the first tensor, else the length, else 1; a list of mappings is of samples."""
    assert batch_size(batch) == size
