"""The loaders of `docs/howto/loaders.md`, each with what a resumed run gets from it. `program` trains with them.

They are built by a fresh process for each part of a run, and import their packages then.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    default_collate,
    get_worker_info,
)

COUNT, BATCH = 38, 4
PER_EPOCH = -(-COUNT // BATCH)

READ_AGAIN, OWN_STATE, PERSISTENT, ANOTHER = "read again", "own state", "persistent workers", "another batch"
LINES = {
    READ_AGAIN: r"the first \d+ batches of the pass, which were trained on, are read again and dropped: ",
    OWN_STATE: r"goes on by its own state, which may lack .* a torch DataLoader restores them or reads them again",
    PERSISTENT: r"persistent workers start with other random numbers .* use persistent_workers=False",
    ANOTHER: r"batch \d+ of the pass, read again, differs from the batch that was trained on: .* (num_workers=1|a seed)",
}
"""The warnings of a resume, by the words for them in the table."""


class Row(NamedTuple):
    """A row of the table.

    Args:
        make: builds the loader from a folder for its files.
        exact: whether the resumed runs get the same batches and end with the same weights.
        says: the warning of every resume in mid-epoch that says most, one of `LINES`; None if there is none.
        package: what is imported, besides torch.
        also: another package that the loader needs.
    """

    make: Callable[[Path], Any]
    exact: bool = True
    says: str | None = None
    package: str = "torch"
    also: str = "torch"


def sample(index: int, noise: float = 0.0) -> tuple[int, torch.Tensor]:
    """Return a number and its features."""
    return index, torch.tensor([index / COUNT, 1 - index / COUNT]) + noise


class Samples(Dataset[Any]):
    """Samples by index, with or without random noise."""

    def __init__(self, count: int = COUNT, noise: bool = False) -> None:
        self._count, self._noise = count, noise

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return sample(index, float(torch.rand(())) if self._noise else 0.0)


class Stream(IterableDataset[Any]):
    """A stream of samples, of which each rank and worker reads a part, with or without random noise."""

    def __init__(self, noise: bool = False, rank: int = 0, ranks: int = 1) -> None:
        self._noise, self._rank, self._ranks = noise, rank, ranks

    def part(self) -> slice:
        """Return which of the samples are read here."""
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return slice(start * self._ranks + self._rank, None, step * self._ranks)

    def __iter__(self) -> Iterator[Any]:
        for index in range(COUNT)[self.part()]:
            yield sample(index, float(torch.rand(())) if self._noise else 0.0)


class Shuffling(Stream):
    """A stream that is shuffled in a buffer, by draws from torch's global generator during the pass."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for each in super().__iter__():
            buffer.append(each)
            if len(buffer) == 8:
                yield buffer.pop(int(torch.randint(8, ())))
        yield from buffer


class Placed(Stream):
    """A stream with another order in each epoch, which saves its position."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(False, rank, ranks)
        self._epoch = self._next = 0
        self._loaded: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self._epoch).sample(range(COUNT), COUNT)[self.part()]
        self._next, self._loaded = self._loaded or 0, None
        while self._next < len(order):
            self._next += 1
            yield sample(order[self._next - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state["next"]


class Sub(DataLoader[Any]):
    """A subclass of DataLoader, which may read in any way."""


# --- of torchdata ------------------------------------------------------------------------------------------


def stateful(dataset: Any, **options: Any) -> Any:
    """Return a StatefulDataLoader."""
    return import_module("torchdata.stateful_dataloader").StatefulDataLoader(dataset, BATCH, **options)


def stateful_distributed(kind: str) -> Any:
    """Return a loader with torchdata's sampler, in one or another class."""
    samplers: Any = import_module("torchdata.stateful_dataloader.sampler")
    sampler = samplers.StatefulDistributedSampler(range(COUNT), 1, 0)
    return (
        stateful(Samples(), sampler=sampler)
        if kind == "stateful"
        else DataLoader(Samples(), BATCH, sampler=sampler)
    )


