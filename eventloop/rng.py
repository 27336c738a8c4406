"""The state of the global random generators, as plain values and tensors."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
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
        torch.cuda.set_rng_state_all([device.clone() for device in state["cuda"]])


def _tensor(words: Any) -> torch.Tensor:
    return torch.from_numpy(
        words.view(np.int32).copy()
    )  # torch's unsigned types came late, and are half there


def _words(tensor: torch.Tensor) -> Any:
    return tensor.numpy().view(np.uint32)
