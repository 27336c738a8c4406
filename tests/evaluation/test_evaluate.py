"""Metrics of a validation: means over samples, and whatever evaluators make of predictions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from eventloop.evaluation.evaluation import Evaluation, accuracy
from tests.support.reading import Reads
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


class ModuleMetric(torch.nn.Module, CountRight):
    """A metric that is a module, as torchmetrics' are, and that notes where it is moved."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        CountRight.__init__(self)
        self.moved_to: list[object] = []

    def to(self, *args: Any, **kwargs: Any) -> ModuleMetric:
        self.moved_to += args
        return self


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


@pytest.mark.parametrize("numbers", [float, torch.tensor], ids=["floats", "tensors"])
def test_means_have_the_bits_of_a_loop_by_hand(make_trainer: MakeTrainer, numbers: Any) -> None:
    """They are those of `total += loss.item() * n`, in double precision, also after 20,000 batches."""
    losses = torch.linspace(0.1, 0.7, 20_000).tolist()
    evaluation = Evaluation(None)
    for loss in losses:
        evaluation.add({"loss": numbers(loss)}, 3)

    total = 0.0
    for loss in losses:
        total += loss * 3
    found = evaluation.compute()["loss"]
    assert found == (total / 60_000 if numbers is torch.tensor else pytest.approx(total / 60_000, rel=1e-14))


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        np.float32(2.5),
        np.array(2.5),
        np.array([2.5]),
        torch.tensor([2.5]),
        torch.tensor(2.5).double(),
        Fraction(5, 2),
    ],
    ids=repr,
)
def test_numbers_of_a_val_step(make_trainer: MakeTrainer, value: Any) -> None:
    """Every number of Python, NumPy or torch becomes a float, averaged over samples."""

    def val_step(trainer: Any, batch: Any) -> dict[str, Any]:
        size = len(batch[1])
        return {"x": value, "n": size, "t": torch.tensor(size), "flag": True, "numpy": np.bool_(1)}

    metrics = make_trainer(val_loader=unequal(), val_step=val_step).val()

    mean = pytest.approx(3.6)
    assert metrics == {"x": 2.5, "n": mean, "t": mean, "flag": 1.0, "numpy": 1.0}
    assert {type(metric) for metric in metrics.values()} == {float}


@pytest.mark.parametrize("value", [1 - 1e-12, 2**53 - 1], ids=repr)
@pytest.mark.parametrize("where", ["val_step", "evaluator"])
def test_numbers_are_not_rounded(make_trainer: MakeTrainer, value: float, where: str) -> None:
    """A number of Python's is not brought through a device's floats: close scores do not tie."""
    step = {"preds": torch.ones(1), "target": torch.ones(1), **({"x": value} if where == "val_step" else {})}
    evaluator = {"x" if where == "evaluator" else "y": lambda preds, target: value}
    trainer = make_trainer(val_loader=unequal(), val_step=lambda trainer, batch: step, evaluator=evaluator)

    assert trainer.val()["x"] == value


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """Whatever comes before and after it."""
    evaluation = Evaluation(None)
    for value in (1.0, bad, 2.0):
        evaluation.add({"x": value, "t": torch.tensor(value)}, samples=4)

    assert evaluation.compute() == {name: pytest.approx(bad, nan_ok=True) for name in ("x", "t")}


def test_numbers_and_tensors_of_one_name() -> None:
    """Are averaged together, by their samples."""
    evaluation = Evaluation(None)
    for value, count in ((1.0, 3), (torch.tensor(2.0), 1), (torch.tensor(4.0).double(), 4), (2, 0)):
        evaluation.add({"x": value}, count)

    assert evaluation.compute() == {"x": pytest.approx((3 + 2 + 16) / 8)}


