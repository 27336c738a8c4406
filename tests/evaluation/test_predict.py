"""Outputs of a model for a whole loader: their order, their forms, its events, and bad arguments."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from eventloop import Trainer
from eventloop.evaluation.dataset_order import in_dataset_order
from eventloop.evaluation.outputs import OnHost, join, select
from eventloop.events import Event
from eventloop.hooks import EMAHook
from eventloop.writers import Writer
from tests.support.interrupted import assert_same
from tests.support.predicting import COUNT, expected_of, loader_of
from tests.support.trainers import (
    MakeTrainer,
    batches,
    collect,
    record,
    samples,
)

# --- the result --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True}, {"shuffle": True, "num_workers": 2}, {"batch_sampler": [[3, 0], [2, 1], [3]]}],
    ids=["in order", "shuffled", "workers", "own batches"],
)
def test_outputs_have_the_order_of_the_data_set(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    """Whatever order a sampler draws, there is one row for each index that it drew, in ascending order."""
    trainer = make_trainer()
    count = 4 if "batch_sampler" in options else COUNT
    loader = DataLoader(
        samples(count), **(options if "batch_sampler" in options else {"batch_size": 4, **options})
    )

    outputs = trainer.predict(loader)

    assert isinstance(outputs, torch.Tensor)
    torch.testing.assert_close(outputs, expected_of(trainer, count))
    assert not outputs.requires_grad


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(samples(COUNT).tensors[0]), batch_size=4),  # lists of one tensor
        list(samples(COUNT).tensors[0].split(4)),
        [(inputs, None) for inputs in samples(COUNT).tensors[0].split(4)],
    ],
    ids=["a data set of one tensor", "tensors", "pairs"],
)
def test_forms_of_batches(make_trainer: MakeTrainer, loader: Any) -> None:
    """The model gets the inputs, without the target where there is one."""
    trainer = make_trainer()

    torch.testing.assert_close(trainer.predict(loader), expected_of(trainer))


def test_a_subset_may_choose_by_any_key(make_trainer: MakeTrainer) -> None:
    """The indices of a Subset may be keys of its data set, of several lengths."""
    rows = dict(zip([(0,), (0, 1), (2,)], samples(3).tensors[0], strict=True))
    trainer = make_trainer()

    outputs = trainer.predict(DataLoader(Subset(cast(Any, rows), cast(Any, [*rows])), batch_size=2))

    torch.testing.assert_close(outputs, expected_of(trainer, 3))


def test_mapping_goes_to_the_model_as_it_is(make_trainer: MakeTrainer) -> None:
    """A model that takes a mapping gets the batch."""

    class OfMapping(nn.Linear):
        def forward(self, batch: Any) -> Any:
            return {"twice": batch["x"] * 2}

    loader = [{"x": torch.ones(2)}, {"x": torch.ones(1)}]
    trainer = make_trainer(model=OfMapping(1, 1), optimizer=None)

    assert_same(trainer.predict(loader), {"twice": torch.full((3,), 2.0)})


def test_predict_step_decides_what_is_returned(make_trainer: MakeTrainer) -> None:
    """It is called with the trainer and the batch, and its fields are joined each by itself and put in order."""

    def predict_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        inputs, target = batch
        names = [f"class {int(each)}" for each in target]
        return {"scores": trainer.model(inputs), "target": target, "names": names, "batch": len(target)}

    trainer = make_trainer(predict_step=predict_step)

    outputs = trainer.predict(loader_of(shuffle=True))

    target = samples(COUNT).tensors[1]
    torch.testing.assert_close(outputs["scores"], expected_of(trainer))
    assert torch.equal(outputs["target"], target)
    assert outputs["names"] == [f"class {int(each)}" for each in target]
    assert outputs["batch"] == [4, 4, 3]  # not one for each sample


def test_predict_step_of_a_subclass(tmp_path: Path) -> None:
    """A subclass overrides the method, as Lightning's modules do."""

    class Own(Trainer):
        def predict_step(self, batch: Any) -> Any:
            return batch[1]

    trainer = Own(nn.Linear(2, 3), max_epochs=1, work_dir=tmp_path)

    assert torch.equal(trainer.predict(loader_of(shuffle=True)), samples(COUNT).tensors[1])
    trainer.close()


