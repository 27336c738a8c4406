"""Find the number of samples of a batch, from the form of the batch or from what `val_step` returned.

Evaluations weight their means by it, and `ThroughputHook` counts by it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

logger = logging.getLogger("eventloop")

NUM_SAMPLES = "num_samples"
"""The key under which `val_step` returns the number of samples of its batch, as in mmcv."""
_ADVICE = f"return {NUM_SAMPLES}=... from val_step to give another number"


_PARTS = (torch.Tensor, np.ndarray, Mapping, list, tuple)
_KNOWN = (*_PARTS, np.generic, str, bytes, int, float, type(None))
"""The types of batches whose size is known, among them those of a single sample."""


class _Field(NamedTuple):
    """A part of a batch, and the numbers of samples that it may have."""

    name: str
    sizes: tuple[int, ...]
    of_tensors: bool


def batch_size(batch: Any) -> int:
    """Return the number of samples: the size that most tensors of the batch have in their first dimension.

    A list of samples counts its length: a list of mappings, of tuples such as `(image, 3)`, and a list
    without tensors. A list of tensors counts their first dimension if they share it, unless another part of
    the batch has the size of the list. Without any of these a batch is one sample.
    """
    return _sized(batch)[0]


def samples_of(outputs: Mapping[str, Any], batch: Any, reported: set[str]) -> int:
    """Return the number of samples that `val_step` returned with its outputs, else that of the batch.

    Args:
        outputs: what `val_step` returned.
        batch: the batch.
        reported: the subjects of warnings that were logged already; a new one is added.

    Raises:
        TypeError, ValueError: `outputs` is no mapping, or `num_samples` is not an int of at least 0 that the
            host has.
    """
    if not isinstance(outputs, Mapping):
        raise TypeError(f"val_step must return a mapping of values, got {outputs!r}")
    if NUM_SAMPLES in outputs:
        return _checked(outputs[NUM_SAMPLES])
    size, fields = _sized(batch)
    if NUM_SAMPLES not in reported and (doubt := _doubt(batch, size, fields)):
        reported.add(NUM_SAMPLES)
        logger.warning("%s counts as %d in means over samples: %s", doubt, size, _ADVICE)
    return size


def _checked(given: Any) -> int:
    if isinstance(given, torch.Tensor) and given.numel() == 1 and given.device.type == "cpu":
        given = given.item()
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        where = (
            f" on {given.device}, whose value is not waited for" if isinstance(given, torch.Tensor) else ""
        )
        raise TypeError(f"val_step: {NUM_SAMPLES} must be an int, such as len(images), got {given!r}{where}")
    if given < 0:
        raise ValueError(f"val_step: {NUM_SAMPLES} must be at least 0, got {given}")
    return int(given)


def _sized(batch: Any) -> tuple[int, list[_Field]]:
    if isinstance(batch, list | tuple) and batch and not any(map(_has_parts, batch)):
        return len(batch), []  # of texts, numbers or other objects
    fields = [*_fields(batch, "")]
    others = {size for field in fields if not field.of_tensors for size in field.sizes}
    fields = [field for field in fields if field.of_tensors] or fields
    votes = Counter(size for field in fields for size in field.sizes)
    lengths = {field.sizes[-1] for field in fields if len(field.sizes) > 1} & others
    # in order, so that the first wins a tie
    return max(votes, key=lambda size: (votes[size], size in lengths), default=1), fields


def _fields(batch: Any, name: str) -> Iterator[_Field]:
    """Yield the fields of a batch; a list within it is one field."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        if batch.ndim:
            yield _Field(name, (int(batch.shape[0]),), True)
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _part(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, list | tuple):
        if _are_samples(batch):
            yield _Field(name, (len(batch),), True)
        else:
            for index, value in enumerate(batch):
                yield from _part(value, f"{name}[{index}]")


def _part(value: Any, name: str) -> Iterator[_Field]:
    if not isinstance(value, list | tuple) or _are_samples(value):
        yield from _fields(value, name)
    elif value:
        within = [field for field in _fields(value, name) if field.of_tensors]
        shared = _shared(field.sizes for field in within)
        yield _Field(name, (*(size for size in shared if size != len(value)), len(value)), bool(within))


def _shared(each: Iterable[tuple[int, ...]]) -> list[int]:
    """Return the sizes that all fields may have, in the order of the first one."""
    first, *others = [*each] or [()]
    return [size for size in first if all(size in sizes for sizes in others)]


def _are_samples(value: list[Any] | tuple[Any, ...]) -> bool:
    if value and isinstance(value, list) and all(isinstance(sample, tuple) for sample in value):
        return any(map(_is_sample, value))
    return bool(value) and all(isinstance(sample, Mapping) for sample in value)


def _is_sample(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple is certainly one sample: it has a number, or its tensors differ in size."""
    if any(isinstance(part, int | float | np.generic) or getattr(part, "ndim", 1) == 0 for part in value):
        return True
    sizes = [field.sizes for field in _fields(value, "") if field.of_tensors]
    return bool(sizes) and (any(isinstance(part, str) for part in value) or not _shared(sizes))


def _has_parts(value: Any) -> bool:
    return isinstance(value, _PARTS)


def _doubt(batch: Any, size: int, fields: list[_Field]) -> str:
    """Return the words for a batch whose number of samples is uncertain, else ""."""
    if any(field.of_tensors and size not in field.sizes for field in fields):
        sizes = ", ".join(f"{field.name} {field.sizes[0]}" for field in fields[:8])
        return f"a validation batch has parts of different sizes ({sizes}) and"
    both = _shared(field.sizes for field in fields)
    if len(both) > 1 and size == both[0]:  # else another part has said that it is the length
        sizes = ", ".join(f"{field.name}: {field.sizes[-1]} of {field.sizes[0]}" for field in fields[:8])
        return f"a validation batch of lists of tensors ({sizes})"
    if not isinstance(batch, _KNOWN):
        return f"a validation batch of type {type(batch).__name__}, whose size is unknown,"
    return ""
