"""Find the number of samples in a batch, from the batch's structure or from the outputs of `val_step`.

Evaluations weight their means by this number, and `ThroughputHook` counts samples with it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

logger = logging.getLogger("eventloop")

NUM_SAMPLES = "num_samples"
"""The key under which `val_step` may return the number of samples in its batch, as in mmcv."""
_ADVICE = f"return {NUM_SAMPLES}=... from val_step to give another number"


_CONTAINERS = (torch.Tensor, np.ndarray, Mapping, list, tuple)
"""The types that may hold several samples."""
_KNOWN = (*_CONTAINERS, np.generic, str, bytes, int, float, type(None))
"""The types of batches whose number of samples is known; a number or a text is one sample."""


class _Field(NamedTuple):
    """A tensor or list in a batch, and the numbers of samples that it may have."""

    name: str
    """The keys and indices that lead to the field, for messages, such as "images" or "boxes[0]"."""
    sizes: tuple[int, ...]
    """The possible numbers of samples: of a tensor its first dimension, of a list without tensors its length.

    Of a list of tensors they are the first dimension that all its tensors have, if there is one, and last the
    list's length.
    """
    has_tensors: bool


def batch_size(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension that most of its tensors have.

    For a list of samples it is the length: a list of mappings, of tuples such as `(image, 3)`, or a list
    without tensors. For a list of tensors it is their first dimension if that is the same in all of them,
    unless another part of the batch has the length of the list. A batch without tensors and lists is one
    sample.
    """
    return _size_and_fields(batch)[0]


def samples_of(outputs: Mapping[str, Any], batch: Any, reported: set[str]) -> int:
    """Return the number of samples in a batch, as `val_step` returns it or else as `batch_size` finds it.

    Args:
        outputs: the return value of `val_step`.
        batch: the batch.
        reported: the subjects of warnings that were logged; if this call logs one, it adds the subject.

    Raises:
        TypeError, ValueError: `outputs` is not a mapping, or `num_samples` is not an int of at least 0 on the
            host.
    """
    if not isinstance(outputs, Mapping):
        raise TypeError(f"val_step must return a mapping of values, got {outputs!r}")
    if NUM_SAMPLES in outputs:
        return _checked(outputs[NUM_SAMPLES])
    size, fields = _size_and_fields(batch)
    if NUM_SAMPLES not in reported and (subject := _uncertain_batch_text(batch, size, fields)):
        reported.add(NUM_SAMPLES)
        logger.warning("%s counts as %d in means over samples: %s", subject, size, _ADVICE)
    return size


def _checked(number: Any) -> int:
    """Return the number of samples that `val_step` has returned, as an int; refuse other values."""
    if isinstance(number, torch.Tensor) and number.numel() == 1 and number.device.type == "cpu":
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        reason = ""
        if isinstance(number, torch.Tensor):
            reason = f" on {number.device}, whose value is not waited for"
        raise TypeError(
            f"val_step: {NUM_SAMPLES} must be an int, such as len(images), got {number!r}{reason}"
        )
    if number < 0:
        raise ValueError(f"val_step: {NUM_SAMPLES} must be at least 0, got {number}")
    return int(number)


def _size_and_fields(batch: Any) -> tuple[int, list[_Field]]:
    """Return the number of samples in a batch, and the fields by which it was found."""
    if isinstance(batch, list | tuple) and batch and not any(map(_is_container, batch)):
        return len(batch), []  # texts, numbers or other objects, each a sample
    fields = [*_fields(batch, "")]
    sizes_without_tensors = {size for field in fields if not field.has_tensors for size in field.sizes}
    fields = [field for field in fields if field.has_tensors] or fields
    counts = Counter(size for field in fields for size in field.sizes)
    lists_of_tensors = [field for field in fields if len(field.sizes) > 1]
    # lengths of lists of tensors that a list without tensors has too, such as a list of one text a sample
    confirmed = {field.sizes[-1] for field in lists_of_tensors} & sizes_without_tensors
    # of equally frequent sizes max returns the first one, and a Counter keeps the order of the batch
    return max(counts, key=lambda size: (counts[size], size in confirmed), default=1), fields


def _fields(batch: Any, name: str) -> Iterator[_Field]:
    """Yield the tensors and lists of a batch as fields, also those in nested mappings."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        if batch.ndim:
            yield _Field(name, (int(batch.shape[0]),), True)
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _fields_of_part(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, list | tuple):
        if _is_list_of_samples(batch):
            yield _Field(name, (len(batch),), True)
        else:
            for index, value in enumerate(batch):
                yield from _fields_of_part(value, f"{name}[{index}]")


def _fields_of_part(value: Any, name: str) -> Iterator[_Field]:
    """Yield the fields of one entry of a batch; a list within the batch is one field."""
    if not isinstance(value, list | tuple) or _is_list_of_samples(value):
        yield from _fields(value, name)
    elif value:
        tensors = [field for field in _fields(value, name) if field.has_tensors]
        sizes_of_tensors = [size for size in _common_sizes(tensors) if size != len(value)]
        yield _Field(name, (*sizes_of_tensors, len(value)), bool(tensors))


def _common_sizes(fields: Sequence[_Field]) -> list[int]:
    """Return the numbers of samples that all fields may have, in the order of the first field."""
    if not fields:
        return []
    return [size for size in fields[0].sizes if all(size in field.sizes for field in fields)]


def _is_list_of_samples(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether each entry is one sample: a mapping, or in a list a tuple that can be nothing else."""
    if value and isinstance(value, list) and all(isinstance(sample, tuple) for sample in value):
        return any(map(_is_sample, value))
    return bool(value) and all(isinstance(sample, Mapping) for sample in value)


def _is_sample(value: tuple[Any, ...]) -> bool:
    """Return whether a tuple is certainly one sample.

    It is if it has a number, or tensors together with a text, or tensors that differ in their first
    dimension. Otherwise it may be a batch such as `(inputs, targets)`.
    """
    if any(isinstance(part, int | float | np.generic) or getattr(part, "ndim", 1) == 0 for part in value):
        return True
    tensors = [field for field in _fields(value, "") if field.has_tensors]
    has_text = any(isinstance(part, str) for part in value)
    return bool(tensors) and (has_text or not _common_sizes(tensors))


def _is_container(value: Any) -> bool:
    return isinstance(value, _CONTAINERS)


def _uncertain_batch_text(batch: Any, size: int, fields: list[_Field]) -> str:
    """Describe a batch for a warning that it may not have `size` samples; return "" if it certainly has."""
    if any(field.has_tensors and size not in field.sizes for field in fields):
        sizes = ", ".join(f"{field.name} {field.sizes[0]}" for field in fields[:8])
        return f"a validation batch has parts of different sizes ({sizes}) and"
    common = _common_sizes(fields)
    # the first common size is that of the tensors; another `size` is the length of the lists, and is certain
    if len(common) > 1 and size == common[0]:
        sizes = ", ".join(f"{field.name}: {field.sizes[-1]} of {field.sizes[0]}" for field in fields[:8])
        return f"a validation batch of lists of tensors ({sizes})"
    if not isinstance(batch, _KNOWN):
        return f"a validation batch of type {type(batch).__name__}, whose size is unknown,"
    return ""