Pair = namedtuple("Pair", ["a", "b"])
ONE, TWO = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        ([ONE, TWO], torch.cat([ONE, TWO])),
        ([torch.tensor(1.0), torch.tensor(2.0)], torch.tensor([1.0, 2.0])),
        ([{"x": ONE, "y": [1]}, {"x": TWO, "y": [2, 3]}], {"x": torch.cat([ONE, TWO]), "y": [1, 2, 3]}),
        ([(ONE, "a"), (TWO, "b")], (torch.cat([ONE, TWO]), ["a", "b"])),
        ([Pair(ONE, 1), Pair(TWO, 2)], Pair(torch.cat([ONE, TWO]), [1, 2])),
        ([ONE, torch.ones(2, 3)], [ONE[0], torch.ones(3), torch.ones(3)]),
        ([{"x": 1}, {"y": 2}], [{"x": 1}, {"y": 2}]),
        ([None, None], [None, None]),
        (["text", 3], ["text", 3]),
    ],
    ids=["tensors", "scalars", "mappings", "tuples", "named tuples", "ragged", "fields", "None", "others"],
)
def test_outputs_of_batches_are_joined(parts: list[Any], joined: Any) -> None:
    """Tensors along dimension 0, mappings and tuples by field, lists one after the other; all else in a list."""
    result = join(parts)

    assert type(result) is type(joined)
    assert_same(result, joined)


def test_arrays_stay_arrays() -> None:
    """They are concatenated, and their rows taken, as those of tensors."""
    joined = join([np.array([[1], [2]]), np.array([[3]])])

    assert isinstance(joined, np.ndarray)
    assert select(joined, [2, 0], of=3).tolist() == [[3], [1]]


def test_rows_are_taken_of_fields_that_have_them() -> None:
    """Tensors and lists of the right length are sorted; other fields stay as they are."""
    outputs = {"x": ONE[0], "y": (["a", "b"], [True]), "z": [1, 2, 3]}

    taken = select(outputs, [1, 0], of=2)

    assert_same(taken, {"x": torch.tensor([2.0, 1.0]), "y": (["b", "a"], [True]), "z": [1, 2, 3]})


def test_padding_is_removed() -> None:
    """An index that was drawn twice gives one row."""
    assert in_dataset_order([torch.tensor([20, 0]), torch.tensor([10, 0])], [2, 0, 1, 0]).tolist() == [
        0,
        10,
        20,
    ]


def test_samples_that_are_drawn_with_replacement_come_once(make_trainer: MakeTrainer) -> None:
    """A sampler that repeats some and leaves out others gives a row for each index that it drew."""
    trainer = make_trainer(predict_step=lambda trainer, batch: batch[0][:, 0])
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0, 1.0], 40, generator=torch.Generator().manual_seed(0))

    outputs = trainer.predict(DataLoader(samples(4), batch_size=4, sampler=sampler))

    assert torch.equal(outputs, samples(4).tensors[0][[1, 3], 0])


def test_a_buffer_that_the_model_reuses_is_copied() -> None:
    """Outputs of a batch stay what they were, and a small view does not keep a large tensor in memory."""
    buffer = torch.zeros(1000)
    first = OnHost({"x": buffer[:2]})
    buffer.fill_(1.0)

    kept = first.wait()["x"]

    assert kept.tolist() == [0.0, 0.0]
    assert kept.untyped_storage().nbytes() == 8


# --- the state around it -----------------------------------------------------------------------------------


def test_events_of_a_prediction(make_trainer: MakeTrainer) -> None:
    """Handlers find the batch and the outputs, in the mode "predict"."""
    trainer = make_trainer()
    names = ("before_predict", "before_predict_iter", "after_predict_iter", "after_predict")
    rows = record(trainer, "before_run", *names, "after_run")
    seen: list[Any] = []
    trainer.bus.subscribe(
        lambda trainer, event: seen.append(
            (trainer.mode, event.mode, event.batch_idx, trainer.outputs.shape[0])
        ),
        "after_predict_iter",
    )

    trainer.predict(loader_of())

    assert [name for name, _, _ in rows] == [
        "before_run",
        names[0],
        *names[1:3],
        *names[1:3],
        *names[1:3],
        names[3],
        "after_run",
    ]
    assert seen == [("predict", "predict", 0, 4), ("predict", "predict", 1, 4), ("predict", "predict", 2, 3)]
    assert trainer.batch is None
    assert trainer.outputs is None


