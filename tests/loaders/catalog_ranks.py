"""The loaders of two ranks in `docs/howto/loaders.md`, each with what a resumed run gets from it.

Each rank gets ten batches of two samples in an epoch, of its own part of the data.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from tests.loaders.catalog import (
    ANOTHER,
    OWN_STATE,
    READ_AGAIN,
    Placed,
    Row,
    Samples,
    Stream,
    hugging_face,
    prepared,
    web,
)

RANKS, BATCH = 2, 2


def split(**options: Any) -> Any:
    """Return one rank's part of a data set of Hugging Face."""
    data = hugging_face(**options)
    return import_module("datasets.distributed").split_dataset_by_node(data, dist.get_rank(), RANKS)


def plain(dataset: Any, **options: Any) -> Any:
    """Return a DataLoader of a rank's batches."""
    return DataLoader(dataset, BATCH, **options)


def stateful(dataset: Any, **options: Any) -> Any:
    """Return a StatefulDataLoader of a rank's batches."""
    return import_module("torchdata.stateful_dataloader").StatefulDataLoader(dataset, BATCH, **options)


def web_of_rank(folder: Path, **options: Any) -> Any:
    """Return a WebDataset of which each rank reads two of four shards, whose files rank 0 writes."""
    splitter = import_module("webdataset").split_by_node
    if dist.get_rank() == 0:
        web(folder, nodesplitter=splitter)
    dist.barrier()
    return web(folder, nodesplitter=splitter, **options)


def sampled(make: Any, sampler: Any = DistributedSampler, **options: Any) -> Any:
    """Return a loader whose sampler is of this rank; it is shuffled by the epoch."""
    data = Samples(noise=True)
    return make(data, sampler=sampler(data, RANKS, dist.get_rank()), **options)


