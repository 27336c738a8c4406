"""Outputs of a model for a whole loader: their order, their forms, streams of them, and what is left unchanged."""

from __future__ import annotations

import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from eventloop import Trainer
from eventloop.data.loader_state import random_state
from eventloop.evaluation import prediction
from eventloop.evaluation.dataset_order import in_dataset_order
from eventloop.evaluation.encoding import encode, outputs_of
from eventloop.evaluation.outputs import OnHost, join, take
from eventloop.events import BatchPredicted, Event
from eventloop.hooks import EMAHook
from eventloop.writers.writer import Writer
from tests.ranks import run_ranks
from tests.support.interrupted import assert_same
from tests.support.trainers import (
    DEADLINE,
    MakeTrainer,
    batches,
    collect,
    record,
    samples,
    shuffled,
)

COUNT = 11


def loader_of(count: int = COUNT, **options: Any) -> DataLoader[Any]:
    """A loader of batches of 4 and a smaller last one."""
    return DataLoader(samples(count), batch_size=4, **options)


def expected_of(trainer: Trainer, count: int = COUNT) -> torch.Tensor:
    """What the model returns for all samples at once, in eval mode."""
    modes = [(module, module.training) for module in trainer.model.modules()]
    with torch.no_grad():
        outputs: torch.Tensor = trainer.model.eval()(samples(count).tensors[0])
    for module, training in modes:
        module.training = training
    return outputs


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
)  # fmt: skip
def test_outputs_of_batches_are_joined(parts: list[Any], joined: Any) -> None:
    """Tensors along dimension 0, mappings and tuples by field, lists one after the other; all else in a list."""
    result = join(parts)

    assert type(result) is type(joined)
    assert_same(result, joined)


def test_arrays_stay_arrays() -> None:
    """They are concatenated, and their rows taken, as those of tensors."""
    joined = join([np.array([[1], [2]]), np.array([[3]])])

    assert isinstance(joined, np.ndarray)
    assert take(joined, [2, 0], of=3).tolist() == [[3], [1]]


def test_rows_are_taken_of_fields_that_have_them() -> None:
    """Tensors and lists of the right length are sorted; other fields stay as they are."""
    outputs = {"x": ONE[0], "y": (["a", "b"], [True]), "z": [1, 2, 3]}

    taken = take(outputs, [1, 0], of=2)

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
        "before_run", names[0], *names[1:3], *names[1:3], *names[1:3], names[3], "after_run",
    ]  # fmt: skip
    assert seen == [("predict", "predict", 0, 4), ("predict", "predict", 1, 4), ("predict", "predict", 2, 3)]
    assert trainer.batch is None
    assert trainer.outputs is None


def test_modes_and_random_states_are_restored(make_trainer: MakeTrainer) -> None:
    """Each module has its mode again, frozen ones too, and all generators go on as before."""
    trainer = make_trainer()
    trainer.model.train()
    trainer.model[1].eval()  # type: ignore[index]
    loader = loader_of(shuffle=True, generator=torch.Generator().manual_seed(3))
    modes, state = [module.training for module in trainer.model.modules()], random_state(loader)

    trainer.predict(loader)

    assert [module.training for module in trainer.model.modules()] == modes
    assert_same(random_state(loader), state)


def test_modes_are_restored_after_an_error(make_trainer: MakeTrainer) -> None:
    """A step that fails ends the prediction with its closing event."""

    def fail(trainer: Trainer, batch: Any) -> Any:
        raise KeyError("no such column")

    trainer = make_trainer(predict_step=fail)
    seen = collect(trainer, "after_predict")

    with pytest.raises(KeyError, match="no such column"):
        trainer.predict(loader_of())

    assert trainer.model.training
    assert [event.reason for event in seen] == ["error"]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_training_does_not_notice_a_prediction(
    tmp_path: Path, make_trainer: MakeTrainer, workers: int
) -> None:
    """A handler may predict on the train loader itself in mid-epoch; the run ends with the same bits."""
    ended = []
    for predicts in (False, True):
        torch.manual_seed(5)
        loader = shuffled(4, num_workers=workers, persistent_workers=workers > 0)
        trainer = make_trainer(work_dir=tmp_path / str(predicts), train_loader=loader)

        def look(trainer: Trainer, event: Any, loader: Any = loader) -> None:
            assert trainer.predict(loader).shape == (16, 3)

        if predicts:
            trainer.bus.subscribe(look, "after_train_iter", every=3)
        trainer.train()
        ended.append((trainer.model.state_dict(), random_state(loader)))
        trainer.train_loader = trainer.loader = None

    assert_same(ended[0], ended[1])


