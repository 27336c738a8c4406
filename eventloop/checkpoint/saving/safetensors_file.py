"""Encode weights as a safetensors file, which many programs read without executing code.

Publishing and `consolidate` use it. Equal weights give equal bytes, so that the hash in the file's name is
stable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from eventloop.checkpoint.serialize import bytes_at
from eventloop.state.sharded import local_part
from eventloop.util.errors import CheckpointError


def require_safetensors(option: str = "published_format='safetensors'") -> Any:
    """Import and return the module `safetensors.torch`.

    Args:
        option: the option that needs it, which begins the message of an error.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            f"{option} needs safetensors: pip install 'torch-eventloop[safetensors]'"
        ) from error
    return safetensors.torch


def check_flat(state: object, source: str, instead: str = "published_format='pth'") -> None:
    """Refuse a state that a safetensors file cannot hold.

    Args:
        state: the state.
        source: the name of the state in messages.
        instead: the option that writes it in another format, which the message recommends.

    Raises:
        CheckpointError: the state is not a mapping, or a value in it is not a dense tensor of a type that
            safetensors has.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} cannot be written as safetensors: it is a {type(state).__name__}")
    refused = [f"{name} is {reason}" for name, value in state.items() if (reason := _why_not(value))]
    if refused:
        raise CheckpointError(
            f"{source} cannot be written as safetensors, which holds dense tensors by name and nothing "
            f"nested: {', '.join(refused)}; use {instead}"
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
    """The place of a tensor in memory, its shape and its type; tensors with equal spans are tied.

    Attributes:
        device: the name of its device.
        storage: the address of its storage.
        start, end: the addresses of its first byte, and of the byte after its last one.
        shape, stride, dtype: as those of the tensor.
    """

    device: str
    storage: int
    start: int
    end: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def shared_names(state: Mapping[str, torch.Tensor], source: str) -> dict[str, str]:
    """Map the names of tied tensors to the one name under which the tensor is written.

    That is the first name in alphabetical order, as in `safetensors.torch.save_model`; it is no key itself.

    Args:
        state: the tensors by name.
        source: the name of the state in messages.

    Raises:
        CheckpointError: two tensors share a part of their memory only.
    """
    names: dict[_Span, list[str]] = {}
    state = {name: local_part(tensor) for name, tensor in state.items()}  # DTensors have no address
    for name in sorted(state):
        if state[name].numel() and not state[name].is_meta:
            names.setdefault(_span_of(state[name]), []).append(name)
    spans = sorted(names, key=lambda span: span[:4])
    for span, after in pairwise(spans):
        if after[:2] == span[:2] and after.start < span.end:
            raise CheckpointError(
                f"{source} cannot be written as safetensors: {names[span][0]} and {names[after][0]} "
                "overlap in memory and are not the same; use published_format='pth'"
            )
    return {name: first for first, *others in names.values() for name in others}


def _span_of(tensor: torch.Tensor) -> _Span:
    """Return the addresses from a tensor's first element to its last, and what else identifies it."""
    start = tensor.data_ptr()
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + (steps + 1) * tensor.element_size()
    storage = tensor.untyped_storage().data_ptr()
    return _Span(str(tensor.device), storage, start, end, tensor.shape, tensor.stride(), tensor.dtype)


def encode(
    state: Mapping[str, torch.Tensor],
    shared: Mapping[str, str],
    metadata: Mapping[str, str],
    read: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: its header, then one tensor after the other.

    Args:
        state: tensors by name, which `check_flat` accepts.
        shared: the result of `shared_names`. If both tensors are still equal, the name is left out of the
            file, and the metadata maps it to the name that is written.
        metadata: additional metadata. `format="pt"` is added, because programs for several frameworks need
            it.
        read: returns the values of a tensor of `state`, in host memory.
    """
    left_out = {
        name: first
        for name, first in shared.items()
        if name in state and first in state and torch.equal(state[name], state[first])
    }
    tensors = {name: value for name, value in state.items() if name not in left_out}
    header, names = _header(tensors, {**left_out, "format": "pt", **metadata})
    yield header
    for name in names:
        # the format has no flag for a conjugated or negated view, so its values are computed here
        tensor = read(tensors[name]).detach().resolve_conj().resolve_neg().contiguous()
        yield bytes_at(tensor.data_ptr(), tensor.nbytes, tensor)


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """Return the header of a file, and the names of the tensors in the order of their bytes.

    The safetensors library decides the names of types, the shapes and the order. To learn them, it is given
    tensors without elements, which have one more dimension, of size 0. The library orders the metadata
    differently in each process. They are sorted here, so that equal weights give files with equal hashes.
    """
    empty = {name: torch.empty((0, *each.shape), dtype=each.dtype) for name, each in tensors.items()}
    saved = require_safetensors().save(empty, dict(metadata))
    header = json.loads(saved[8:])
    end, names = 0, [name for name in header if name != "__metadata__"]
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": header[name]["shape"][1:], "data_offsets": [begin, end]}
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text, names
