"""Test the number by which a batch is known again after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eventloop.data.plain_reader import GivenBatch, batch_print

ALIKE: dict[str, tuple[Any, Any]] = {
    "tensor": (torch.arange(4), torch.arange(4)),
    "columns of another layout": (torch.ones(3, 2).t(), torch.ones(2, 3)),
    "mapping": ({"a": torch.ones(2), "b": "text"}, {"a": torch.ones(2), "b": "text"}),
    "behind the first 64 KB": (torch.zeros(40_000), torch.cat([torch.zeros(39_999), torch.ones(1)])),
    "half": (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    "nothing in it": (torch.ones(0, 3), torch.ones(0, 3)),
    "conjugated": (torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj()),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "tensor": (torch.arange(4), torch.arange(1, 5)),
    "order": (torch.tensor([1, 2]), torch.tensor([2, 1])),
    "shape": (torch.ones(2, 3), torch.ones(3, 2)),
    "number": ([1, torch.ones(2)], [2, torch.ones(2)]),
    "text": (["a"], ["b"]),
    "array": (np.arange(3), np.arange(1, 4)),
    "one row, longer than 64 KB": (torch.zeros(1, 40_000), torch.ones(1, 40_000)),
}


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_batches_with_one_print(one: Any, other: Any) -> None:
    """Batches with the same values have the same print; values far behind are not read."""
    assert batch_print(one) == batch_print(other) is not None


@pytest.mark.parametrize(("one", "other"), OTHERS.values(), ids=OTHERS)
def test_batches_with_other_prints(one: Any, other: Any) -> None:
    """Batches with other values or shapes have another print."""
    assert batch_print(one) != batch_print(other)


@pytest.mark.parametrize("batch", [None, [object()], torch.ones(2, device="meta"), torch.eye(2).to_sparse()])
def test_a_batch_that_is_not_read(batch: Any) -> None:
    """A batch of which nothing can be read without waiting has no print."""
    assert GivenBatch(batch).print() is None


def test_a_batch_that_was_changed_in_place() -> None:
    """A batch that the training has changed in place has no print, as the loader gave another."""
    batch = {"x": torch.ones(2)}
    given = GivenBatch(batch)
    assert given.print() == batch_print({"x": torch.ones(2)})

    batch["x"].mul_(2)

    assert given.print() is None