@pytest.mark.parametrize("value", [None, "0.85", np.complex64(1j)], ids=repr)
def test_what_is_no_number_is_logged_once(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    """It is logged by its name, in the first validation; lists and tensors of more dimensions are for handlers."""
    outputs = {"a": 1.0, "b": value, "boxes": [1, 2], "scores": torch.ones(3, 2), "empty": np.ones(0)}
    trainer = make_trainer(val_loader=unequal(), val_step=lambda trainer, batch: outputs)

    assert trainer.val() == trainer.val() == {"a": 1.0}

    (line,) = [line for line in caplog.messages if "becomes no metric" in line]
    assert f"val_step returned {value!r} as 'b'" in line


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"loss": torch.ones(4, 2)}, r"returned 'loss' of shape \(4, 2\).*take its mean\(\)"),
        ({"right": torch.ones(4) > 0}, r"returned 'right' of shape \(4,\).*take its mean\(\)"),
        ({"right": np.ones(4)}, r"returned 'right' of shape \(4,\).*take its mean\(\)"),
        ({"preds": torch.ones(4, 2)}, "returned 'preds' without 'target'"),
        ({"target": torch.ones(4)}, "returned 'target' without 'preds'"),
    ],
    ids=["loss", "accuracy", "array", "no target", "no predictions"],
)
def test_what_becomes_no_metric_is_logged_once(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, outputs: dict[str, Any], message: str
) -> None:
    """A value for each sample is not averaged, and predictions alone are not scored: one warning says so."""
    trainer = make_trainer(val_loader=unequal(), val_step=lambda trainer, batch: outputs)

    assert trainer.val() == trainer.val() == {}

    (line,) = [line for line in caplog.messages if line.startswith("val_step returned")]
    assert re.search(message, line)


def test_loss_fn_that_returns_a_mapping(make_trainer: MakeTrainer) -> None:
    """It is accepted in validation as in training: its loss and its other numbers are metrics."""

    def loss_fn(preds: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        loss = F.cross_entropy(preds, target)
        return {"loss": loss, "twice": 2 * loss.detach()}

    plain = make_trainer(val_loader=unequal()).val()
    metrics = make_trainer(val_loader=unequal(), loss_fn=loss_fn).val()

    assert metrics == {**plain, "twice": pytest.approx(2 * plain["loss"])}


TARGETS = [(torch.ones(4, 2), torch.ones(4, 3))]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"evaluator": error_rate}, {"error_rate"}),
        ({"evaluator": CountRight()}, {"CountRight"}),
        ({"evaluator": [accuracy, error_rate]}, {"accuracy", "error_rate"}),
        ({"evaluator": {"top1": accuracy, "object": CountRight()}}, {"top1", "object"}),
        ({"evaluator": both}, {"right", "wrong"}),
        ({}, {"accuracy"}),
        ({"val_loader": batches(2, size=1)}, {"accuracy"}),  # targets of one element are no number to average
        (
            {"val_loader": TARGETS, "loss_fn": F.mse_loss},
            set(),
        ),  # without class indices there is the loss alone
    ],
    ids=["function", "object", "list", "mapping", "function of two", "default", "one sample", "regression"],
)
def test_forms_of_evaluators(make_trainer: MakeTrainer, options: dict[str, Any], names: set[str]) -> None:
    """A function, a metric object, or several, each named by itself, by a mapping, or by what it returns."""
    trainer = make_trainer(**{"val_loader": unequal(), **options})

    assert trainer.val().keys() == {"loss", *names}


def test_metric_objects_are_reset(make_trainer: MakeTrainer) -> None:
    """Every pass begins with empty metric objects, and a function averaged over samples gives what an object counts."""
    metric = CountRight()
    trainer = make_trainer(val_loader=unequal(), evaluator={"a": accuracy, "b": metric})

    first, second = trainer.val(), trainer.val()

    assert first == second
    assert first["a"] == pytest.approx(first["b"])
    assert (metric.resets, metric.seen) == (2, 10)