def test_the_average_predicts(make_trainer: MakeTrainer) -> None:
    """With an EMAHook the weights are those of a validation, and the training's are back afterwards."""
    trainer = make_trainer(val_loader=batches(1), hooks=[EMAHook(momentum=0.1)])
    trainer.train()
    own = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with_average: list[torch.Tensor] = []
    trainer.bus.subscribe(
        lambda trainer, event: with_average.append(expected_of(trainer)), "after_val_iter", name="look"
    )
    trainer.val()

    outputs = trainer.predict(loader_of())

    torch.testing.assert_close(outputs, with_average[0])
    assert not torch.allclose(outputs, expected_of(trainer))
    assert_same(dict(trainer.model.state_dict()), own)


def test_autocast_is_that_of_the_training(make_trainer: MakeTrainer) -> None:
    """A model that trains in bfloat16 predicts in it."""
    trainer = make_trainer(hooks=[{"type": "AmpOptimizerHook", "dtype": "bfloat16"}], max_epochs=1)
    trainer.train()

    assert trainer.predict(loader_of()).dtype == torch.bfloat16


def test_a_stop_cuts_it_short(make_trainer: MakeTrainer) -> None:
    """There is no result of half a loader: the closing event has the reason."""
    trainer = make_trainer()
    seen = collect(trainer, "after_predict_iter", "after_predict")
    trainer.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_predict_iter", once=True)

    assert trainer.predict(loader_of()) is None
    assert len(seen) == 2
    assert seen[-1].reason == "enough"


def test_loss_is_not_needed(make_trainer: MakeTrainer) -> None:
    """A trainer without a loss, an optimizer or a train loader predicts."""
    trainer = make_trainer(optimizer=None, loss_fn=None, train_loader=None, max_epochs=1)

    torch.testing.assert_close(trainer.predict(loader_of()), expected_of(trainer))
    assert F.cross_entropy(trainer.predict(loader_of()), samples(COUNT).tensors[1]) > 0


# --- bad input ---------------------------------------------------------------------------------------------


class ScalarsOnly(Writer):
    """Receives other events."""

    def write(self, event: Event) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loader": 3}, TypeError, "loader must be an iterable of batches, got 3"),
        ({"loader": []}, ValueError, "loader is empty: it has 0 batches"),
        (
            {"loader": [(1, 2, 3)]},
            TypeError,
            r"needs batches of inputs, or \(inputs, target\), got a tuple of 3 .* predict_step",
        ),
        ({"to": 3}, TypeError, r"to must be a function \(outputs\), got 3"),
        ({"to": lambda: None}, TypeError, r"to is called with \(outputs\), but the signature is .*\(\)"),
        (
            {"to": ScalarsOnly()},
            ValueError,
            "to: the writer ScalarsOnly must receive batch_predicted, got events=",
        ),
    ],
)
def test_bad_arguments_are_refused(
    make_trainer: MakeTrainer, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The error says what was expected, and what came."""
    trainer = make_trainer()

    with pytest.raises(error, match=message):
        trainer.predict(**{"loader": loader_of(), **options})


def test_a_wrong_predict_step_is_refused(make_trainer: MakeTrainer) -> None:
    """Its signature is checked by the constructor."""
    with pytest.raises(
        TypeError, match=r"predict_step is called with \(trainer, batch\), but the signature is"
    ):
        make_trainer(predict_step=lambda batch: batch)


def test_an_empty_pass_is_refused(make_trainer: MakeTrainer) -> None:
    """A loader without a length may turn out to be empty."""

    class Nothing:
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ValueError, match="the predict loader is empty: a pass over it gave no batch"):
        make_trainer().predict(Nothing())
