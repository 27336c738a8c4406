"""Inspect a loader without reading it, and move its batches to a device.

`readers` uses the inspection to choose a reader for a loader; the loops use `to_device`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset


def why_not_by_index(loader: Iterable[Any]) -> str | None:
    """Return the reason why a pass over a loader cannot be resumed by indices; None if it can."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"a {kind} is not a torch.utils.data.DataLoader, and has no state_dict and load_state_dict"
    if type(loader) is not DataLoader:
        return (
            f"{kind} is a subclass of DataLoader, which may read in any way, and saves no position of its own"
        )
    if isinstance(loader.dataset, IterableDataset):
        return "the loader's dataset is an IterableDataset, whose samples have no indices"
    if isinstance(loader.dataset, getattr(data, "MapDataPipe", ())):
        return "the loader's dataset is a MapDataPipe"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None, and no lists of indices"
    return None


def persists(loader: Any) -> bool:
    """Return whether a loader's workers stay alive for more than one pass."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def to_device(batch: Any, device: torch.device | None) -> Any:
    """Move the tensors of a nested batch to a device, asynchronously if pinned; None moves nothing."""
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