def torchdatas() -> Any:
    """Return torchdata's distributed sampler."""
    return import_module("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler


def combined() -> Any:
    """Return Lightning's combination of two loaders of this rank."""
    loaders = [sampled(plain), sampled(plain)]
    return import_module("lightning.pytorch.utilities").CombinedLoader(loaders, "min_size")


def of_rank() -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    return dist.get_rank(), RANKS


RANK_ROWS: dict[str, Row] = {
    "DataLoader, DistributedSampler": Row(lambda _: sampled(plain)),
    "DataLoader, DistributedSampler, workers": Row(lambda _: sampled(plain, num_workers=2)),
    "DataLoader, DistributedSampler, persistent workers": Row(
        lambda _: sampled(plain, num_workers=2, persistent_workers=True)
    ),
    "DataLoader, BatchSampler of a DistributedSampler": Row(
        lambda _: DataLoader(
            Samples(),
            batch_sampler=BatchSampler(DistributedSampler(Samples(), RANKS, dist.get_rank()), BATCH, False),
        )
    ),
    "DataLoader, stream": Row(lambda _: plain(Stream(True, *of_rank())), says=READ_AGAIN),
    "DataLoader, stream, workers": Row(
        lambda _: plain(Stream(True, *of_rank()), num_workers=2), says=READ_AGAIN
    ),
    "StatefulDataLoader, DistributedSampler": Row(lambda _: sampled(stateful), package="torchdata"),
    "StatefulDataLoader, DistributedSampler, workers": Row(
        lambda _: sampled(stateful, num_workers=2), package="torchdata"
    ),
    "StatefulDataLoader, StatefulDistributedSampler": Row(
        lambda _: sampled(stateful, torchdatas()), package="torchdata"
    ),
    "StatefulDataLoader, stream with a state": Row(
        lambda _: stateful(Placed(*of_rank())), says=OWN_STATE, package="torchdata"
    ),
    "StatefulDataLoader, stream with a state, workers": Row(
        lambda _: stateful(Placed(*of_rank()), num_workers=2), says=OWN_STATE, package="torchdata"
    ),
    "datasets, split_dataset_by_node": Row(
        lambda _: plain(split(), shuffle=True, num_workers=2), package="datasets"
    ),
    "datasets, streaming, split_dataset_by_node": Row(
        lambda _: plain(split(streaming=True, shuffle=True, buffer=8, count=40)),
        says=READ_AGAIN,
        package="datasets",
    ),
    "datasets, streaming, split_dataset_by_node, workers": Row(
        lambda _: plain(split(streaming=True, shuffle=True, buffer=8, count=40), num_workers=2),
        says=READ_AGAIN,
        package="datasets",
    ),
    "datasets, streaming of one shard, split_dataset_by_node": Row(
        lambda _: plain(split(streaming=True, shuffle=True, buffer=8, shards=1)),
        says=READ_AGAIN,
        package="datasets",
    ),
    "datasets, streaming, split_dataset_by_node, StatefulDataLoader": Row(
        lambda _: stateful(split(streaming=True, shuffle=True, count=40)), says=OWN_STATE, package="datasets"
    ),
    "webdataset, split_by_node": Row(
        lambda folder: plain(web_of_rank(folder)), says=READ_AGAIN, package="webdataset"
    ),
    "webdataset, split_by_node, shuffled by a seed, workers": Row(
        lambda folder: plain(web_of_rank(folder, shuffle=8, seed=3), num_workers=2),
        says=READ_AGAIN,
        package="webdataset",
    ),
    "webdataset, split_by_node, shuffled without a seed": Row(
        lambda folder: plain(web_of_rank(folder, shuffle=8)), exact=False, says=ANOTHER, package="webdataset"
    ),
    "webdataset, resampled": Row(
        lambda folder: plain(web_of_rank(folder, shuffle=8, resampled=True).with_epoch(20)),
        exact=False,
        says=ANOTHER,
        package="webdataset",
    ),
    "Accelerate": Row(
        lambda _: prepared(plain(Samples(), shuffle=True)), says=READ_AGAIN, package="accelerate"
    ),
    "Accelerate, workers": Row(
        lambda _: prepared(plain(Samples(noise=True), shuffle=True, num_workers=2)),
        says=READ_AGAIN,
        package="accelerate",
    ),
    "Accelerate, use_seedable_sampler, data_seed": Row(
        lambda _: prepared(plain(Samples(), shuffle=True), use_seedable_sampler=True, data_seed=3),
        says=READ_AGAIN,
        package="accelerate",
    ),
    "Accelerate, dispatch_batches": Row(
        lambda _: prepared(plain(Samples(), shuffle=True), dispatch_batches=True),
        says=READ_AGAIN,
        package="accelerate",
    ),
    "Accelerate, stream": Row(lambda _: prepared(plain(Stream(True))), says=READ_AGAIN, package="accelerate"),
    "Accelerate, use_stateful_dataloader, stream with a state": Row(
        lambda _: prepared(plain(Placed()), use_stateful_dataloader=True),
        says=READ_AGAIN,
        package="accelerate",
        also="torchdata",
    ),
    "Accelerate, stream, dispatch_batches=False": Row(
        lambda _: prepared(plain(Stream()), dispatch_batches=False), says=READ_AGAIN, package="accelerate"
    ),
    "Accelerate, datasets, streaming, dispatch_batches=False": Row(
        lambda _: prepared(plain(hugging_face(True, True, 8, count=40)), dispatch_batches=False),
        says=READ_AGAIN,
        package="accelerate",
        also="datasets",
    ),
    "Accelerate, use_stateful_dataloader": Row(
        lambda _: prepared(plain(Samples(), shuffle=True), use_stateful_dataloader=True),
        says=READ_AGAIN,
        package="accelerate",
        also="torchdata",
    ),
    "Accelerate, use_stateful_dataloader, dispatch_batches=False, stream with a state": Row(
        lambda _: prepared(plain(Placed()), use_stateful_dataloader=True, dispatch_batches=False),
        says=READ_AGAIN,
        package="accelerate",
        also="torchdata",
    ),
    "CombinedLoader": Row(lambda _: combined(), says=READ_AGAIN, package="lightning"),
}
"""The rows of the table of two ranks, in its order."""