class Counting(Sampler[int]):
    """Draw another order in each pass, and save which one is next."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.passes))
        self.passes += 1
        return iter(order.tolist())

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


def test_state_of_a_sampler_is_restored(make_trainer: MakeTrainer) -> None:
    """Its next pass is that which it would have had."""
    loader = DataLoader(samples(8), batch_size=4, sampler=Counting())

    make_trainer().predict(loader)

    assert loader.sampler.passes == 0  # type: ignore[attr-defined]


def test_train_loader_with_a_position_is_refused_within_an_epoch(make_trainer: MakeTrainer) -> None:
    """A second pass would move it; between epochs nothing is moved."""
    loader = DataLoader(samples(8), batch_size=4, sampler=Counting())
    trainer = make_trainer(train_loader=loader)
    rows: list[int] = []
    trainer.bus.subscribe(lambda trainer, event: rows.append(len(trainer.predict(loader))), "before_train")
    trainer.bus.subscribe(lambda trainer, event: trainer.predict(loader), "after_train_iter")

    with pytest.raises(
        TypeError, match=r"predict: loader must be another than the train loader .* got one with a Counting"
    ):
        trainer.train()

    assert rows == [8]


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


# --- streams -----------------------------------------------------------------------------------------------


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
        torch.tensor(1.5), torch.empty(0, 3), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).T, torch.tensor([1 + 2j]).conj(), torch.ones(2).to_sparse(),
    ],
    ids=["number", "empty", "bfloat16", "bool", "transposed", "conjugated", "sparse"],
)  # fmt: skip
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
    monkeypatch.setattr(prediction, "BACKLOG_BYTES", 3 * 4 * size)
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


# --- bad input ---------------------------------------------------------------------------------------------


class ScalarsOnly(Writer):
    """Receives other events."""

    def write(self, event: Event) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loader": 3}, TypeError, "loader must be an iterable of batches, got 3"),
        ({"loader": []}, ValueError, "loader is empty: it has 0 batches"),
        ({"loader": [(1, 2, 3)]}, TypeError, r"needs batches of inputs, or \(inputs, target\), got a tuple of 3 .* predict_step"),
        ({"to": 3}, TypeError, r"to must be a function \(outputs\), got 3"),
        ({"to": lambda: None}, TypeError, r"to is called with \(outputs\), but the signature is .*\(\)"),
        ({"to": ScalarsOnly()}, ValueError, "to: the writer ScalarsOnly must receive batch_predicted, got events="),
    ],
)  # fmt: skip
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


# --- two ranks ---------------------------------------------------------------------------------------------

RANKS = """
import json, logging, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from eventloop import Trainer
from eventloop.evaluation.encoding import encode, outputs_of
from eventloop.events import BatchPredicted
from eventloop.writers.writer import Writer

logging.getLogger("eventloop").setLevel(logging.ERROR)
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)

class Rows(Writer):
    events = (BatchPredicted,)
    def write(self, event):
        rows.extend(zip(event.indices, outputs_of(event)["x"].tolist()))

rows = []
data = TensorDataset(torch.arange(7.0))
step = lambda trainer, batch: {"x": batch[0], "name": [f"{int(each)}" for each in batch[0]], "rank": rank}
trainer = Trainer(torch.nn.Linear(1, 1), max_epochs=1, predict_step=step, work_dir="run")
said = []
for loader in (
    DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True, seed=3)),
    DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False)),
    DataLoader(data, batch_size=2),  # each rank reads everything
    list(torch.arange(7.0)[rank::2].split(2)) and [(part,) for part in torch.arange(7.0)[rank::2].split(2)],
):
    outputs = trainer.predict(loader)
    said.append([outputs["x"].tolist(), outputs["name"], outputs["rank"]])
trainer.predict(DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True)), to=Rows())
print(json.dumps([said, rows]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_rank_has_the_whole(tmp_path: Path) -> None:
    """In the order of the data set and without padding; a stream has the batches of its own rank."""
    said: list[Any] = run_ranks(RANKS, tmp_path)
    (first, rows), (second, others) = said

    whole = [[float(index) for index in range(7)], [str(index) for index in range(7)]]
    assert first == second
    assert [each[:2] for each in first[:3]] == [whole] * 3
    assert [each[2] for each in first[:2]] == [[0, 0, 1, 1]] * 2
    assert first[3][0] == [0, 2, 4, 6, 1, 3, 5]  # without indices: rank after rank
    assert all(index == value for index, value in [*rows, *others])
    assert (len(rows), len(others)) == (4, 4)
    assert {index for index, _ in [*rows, *others]} == set(range(7))


def test_loss_is_not_needed(make_trainer: MakeTrainer) -> None:
    """A trainer without a loss, an optimizer or a train loader predicts."""
    trainer = make_trainer(optimizer=None, loss_fn=None, train_loader=None, max_epochs=1)

    torch.testing.assert_close(trainer.predict(loader_of()), expected_of(trainer))
    assert F.cross_entropy(trainer.predict(loader_of()), samples(COUNT).tensors[1]) > 0
