"""Seeds and devices in one line."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from eventloop import seed_everything
from eventloop.data.seeding import choose_device
from tests.support.cuda import set_cuda
from tests.support.trainers import build_trainer


@pytest.fixture
def algorithms() -> Iterator[None]:
    """Put the deterministic settings back."""
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_generators_begin_again() -> None:
    """Python, NumPy and torch draw the same numbers after the same seed, and others after another."""
    assert seed_everything(3) == 3
    first = drawn()
    seed_everything(3)
    again = drawn()
    seed_everything(4)
    other = drawn()

    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_deterministic_algorithms(algorithms: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `deterministic=True` torch uses deterministic algorithms only."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    seed_everything(3, deterministic=True)

    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("seed", "error", "words"),
    [
        ("3", TypeError, "seed must be an int, got '3'"),
        (True, TypeError, "seed must be an int, got True"),
        (-1, ValueError, r"seed must be 0 to 2\*\*32 - 1, .* got -1"),
        (2**32, ValueError, "got 4294967296"),
    ],
)
def test_bad_seeds(seed: Any, error: type[Exception], words: str) -> None:
    """A seed that is no int, or out of range, is refused with what came."""
    with pytest.raises(error, match=words):
        seed_everything(cast(int, seed))


def devices(monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool, rank: str | None) -> None:
    """Stand for a machine with some devices."""
    set_cuda(
        monkeypatch, is_available=lambda: cuda > 0, device_count=lambda: cuda, set_device=lambda device: None
    )
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)


@pytest.mark.parametrize(
    ("cuda", "mps", "rank", "expected"),
    [(2, False, "1", "cuda:1"), (2, False, None, "cuda:0"), (0, True, None, "mps"), (0, False, "1", "cpu")],
)
def test_auto_is_the_fastest_kind(
    monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool, rank: str | None, expected: str
) -> None:
    """ "auto" is the process's CUDA device, else mps, else the CPU."""
    devices(monkeypatch, cuda, mps, rank)

    assert choose_device("auto") == torch.device(expected)


def test_the_chosen_gpu_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own GPU is PyTorch's current one, so that "cuda" does not mean the first one on all ranks."""
    devices(monkeypatch, 2, False, "1")
    chosen: list[object] = []
    set_cuda(monkeypatch, set_device=chosen.append)

    choose_device("auto")

    assert chosen == [1]


@pytest.mark.parametrize("rank", ["x", "", "-1", "1.0"])
def test_a_local_rank_that_is_no_number(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """The error names the variable, what it must be, and what came, where a device is chosen by it."""
    devices(monkeypatch, 2, False, rank)

    with pytest.raises(
        ValueError, match=rf'device="auto" .* LOCAL_RANK must be the number .* from 0 on, got {rank!r}: '
    ):
        choose_device("auto")


def test_an_unknown_device() -> None:
    """The error names the argument, what it may be, and what came."""
    with pytest.raises(ValueError, match=r"""device must be "auto" or a device of PyTorch.*, got 'autp'"""):
        choose_device("autp")


def test_a_missing_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the device that was asked for, and the one that works everywhere."""
    devices(monkeypatch, 0, False, None)

    with pytest.raises(ValueError, match=r'device="cuda:1" needs CUDA, .*: device="auto" uses'):
        choose_device("cuda:1")


def test_more_processes_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a device of its own is told so."""
    devices(monkeypatch, 2, False, "2")

    with pytest.raises(ValueError, match=r'device="auto" means cuda:2 .* but there are 2 CUDA devices'):
        choose_device("auto")


def test_a_trainer_with_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Trainer(device="auto")` moves model and batches to it."""
    devices(monkeypatch, 0, False, None)
    trainer = build_trainer(tmp_path, device="auto")

    trainer.train()
    trainer.close()

    assert trainer.device == torch.device("cpu")
