"""What can be known of a loader before it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset

from eventloop.data.rng import samplers_state


def why_not_by_index(loader: Iterable[Any]) -> str | None:
    """Why a loader cannot be rebuilt, None where it can."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"a {kind} is no torch.utils.data.DataLoader, and has no state_dict and load_state_dict"
    if type(loader) is not DataLoader:
        return f"{kind} is a subclass of DataLoader, which may read in any way, and saves no place of its own"
    if isinstance(loader.dataset, IterableDataset):
        return "the loader's dataset is an IterableDataset, whose samples have no indices"
    if isinstance(loader.dataset, getattr(data, "MapDataPipe", ())):
        return "the loader's dataset is a MapDataPipe"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None, and no lists of indices"
    return None


def persists(loader: Any) -> bool:
    """Whether its workers are there for more than one pass."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def is_stream(loader: Any) -> bool:
    """Whether the states that workers tell with their batches are all there is to know of them."""
    plain_loader = type(loader) is DataLoader and loader.in_order and not loader.drop_last
    datapipe = getattr(data, "IterDataPipe", ())  # its workers are seeded anew with each pass
    return (
        plain_loader
        and isinstance(loader.dataset, IterableDataset)
        and not isinstance(loader.dataset, datapipe)
    )


def has_states(loader: Any) -> bool:
    """Whether one of its samplers saves its own state."""
    return bool(samplers_state(loader)["states"])


def lists_of(loader: DataLoader[Any]) -> Iterable[list[Any]]:
    """The lists of indices of a pass."""
    assert loader.batch_sampler is not None  # or it would be read by a PlainReader
    return loader.batch_sampler


def to_device(batch: Any, device: torch.device | None) -> Any:
    """Move the tensors of a nested batch; None leaves it as it is. Does not wait when the batch is pinned."""
    if device is None:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(item, device) for item in batch)
    return batch
