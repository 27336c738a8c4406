"""`predict` on several ranks: each has the outputs of all, in the order of the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

RANKS = """
import json, logging, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from eventloop import Trainer
from eventloop.evaluation.encoding import encode, outputs_of
from eventloop.events import BatchPredicted
from eventloop.writers.writer import Writer

warned = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warned.append(record.getMessage().rpartition(": divide")[0])
logging.getLogger("eventloop").addHandler(handler)
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
print(json.dumps([said, rows, [text for text in warned if text]]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_each_rank_has_the_whole(tmp_path: Path) -> None:
    """In the order of the data set and without padding; a stream has the batches of its own rank."""
    said: list[Any] = run_ranks(RANKS, tmp_path)
    (first, rows, warnings), (second, others, quiet) = said

    whole = [[float(index) for index in range(7)], [str(index) for index in range(7)]]
    assert first == second
    assert [each[:2] for each in first[:3]] == [whole] * 3
    assert [each[2] for each in first[:2]] == [[0, 0, 1, 1]] * 2
    assert first[3][0] == [0, 2, 4, 6, 1, 3, 5]  # without indices: rank after rank
    assert all(index == value for index, value in [*rows, *others])
    assert (len(rows), len(others)) == (4, 4)
    assert {index for index, _ in [*rows, *others]} == set(range(7))
    assert warnings == ["predict: all 2 ranks have read the same 7 indices, and one output for each was kept"]
    assert not quiet


SHARES = """
import json, logging, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Subset, TensorDataset
from eventloop import Trainer

logging.getLogger("eventloop").setLevel(logging.ERROR)
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)

class Lying:
    def __len__(self):
        return 4
    def __iter__(self):
        return iter(batches)

data = TensorDataset(torch.arange(7.0))
batches = [(part,) for part in torch.arange(7.0).split(2)] if rank else []
step = lambda trainer, batch: batch[0]
trainer = Trainer(torch.nn.Linear(1, 1), max_epochs=1, predict_step=step, work_dir="run")
seen, said = [], []
for loader in (
    DataLoader(Subset(data, range(7) if rank else []), batch_size=2),
    batches,
    iter(batches),
    Lying(),
    DataLoader(Subset(data, range(rank, 6, 2)), batch_size=2),
    DataLoader(TensorDataset(torch.arange(3.0 + rank)), batch_size=2),
):
    said.append(trainer.predict(loader).tolist())
said.append(trainer.predict(batches, to=lambda outputs: seen.extend(outputs.tolist())))
for to in (None, seen.append):
    try:
        trainer.predict([], to=to)
    except ValueError as error:
        said.append(str(error))

@trainer.bus.on("after_predict_iter")
def stop(trainer, event):
    trainer.stop("enough")

said.append(trainer.predict(Lying()))
print(json.dumps([said, seen]))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_without_a_batch_has_the_outputs_of_the_others(tmp_path: Path) -> None:
    """It gets them like any rank; only loaders that are empty on all ranks are an error, on each of them.

    The same if a loader has a length and gives no batch, and if a stop cuts the pass of the other rank short.
    Ranks with data sets of their own, by a Subset or another length, lose no output.
    """
    said: list[Any] = run_ranks(SHARES, tmp_path)
    (first, nothing), (second, rows) = said

    whole = [float(index) for index in range(7)]
    empty = "the predict loader is empty: a pass over it gave no batch"
    own = [[0, 2, 4, 1, 3, 5], [0, 1, 2, 0, 1, 2, 3]]
    assert first == second == [*[whole] * 4, *own, None, empty, empty, None]
    assert (nothing, rows) == ([], whole)