def nodes(sampler: Any) -> Any:
    """Return a Loader of torchdata's nodes."""
    made: Any = import_module("torchdata.nodes")
    samples = made.Mapper(made.SamplerWrapper(sampler), sample)
    return made.Loader(made.Mapper(made.Batcher(samples, BATCH, drop_last=False), default_collate), False)


# --- of Hugging Face ---------------------------------------------------------------------------------------


def hugging_face(
    streaming: bool = False, shuffle: bool = False, buffer: int = 1, *, count: int = COUNT, shards: int = 4
) -> Any:
    """Return a data set of Hugging Face, of four shards."""
    datasets: Any = import_module("datasets")
    rows = [sample(index) for index in range(count)]
    table = datasets.Dataset.from_dict({"index": [i for i, _ in rows], "x": [x.tolist() for _, x in rows]})
    if not streaming:
        return table.with_format("torch")
    stream = table.to_iterable_dataset(num_shards=shards)
    if shuffle:
        stream = stream.shuffle(seed=3, buffer_size=buffer)
    return stream.with_format("torch")


# --- of webdataset -----------------------------------------------------------------------------------------


def web(folder: Path, *, shuffle: int = 0, seed: int | None = None, det: bool = False, **options: Any) -> Any:
    """Return a WebDataset of four shards, whose files are written once."""
    webdataset: Any = import_module("webdataset")
    for shard in range(4):
        if not (folder / f"{shard}.tar").exists():
            with webdataset.TarWriter(str(folder / f"{shard}.tar")) as tar:
                for index in range(shard, COUNT, 4):
                    tar.write({"__key__": f"{index:03}", "index.json": json.dumps(index).encode()})
    urls = [str(folder / f"{shard}.tar") for shard in range(4)]
    data = webdataset.WebDataset(
        urls, shardshuffle=4 if shuffle else False, detshuffle=det, seed=3, **options
    )
    if det:
        data = data.compose(webdataset.detshuffle(shuffle, seed=3))
    elif shuffle:
        data = data.shuffle(shuffle, initial=shuffle, **({} if seed is None else {"seed": seed}))
    return data.map(of_web)


def of_web(read: dict[str, Any]) -> Any:
    """Return the sample that a shard has."""
    return sample(json.loads(read["index.json"]))


def web_loader(folder: Path) -> Any:
    """Return webdataset's own loader, which is shuffled between its workers."""
    return import_module("webdataset").WebLoader(
        web(folder, shuffle=8, seed=3), batch_size=BATCH, num_workers=2
    )


# --- of Accelerate and Lightning ---------------------------------------------------------------------------


def prepared(loader: Any, **configuration: Any) -> Any:
    """Return a loader that Accelerate has prepared."""
    accelerate: Any = import_module("accelerate")
    settings = accelerate.DataLoaderConfiguration(**configuration)
    return accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader)


def combined(mode: str, **options: Any) -> Any:
    """Return Lightning's combination of a long loader and a short one."""
    long, short = DataLoader(Samples(), BATCH, **options), DataLoader(Samples(14), BATCH, **options)
    return import_module("lightning.pytorch.utilities").CombinedLoader({"long": long, "short": short}, mode)


def combined_ranks() -> Any:
    """Return Lightning's combination of loaders with distributed samplers."""
    loaders = [DataLoader(Samples(), 2, sampler=DistributedSampler(Samples(), 2, rank)) for rank in (0, 1)]
    return import_module("lightning.pytorch.utilities").CombinedLoader(loaders, "min_size")


def seeded() -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(3)


