"""The state of the global random generators, and of those a loader has of its own, as plain values and tensors."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, loadable with `weights_only=True`.

    Their words are tensors: hundreds of Python ints take long to copy and to pickle.
    """
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, _tensor(np.frombuffer(array("I", words), np.uint32)), gauss],
        "numpy": [numpy[0], _tensor(numpy[1]), *numpy[2:]],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the generators into a state that `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(_words(words).tolist()), gauss))
    name, words, *rest = state["numpy"]
    np.random.set_state((name, _words(words), *rest))
    torch.set_rng_state(state["torch"].clone())  # torch reads a state from the start of its storage
    if "cuda" in state and torch.cuda.is_available():
        for index, device in enumerate(
            state["cuda"][: torch.cuda.device_count()]
        ):  # there may be fewer than there were
            torch.cuda.set_rng_state(device.clone(), index)


def samplers_of(loader: Iterable[Any] | None) -> list[Any]:
    """What decides the order of a loader, each or None: its sampler, its batch sampler's, its batch sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler]


def generators_of(loader: Iterable[Any] | None) -> list[torch.Generator]:
    """The random generators a loader and its samplers have of their own."""
    owned = [getattr(owner, "generator", None) for owner in (loader, *samplers_of(loader))]
    return list({id(g): g for g in owned if isinstance(g, torch.Generator)}.values())


def set_generators(loader: Iterable[Any] | None, states: list[torch.Tensor]) -> None:
    """Put a loader's own generators into states, in the order of `generators_of`."""
    for generator, state in zip(generators_of(loader), states, strict=False):
        generator.set_state(state.clone())  # torch reads a state from the start of its storage


def random_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """The state of everything a pass over a loader may draw from in this process."""
    return {"rng": rng_state(), "generators": [g.get_state() for g in generators_of(loader)]}


def set_random_state(loader: Iterable[Any] | None, state: Mapping[str, Any]) -> None:
    """Put everything into a state that `random_state` returned."""
    set_rng_state(state["rng"])
    set_generators(loader, state["generators"])


def _tensor(words: Any) -> torch.Tensor:
    return torch.from_numpy(
        words.view(np.int32).copy()
    )  # torch's unsigned types came late, and are half there


def _words(tensor: torch.Tensor) -> Any:
    return tensor.numpy().view(np.uint32)
