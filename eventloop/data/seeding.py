"""Seed the random generators of a program, and choose its device."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

LARGEST_SEED = 2**32 - 1
"""The largest seed that NumPy accepts."""


def seed_everything(seed: int, *, deterministic: bool = False) -> int:
    """Seed the random generators of Python, NumPy and torch, on all devices, and return the seed.

        seed_everything(42 + rank)

    Call it before the model and the loaders are made. Loader workers get their seeds from torch's generator.
    A checkpoint holds the states of all of these generators, so a resumed run needs no seed.

    Args:
        seed: 0 to 2**32 - 1, NumPy's range. Give each rank a different seed if ranks draw, as for dropout.
        deterministic: whether torch uses deterministic algorithms only, and raises an error for an operation
            that has none. They are slower; see `torch.use_deterministic_algorithms`.

    Raises:
        TypeError, ValueError: `seed` is not an int in that range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed must be 0 to 2**32 - 1, NumPy's range, got {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
    return seed


def choose_device(device: str | torch.device | None) -> torch.device | None:
    """Return a device of PyTorch; "auto" gives the fastest device that the machine has.

    The fastest is a GPU, `cuda:N` with the number N of this process on its machine, which torchrun sets as
    `LOCAL_RANK`; else mps, else the CPU. The GPU becomes PyTorch's current one: then "cuda" means this GPU in
    the script too, which NCCL needs.

    Raises:
        ValueError: torch knows no such device, CUDA is asked for and missing, or "auto" finds a `LOCAL_RANK`
            that is not a number from 0 on, or is beyond the machine's devices.
    """
    if device == "auto":
        return _fastest_device()
    try:
        chosen = None if device is None else torch.device(device)
    except RuntimeError:
        raise ValueError(
            f'device must be "auto" or a device of PyTorch, such as "cuda:1" or "cpu", got {device!r}'
        ) from None
    if chosen is not None and chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f'device="{chosen}" needs CUDA, which PyTorch does not find on this machine: '
            'device="auto" uses the fastest device that there is'
        )
    return chosen


def _fastest_device() -> torch.device:
    """Return the CUDA device of this rank, else MPS, else the CPU; CUDA then uses it by default."""
    if torch.cuda.is_available():
        rank, count = _local_rank(), torch.cuda.device_count()
        if rank >= count:
            raise ValueError(
                f'device="auto" means cuda:{rank} in this process, by LOCAL_RANK, but there are {count} CUDA '
                "devices: start as many processes as there are devices, or pass device=..."
            )
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _local_rank() -> int:
    """Return the number of this process on its machine, from the environment; 0 without one."""
    text = os.environ.get("LOCAL_RANK", "0")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            'device="auto" is cuda:LOCAL_RANK, and the environment variable LOCAL_RANK must be the number of '
            f"this process on its machine, from 0 on, got {text!r}: start the processes with torchrun, unset "
            "LOCAL_RANK, or pass device=..."
        )
    return int(text)