ROWS: dict[str, Row] = {
    "DataLoader": Row(lambda _: DataLoader(Samples(noise=True), BATCH)),
    "DataLoader, shuffled": Row(lambda _: DataLoader(Samples(noise=True), BATCH, shuffle=True)),
    "DataLoader, shuffled by its generator": Row(
        lambda _: DataLoader(Samples(), BATCH, shuffle=True, generator=seeded())
    ),
    "DataLoader, workers": Row(lambda _: DataLoader(Samples(noise=True), BATCH, shuffle=True, num_workers=2)),
    "DataLoader, persistent workers": Row(
        lambda _: DataLoader(Samples(noise=True), BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    ),
    "DataLoader, DistributedSampler": Row(
        lambda _: DataLoader(Samples(), 2, sampler=DistributedSampler(Samples(), 2, 0))
    ),
    "DataLoader, BatchSampler": Row(
        lambda _: DataLoader(Samples(), batch_sampler=BatchSampler(RandomSampler(range(COUNT)), BATCH, False))
    ),
    "DataLoader, stream": Row(lambda _: DataLoader(Stream(True), BATCH), says=READ_AGAIN),
    "DataLoader, stream, workers": Row(
        lambda _: DataLoader(Stream(True), BATCH, num_workers=2), says=READ_AGAIN
    ),
    "DataLoader, stream, persistent workers": Row(
        lambda _: DataLoader(Stream(True), BATCH, num_workers=2, persistent_workers=True),
        exact=False,
        says=PERSISTENT,
    ),
    "DataLoader, stream with a state": Row(lambda _: DataLoader(Placed(), BATCH), says=READ_AGAIN),
    "DataLoader, stream that shuffles by the global generator": Row(
        lambda _: DataLoader(Shuffling(), BATCH),
        exact=False,
        says=ANOTHER,
    ),
    "a subclass of DataLoader": Row(lambda _: Sub(Samples(), BATCH, shuffle=True), says=READ_AGAIN),
    "StatefulDataLoader": Row(lambda _: stateful(Samples(noise=True), shuffle=True), package="torchdata"),
    "StatefulDataLoader, workers": Row(
        lambda _: stateful(Samples(noise=True), shuffle=True, num_workers=2), package="torchdata"
    ),
    "StatefulDataLoader, workers, snapshot_every_n_steps=4": Row(
        lambda _: stateful(Samples(noise=True), shuffle=True, num_workers=2, snapshot_every_n_steps=4),
        package="torchdata",
    ),
    "StatefulDataLoader, sampler": Row(
        lambda _: stateful(Samples(), sampler=RandomSampler(range(COUNT), generator=seeded())),
        package="torchdata",
    ),
    "StatefulDataLoader, StatefulDistributedSampler": Row(
        lambda _: stateful_distributed("stateful"), package="torchdata"
    ),
    "DataLoader, StatefulDistributedSampler": Row(
        lambda _: stateful_distributed("plain"), package="torchdata"
    ),
    "StatefulDataLoader, stream": Row(
        lambda _: stateful(Stream(True), num_workers=2), says=READ_AGAIN, package="torchdata"
    ),
    "StatefulDataLoader, stream with a state": Row(
        lambda _: stateful(Placed()), says=OWN_STATE, package="torchdata"
    ),
    "StatefulDataLoader, stream with a state, workers": Row(
        lambda _: stateful(Placed(), num_workers=2), says=OWN_STATE, package="torchdata"
    ),
    "torchdata.nodes.Loader, restart_on_stop_iteration=False": Row(
        lambda _: nodes(DistributedSampler(Samples(), 1, 0)), says=OWN_STATE, package="torchdata"
    ),
    "torchdata.nodes.Loader, shuffled by a generator": Row(
        lambda _: nodes(RandomSampler(range(COUNT), generator=seeded())),
        exact=False,
        says=OWN_STATE,
        package="torchdata",
    ),
    "datasets, map": Row(
        lambda _: DataLoader(hugging_face(), BATCH, shuffle=True, num_workers=2), package="datasets"
    ),
    "datasets, streaming": Row(
        lambda _: DataLoader(hugging_face(True, True, 8), BATCH), says=READ_AGAIN, package="datasets"
    ),
    "datasets, streaming, workers": Row(
        lambda _: DataLoader(hugging_face(True, True, 8), BATCH, num_workers=2),
        says=READ_AGAIN,
        package="datasets",
    ),
    "datasets, streaming, StatefulDataLoader": Row(
        lambda _: stateful(hugging_face(True)), says=OWN_STATE, package="datasets"
    ),
    "datasets, streaming, StatefulDataLoader, shuffle buffer": Row(
        lambda _: stateful(hugging_face(True, True, 8)),
        exact=False,
        says=OWN_STATE,
        package="datasets",
    ),
    "webdataset": Row(lambda folder: DataLoader(web(folder), BATCH), says=READ_AGAIN, package="webdataset"),
    "webdataset, workers": Row(
        lambda folder: DataLoader(web(folder), BATCH, num_workers=2), says=READ_AGAIN, package="webdataset"
    ),
    "webdataset, shuffled by a seed": Row(
        lambda folder: DataLoader(web(folder, shuffle=8, seed=3), BATCH),
        says=READ_AGAIN,
        package="webdataset",
    ),
    "webdataset, WebLoader": Row(web_loader, says=READ_AGAIN, package="webdataset"),
    "webdataset, detshuffle, workers": Row(
        lambda folder: DataLoader(web(folder, shuffle=8, det=True), BATCH, num_workers=2),
        says=READ_AGAIN,
        package="webdataset",
    ),
    "webdataset, detshuffle": Row(
        lambda folder: DataLoader(web(folder, shuffle=8, det=True), BATCH),
        exact=False,
        says=ANOTHER,
        package="webdataset",
    ),
    "webdataset, shuffled without a seed": Row(
        lambda folder: DataLoader(web(folder, shuffle=8), BATCH),
        exact=False,
        says=ANOTHER,
        package="webdataset",
    ),
    "Accelerate": Row(
        lambda _: prepared(DataLoader(Samples(), BATCH, shuffle=True)), says=READ_AGAIN, package="accelerate"
    ),
    "Accelerate, workers": Row(
        lambda _: prepared(DataLoader(Samples(noise=True), BATCH, shuffle=True, num_workers=2)),
        says=READ_AGAIN,
        package="accelerate",
    ),
    "Accelerate, use_seedable_sampler, data_seed": Row(
        lambda _: prepared(
            DataLoader(Samples(), BATCH, shuffle=True), use_seedable_sampler=True, data_seed=3
        ),
        says=READ_AGAIN,
        package="accelerate",
    ),
    "Accelerate, use_seedable_sampler, another seed in each process": Row(
        lambda _: prepared(DataLoader(Samples(), BATCH, shuffle=True), use_seedable_sampler=True),
        exact=False,
        says=ANOTHER,
        package="accelerate",
    ),
    "Accelerate, random numbers without workers": Row(
        lambda _: prepared(DataLoader(Samples(noise=True), BATCH, shuffle=True)),
        says=READ_AGAIN,
        package="accelerate",
    ),
    "Accelerate, stream": Row(
        lambda _: prepared(DataLoader(Stream(), BATCH)), says=READ_AGAIN, package="accelerate"
    ),
    "Accelerate, use_stateful_dataloader": Row(
        lambda _: prepared(DataLoader(Samples(), BATCH, shuffle=True), use_stateful_dataloader=True),
        says=READ_AGAIN,
        package="accelerate",
        also="torchdata",
    ),
    "Accelerate, use_stateful_dataloader, stream with a state": Row(
        lambda _: prepared(DataLoader(Placed(), BATCH), use_stateful_dataloader=True),
        says=READ_AGAIN,
        package="accelerate",
        also="torchdata",
    ),
    "Accelerate, use_stateful_dataloader, dispatch_batches=False, stream with a state": Row(
        lambda _: prepared(DataLoader(Placed(), BATCH), use_stateful_dataloader=True, dispatch_batches=False),
        says=OWN_STATE,
        package="accelerate",
        also="torchdata",
    ),
    "CombinedLoader": Row(
        lambda _: combined("max_size", shuffle=True, num_workers=1), says=READ_AGAIN, package="lightning"
    ),
    "CombinedLoader, generators": Row(
        lambda _: combined("max_size_cycle", shuffle=True, generator=seeded()),
        says=READ_AGAIN,
        package="lightning",
    ),
    "CombinedLoader, distributed samplers": Row(
        lambda _: combined_ranks(), says=READ_AGAIN, package="lightning"
    ),
    "CombinedLoader, cycled by the global generator": Row(
        lambda _: combined("max_size_cycle", shuffle=True),
        exact=False,
        says=ANOTHER,
        package="lightning",
    ),
}
"""The rows of the table, in its order."""
