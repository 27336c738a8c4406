"""Weights as a safetensors file: flat tensors by name, which many programs read and none can execute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from eventloop.util.errors import CheckpointError


def require_safetensors() -> Any:
    """The module `safetensors.torch`.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "published_format='safetensors' needs safetensors: pip install 'torch-eventloop[safetensors]'"
        ) from error
    return safetensors.torch


def check_flat(state: object, source: str) -> None:
    """Refuse what such a file cannot hold.

    Raises:
        CheckpointError: it is no mapping, or something in it is no dense tensor of a type the format has; everything
            is named.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} cannot be published as safetensors: it is a {type(state).__name__}")
    wrong = [
        f"{name} is {found}" for name, value in state.items() if (found := _unlike_a_tensor_there(value))
    ]
    if wrong:
        raise CheckpointError(
            f"{source} cannot be published as safetensors, which holds dense tensors by name and nothing nested: "
            f"{', '.join(wrong)}; published_format='pth' takes them"
        )


def _unlike_a_tensor_there(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    try:
        require_safetensors().save({"": torch.empty(0, dtype=value.dtype)})
    except KeyError:
        return f"of {value.dtype}"
    return ""


class _Span(NamedTuple):
    """Where a tensor lies; two that are equal are one tensor."""

    device: str
    storage: int
    start: int
    end: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def shared_names(state: Mapping[str, torch.Tensor], source: str) -> dict[str, str]:
    """The names of tensors that are another one, as tied weights are, and the name that stands for them: the first
    in the alphabet, as `safetensors.torch.save_model` chooses it.

    Raises:
        CheckpointError: two overlap in memory and are not the same, so that no name stands for both.
    """
    names: dict[_Span, list[str]] = {}
    for name in sorted(state):
        if state[name].numel() and not state[name].is_meta:
            names.setdefault(_span_of(state[name]), []).append(name)
    spans = sorted(names, key=lambda span: span[:4])
    for span, after in pairwise(spans):
        if after[:2] == span[:2] and after.start < span.end:
            raise CheckpointError(
                f"{source} cannot be published as safetensors: {names[span][0]} and {names[after][0]} overlap in "
                "memory and are not the same; published_format='pth' takes them"
            )
    return {name: first for first, *others in names.values() for name in others}


def _span_of(tensor: torch.Tensor) -> _Span:
    start = tensor.data_ptr()
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + (steps + 1) * tensor.element_size()
    storage = tensor.untyped_storage().data_ptr()
    return _Span(str(tensor.device), storage, start, end, tensor.shape, tensor.stride(), tensor.dtype)


def encode(state: Mapping[str, torch.Tensor], shared: Mapping[str, str], said: Mapping[str, str]) -> bytes:
    """The bytes of a file.

    Args:
        state: after `check_flat`.
        shared: names to leave out where they have what the other name has; the metadata says which stands for which.
        said: the rest of the metadata; `format="pt"` is what programs look for that read files of several frameworks.
    """
    left_out = {
        name: first
        for name, first in shared.items()
        if name in state and first in state and torch.equal(state[name], state[first])
    }
    tensors = {
        # it writes the bytes as they lie there, to which a conjugate or a negative view is still to be applied
        name: value.resolve_conj().resolve_neg().contiguous()
        for name, value in state.items()
        if name not in left_out
    }
    return _in_order(require_safetensors().save(tensors, {**left_out, "format": "pt", **said}))


def _in_order(saved: bytes) -> bytes:
    """The library writes the metadata in another order in each process: the same weights would have another hash, and
    a file of another name, each time. The header begins after its length of 8 bytes, and may end in spaces."""
    end = 8 + int.from_bytes(saved[:8], "little")
    header = json.loads(saved[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(end - 8)
    return saved if 8 + len(text) != end else b"".join((saved[:8], text, memoryview(saved)[end:]))
