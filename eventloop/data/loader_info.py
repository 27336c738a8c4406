"""Inspect a loader without reading it, name several loaders, and move batches to a device.

`readers` inspects a loader to choose a reader for it; the loops use the other functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset

from eventloop.util.checks import length_of

Loaders = Iterable[Any] | Mapping[str, Iterable[Any]]
"""A loader of batches, or several loaders by name."""


def named_loaders(loaders: Loaders | None) -> dict[str, Iterable[Any]]:
    """Return loaders by name, in their order. A loader that is not in a mapping has the name ""."""
    if loaders is None:
        return {}
    return dict(loaders) if isinstance(loaders, Mapping) else {"": loaders}


def check_loader(argument: str, loader: object, *, may_be_empty: bool = False) -> None:
    """Refuse a loader that is not an iterable of batches, or that has no batches.

    Args:
        argument: the name of the argument for which the user passed the loader.
        loader: the loader.
        may_be_empty: accept a loader without batches, because other ranks may have some.

    Raises:
        TypeError, ValueError: the loader is refused; the message begins with the name of the argument.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"{argument} must be an iterable of batches, got {loader!r}")
    refuse_samples(argument, loader)
    if not may_be_empty and length_of(loader) == 0:  # type: ignore[arg-type]
        raise ValueError(
            f"{argument} is empty: it has 0 batches (is drop_last=True with a batch larger than the data?)"
        )


def refuse_samples(argument: str, loader: object) -> None:
    """Refuse a tensor, an array or a map-style data set as a loader: each row of it would be a batch.

    Args:
        argument: the name of the argument for which the user passed the loader.
        loader: the loader.

    Raises:
        TypeError: the loader is refused; the message begins with the name of the argument.
    """
    if isinstance(loader, torch.Tensor | np.ndarray):
        name = "tensor" if isinstance(loader, torch.Tensor) else "array"
        got = f"{type(loader).__name__} of shape {tuple(loader.shape)}"
    elif isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        name, got = "dataset", f"data set {type(loader).__name__}"
    else:
        return
    raise TypeError(
        f"{argument} must be a DataLoader or another iterable of batches, got the {got}, each of whose "
        f"items would be taken as a batch: give DataLoader({name}, batch_size=...)"
    )


def check_named_loaders(argument: str, loaders: Loaders) -> None:
    """Refuse an argument that is neither a loader nor a mapping of loaders by name.

    Raises:
        TypeError, ValueError: the argument is no loader, the mapping is empty, or a name or a loader in it is
            invalid.
    """
    if not isinstance(loaders, Mapping):
        if isinstance(loaders, list | tuple) and any(isinstance(each, DataLoader) for each in loaders):
            raise TypeError(
                f"{argument} must be a loader, or several by name, such as dict(clean=..., noisy=...), whose "
                f"names are in those of the metrics; got a {type(loaders).__name__} of loaders"
            )
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


def refuse_tensors(**loaders: Loaders | None) -> None:
    """Refuse a list or tuple of tensors where batches `(inputs, target)` are needed, such as `(x, y)`.

    Args:
        loaders: the loaders, by the name of the argument for which the user passed them.

    Raises:
        TypeError: a loader is refused; the message begins with the name of the argument.
    """
    for argument, given in loaders.items():
        for name, loader in named_loaders(given).items():
            is_list = isinstance(loader, list | tuple) and len(loader) > 0
            if is_list and all(isinstance(each, torch.Tensor) for each in loader):
                step = "train_step" if argument == "train_loader" else "val_step"
                raise TypeError(
                    f"{argument}{f'[{name!r}]' * bool(name)} must give batches (inputs, target), got a "
                    f"{type(loader).__name__} of tensors, each of which would be a batch: give "
                    f"DataLoader(TensorDataset(x, y), batch_size=...), or pass {step}=... for such batches"
                )


def of_loader(loader: str, name: str) -> str:
    """Return the name of a metric with the name of its loader before it, such as "clean/accuracy"."""
    return f"{loader}/{name}" if loader else name


_MOST_LOADERS = 64
"""The most items in a list, tuple or dict that is searched for DataLoaders; a longer one is data."""


def why_not_by_index(loader: Iterable[Any]) -> str | None:
    """Return why a pass over a loader cannot be resumed by drawing the indices again; None if it can."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"a {kind} is not a torch.utils.data.DataLoader, and has no state_dict and load_state_dict"
    if type(loader) is not DataLoader and not type(loader).__module__.startswith("torchdata."):
        return f"{kind} is a subclass of DataLoader, which may read in any way"
    if isinstance(loader.dataset, IterableDataset):
        return "the loader's dataset is an IterableDataset, whose samples have no indices"
    if isinstance(loader.dataset, getattr(data, "MapDataPipe", ())):
        return "the loader's dataset is a MapDataPipe"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None, and no lists of indices"
    return None


def is_of_torchdata(loader: object) -> bool:
    """Return whether a loader's class, or a base class of it, is torchdata's."""
    return any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__)


def dispatches(loader: object) -> bool:
    """Return whether a loader is Accelerate's DataLoaderDispatcher, whose rank 0 reads for all ranks."""
    return any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__)


def parts_of(loader: object) -> dict[str, Any]:
    """Return a loader and the DataLoaders that it reads, each once, by the path of its attribute.

    The path of the loader itself is "". A loader that combines or wraps DataLoaders has them as attributes,
    or as items of an attribute that is a short list, tuple or dict.
    """
    parts: dict[str, Any] = {"": loader}
    for name, value in getattr(loader, "__dict__", {}).items():
        for path, item in _items(name, value):
            if isinstance(item, DataLoader) and all(item is not other for other in parts.values()):
                parts[path] = item
    return parts


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an attribute and its items with their paths; the items of a long collection are left out."""
    yield name, value
    if isinstance(value, dict | list | tuple) and len(value) <= _MOST_LOADERS:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{name}[{key!r}]", item) for key, item in pairs)


def has_workers(loader: object) -> bool:
    """Return whether a loader, or a DataLoader that it reads, reads its data set in worker processes."""
    return any(isinstance(part, DataLoader) and part.num_workers > 0 for part in parts_of(loader).values())


def persists(loader: object) -> bool:
    """Return whether a loader, or a DataLoader that it reads, has workers that live beyond one pass."""
    return any(
        isinstance(part, DataLoader) and part.num_workers > 0 and part.persistent_workers
        for part in parts_of(loader).values()
    )


def is_stream(loader: object) -> bool:
    """Return whether a loader, or a DataLoader that it reads, has an IterableDataset."""
    return any(
        isinstance(getattr(part, "dataset", None), IterableDataset) for part in parts_of(loader).values()
    )


def to_device(batch: Any, device: torch.device | None) -> Any:
    """Return a nested batch with its tensors on a device; the copy of pinned tensors is asynchronous.

    For the device None the batch is returned as it is.
    """
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