def test_metrics_are_moved_with_the_model(make_trainer: MakeTrainer) -> None:
    """A metric that is a module, as torchmetrics' are, is moved to the trainer's device, if it has one."""
    metric = ModuleMetric()

    make_trainer(val_loader=unequal(), evaluator=metric).val()
    assert metric.moved_to == []

    make_trainer(val_loader=unequal(), evaluator=metric, device="cpu").val()
    assert metric.moved_to == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("evaluator", "error", "message"),
    [
        (CountRight, TypeError, r"evaluator 'CountRight' is a class: give an object of it, CountRight\(\)"),
        ([CountRight(), CountRight()], ValueError, "two evaluators are named 'CountRight'"),
        ("accuracy", TypeError, "evaluator must be a function .preds, target. or a metric, got 'accuracy'"),
        ({"a": 3}, TypeError, "evaluator 'a' must be a function .preds, target. or a metric, got 3"),
    ],
)
def test_wrong_evaluators(
    make_trainer: MakeTrainer, evaluator: Any, error: type[Exception], message: str
) -> None:
    """An object that cannot evaluate, or would overwrite another's result, is refused by the constructor."""
    with pytest.raises(error, match=message):
        make_trainer(evaluator=evaluator)


class Matrix(CountRight):
    """A metric object whose result is no single number, such as a confusion matrix."""

    def compute(self) -> torch.Tensor:
        return torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        (
            lambda preds, target: preds.argmax(1) == target,
            r"number, got a tensor of shape \(4,\): take its mean",
        ),
        (lambda preds, target: None, "number, got None"),
        (lambda preds, target: "0.5", "number, got '0.5'"),
        (lambda preds, target: {"b": [0.5, 0.5]}, r"number as 'b', got \[0.5, 0.5\]"),
        (Matrix(), r"number, got a tensor of shape \(3, 3\): take its mean"),
    ],
    ids=["vector", "None", "text", "mapping", "matrix"],
)
def test_what_an_evaluator_returns_is_checked(
    make_trainer: MakeTrainer, evaluator: Any, message: str
) -> None:
    """A result that is not one number is refused with the evaluator's name and what came."""
    trainer = make_trainer(val_loader=unequal(), evaluator={"acc": evaluator})

    with pytest.raises(TypeError, match=f"evaluator 'acc' must return a {message}"):
        trainer.val()


def test_error_within_an_evaluator_names_it(make_trainer: MakeTrainer) -> None:
    """A torch error about shapes does not say which of several evaluators raised it."""
    trainer = make_trainer(
        val_loader=unequal(), evaluator={"a": accuracy, "b": lambda preds, target: preds - torch.ones(7)}
    )

    with pytest.raises(RuntimeError) as caught:
        trainer.val()

    assert "raised by evaluator 'b' on 'preds' and 'target'" in caught.value.__notes__


TWO_SOURCES = "'loss' comes from val_step and from evaluator 'loss'"
SCORE = {"val_step": lambda trainer, batch: {"score": 1.0}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluator": {"loss": accuracy}}, TWO_SOURCES),
        ({"evaluator": {"loss": CountRight()}}, TWO_SOURCES),
        ({"evaluator": accuracy, **SCORE}, r"evaluators need 'preds' and 'target' .* returned \['score'\]"),
    ],
    ids=["function", "object", "no predictions"],
)
def test_evaluators_that_do_not_fit_the_val_step(
    make_trainer: MakeTrainer, options: dict[str, Any], message: str
) -> None:
    """A name that both return would mix two things, and without predictions there is nothing to evaluate."""
    trainer = make_trainer(val_loader=batches(1), **options)

    with pytest.raises(ValueError, match=message):
        trainer.val()


def test_evaluation_reads_the_device_once(reads: Reads) -> None:
    """Tensors are added up where they are: they are read at the end of the pass, not per batch."""
    evaluation = Evaluation(None)
    for _ in range(5):
        evaluation.add({"loss": torch.tensor(1.0), "score": torch.tensor(2.0)}, samples=4)
    before = dict(reads)

    metrics = evaluation.compute()

    assert before == {}
    assert [name for _, name in reads.elements()] == ["tolist"]
    assert metrics == {"loss": 1.0, "score": 2.0}
