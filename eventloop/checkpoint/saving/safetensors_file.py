"""Encode weights as a safetensors file, which many programs read without executing code.

Publishing uses it. Equal weights give equal bytes, so that the hash in the file's name is stable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from eventloop.util.errors import CheckpointError


def require_safetensors() -> Any:
    """Import and return the module `safetensors.torch`."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "published_format='safetensors' needs safetensors: pip install 'torch-eventloop[safetensors]'"
        ) from error
    return safetensors.torch


def check_flat(state: object, source: str) -> None:
    """Refuse a state that a safetensors file cannot hold.

    Args:
        state: the state.
        source: the name of the state in messages.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} cannot be published as safetensors: it is a {type(state).__name__}")
    wrong = [f"{name} is {found}" for name, value in state.items() if (found := _why_not(value))]
    if wrong:
        raise CheckpointError(
            f"{source} cannot be published as safetensors, which holds dense tensors by name and nothing "
            f"nested: {', '.join(wrong)}; use published_format='pth'"
        )


def _why_not(value: Any) -> str:
    """Describe why a safetensors file cannot hold a value; return "" if it can."""
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
    """The memory of a tensor, its shape and its type; tensors with equal spans are the same tensor."""

    device: str
    storage: int
    start: int
    end: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def shared_names(state: Mapping[str, torch.Tensor], source: str) -> dict[str, str]:
    """Map the name of each tied tensor that is left out to the name under which its twin is written.

    The written name is the first in alphabetical order, as in `safetensors.torch.save_model`.

    Args:
        state: the tensors by name.
        source: the name of the state in messages.
    """
    names: dict[_Span, list[str]] = {}
    for name in sorted(state):
        if state[name].numel() and not state[name].is_meta:
            names.setdefault(_span_of(state[name]), []).append(name)
    spans = sorted(names, key=lambda span: span[:4])
    for span, after in pairwise(spans):
        if after[:2] == span[:2] and after.start < span.end:
            raise CheckpointError(
                f"{source} cannot be published as safetensors: {names[span][0]} and {names[after][0]} "
                "overlap in memory and are not the same; use published_format='pth'"
            )
    return {name: first for first, *others in names.values() for name in others}


def _span_of(tensor: torch.Tensor) -> _Span:
    start = tensor.data_ptr()
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + (steps + 1) * tensor.element_size()
    storage = tensor.untyped_storage().data_ptr()
    return _Span(str(tensor.device), storage, start, end, tensor.shape, tensor.stride(), tensor.dtype)


def encode(
    state: Mapping[str, torch.Tensor], shared: Mapping[str, str], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes of a safetensors file.

    Args:
        state: tensors by name, which `check_flat` accepts.
        shared: the names of tied tensors, each with the name that is written. A name is left out if both
            tensors are equal, and the metadata maps it to the other one.
        metadata: additional metadata. `format="pt"` is added, because programs for several frameworks need
            it.
    """
    left_out = {
        name: first
        for name, first in shared.items()
        if name in state and first in state and torch.equal(state[name], state[first])
    }
    tensors = {
        # the library writes the bytes in memory, without applying the flags of a conjugate or a negative view
        name: value.resolve_conj().resolve_neg().contiguous()
        for name, value in state.items()
        if name not in left_out
    }
    return _in_order(require_safetensors().save(tensors, {**left_out, "format": "pt", **metadata}))


def _in_order(saved: bytes) -> bytes:
    """Sort the metadata of a file, which the library writes in another order in each process.

    Otherwise equal weights would give files with different hashes and names. The first 8 bytes are the length
    of the header, which may end in spaces.
    """
    end = 8 + int.from_bytes(saved[:8], "little")
    header = json.loads(saved[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(end - 8)
    return saved if 8 + len(text) != end else b"".join((saved[:8], text, memoryview(saved)[end:]))
