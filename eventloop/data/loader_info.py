"""Inspect a loader without reading it, name several loaders, and move batches to a device.

`readers` uses the inspection to choose a reader for a loader; the loops use the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset

from eventloop.util.checks import length_of

Loaders = Iterable[Any] | Mapping[str, Iterable[Any]]
"""A loader of batches, or several loaders by name."""


def named_loaders(loaders: Loaders | None) -> dict[str, Iterable[Any]]:
    """Return loaders by name, in their order. A loader that is not in a mapping has the name ""."""
    if loaders is None:
        return {}
    return dict(loaders) if isinstance(loaders, Mapping) else {"": loaders}


def check_loader(argument: str, loader: object) -> None:
    """Refuse a loader that is not an iterable of batches, or has none.

    Raises:
        TypeError, ValueError: see above; the message begins with the argument.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{argument} must be an iterable of batches, got {loader!r}")
    if length_of(loader) == 0:  # type: ignore[arg-type]
        raise ValueError(
            f"{argument} is empty: it has 0 batches (is drop_last=True with a batch larger than the data?)"
        )


def check_named_loaders(argument: str, loaders: Loaders) -> None:
    """Refuse an argument that is neither a loader nor a mapping of loaders by name.

    Raises:
        TypeError, ValueError: it is no loader, the mapping is empty, or has a name or a loader that is
            invalid.
    """
    if not isinstance(loaders, Mapping):
        check_loader(argument, loaders)
        return
    if not loaders:
        raise ValueError(
            f"{argument} must be a loader, or a mapping {{name: loader}} of one or more, got {{}}"
        )
    for name, loader in loaders.items():
        if not isinstance(name, str) or not name or "/" in name:
            kind = ValueError if isinstance(name, str) else TypeError
            raise kind(
                f"{argument}: the name of a loader must be a str that is not empty and has no '/', which "
                f"separates it from the name of a metric; got {name!r}"
            )
        check_loader(f"{argument}[{name!r}]", loader)


def of_loader(loader: str, name: str) -> str:
    """Return the name under which something of a named loader is reported: "clean/accuracy"."""
    return f"{loader}/{name}" if loader else name


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
