"""Copies that are made so that two owners of one state do not change each other's: what is left out is seen here, where
torch's own classes would happen to copy once more."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from eventloop import Trainer
from eventloop.checkpoint.saving.buffers import Buffers
from eventloop.data.index_reader import IndexReader
from eventloop.data.loader_state import own_random_state, set_generators, set_own_random_state
from eventloop.data.rng import rng_state, set_rng_state
from eventloop.hooks import Hook
from eventloop.resume.apply import Applying
from tests.checkpoints import rewrite
from tests.support.cuda import set_cuda
from tests.support.saving import begun
from tests.support.trainers import build_trainer, samples, tiny_model


def test_a_tensor_that_does_not_lie_in_a_row_is_copied_late() -> None:
    """As all that comes later, by `copy`: a transposed one, a slice, a conjugate."""
    lying = torch.arange(24.0).view(4, 6)
    sources = {"t": lying.t(), "s": lying[:, ::2], "c": torch.tensor([1 + 2j, 3 - 1j]).conj(), "row": lying}
    expected = {name: source.clone() for name, source in sources.items()}
    buffers = Buffers()
    begun(
        {"state_dict": {name: torch.zeros_like(source) for name, source in sources.items()}}, buffers=buffers
    )
    snapshot = begun(
        {"state_dict": sources}, {source.data_ptr() for source in sources.values()}, buffers=buffers
    )

    snapshot.copy()

    there = snapshot.wait()["state_dict"]
    assert all(torch.equal(there[name], expected[name]) for name in sources)


def within_another(state: torch.Tensor) -> torch.Tensor:
    """The same behind something else in one storage, as it is in a checkpoint."""
    return torch.cat([torch.zeros(7, dtype=state.dtype), state])[7:]


def test_random_states_that_share_a_storage() -> None:
    """torch reads a state from the start of its storage; what is given to it has one of its own."""
    generator = torch.Generator().manual_seed(3)
    state, own = rng_state(), generator.get_state()
    drawn = [random.random(), float(np.random.rand()), *torch.rand(2), *torch.rand(2, generator=generator)]
    loader = DataLoader(samples(2), generator=generator)

    set_rng_state({**state, "torch": within_another(state["torch"])})
    set_generators(loader, {"loader.generator": ["torch.cpu", within_another(own)]})

    again = [random.random(), float(np.random.rand()), *torch.rand(2), *torch.rand(2, generator=generator)]
    assert again == drawn


def test_random_states_of_devices_that_share_a_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for those of CUDA devices, of which all lie behind one another in a checkpoint."""
    given: list[torch.Tensor] = []
    set_cuda(
        monkeypatch,
        is_available=lambda: True,
        device_count=lambda: 1,
        set_rng_state=lambda state, index: given.append(state),
    )
    state = torch.arange(16, dtype=torch.uint8)

    set_rng_state({**rng_state(), "cuda": [within_another(state)]})

    (one,) = given
    assert one.tolist() == state.tolist()
    assert one.storage_offset() == 0


class Kept(Sampler[int]):
    """Gives away its state as it is, keeps what it is given, and goes on in it; draws with a generator of its own."""

    def __init__(self) -> None:
        self.place = {"at": 0}
        self.own = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        while self.place["at"] < 9:
            self.place["at"] += 1
            yield self.place["at"]

    def state_dict(self) -> dict[str, int]:
        return self.place

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state


def test_samplers_that_keep_their_state() -> None:
    """Neither what was saved of one changes when it draws, nor what it was given is another's."""
    sampler = Kept()
    loader = DataLoader(samples(2), sampler=sampler)
    saved = own_random_state(loader)
    own = sampler.own.get_state()
    (place,) = saved["generators"]
    saved["generators"][place][1] = within_another(own)
    drawn = next(iter(sampler)), torch.rand(2, generator=sampler.own).tolist()

    for _ in range(2):
        set_own_random_state(loader, saved, opening=True)
        assert (next(iter(sampler)), torch.rand(2, generator=sampler.own).tolist()) == drawn


class Seeds(Dataset[int]):
    """Says with what seed its worker was started."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        return int(info.seed)


def test_the_seed_of_persistent_workers_shares_a_storage() -> None:
    """A resumed run starts the workers with their seed, wherever the state lies from which it was drawn."""
    loader = DataLoader(Seeds(), num_workers=1, persistent_workers=True)
    reader, other = IndexReader(), IndexReader()
    seeds = [int(batch) for batch in reader.open(loader, 0, {})]
    state = reader.state_dict(loader, 0)

    other.load_state_dict(loader, {**state, "seeded_with": within_another(state["seeded_with"])})

    assert [int(batch) for batch in other.open(loader, 0, {})] == seeds


# --- a resume that fails half-way ------------------------------------------------------------------------------


class InPlace(torch.optim.SGD):
    """Loads a state into the tensors it has, as one whose step was captured in a CUDA graph must."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for own, saved in zip(self.state.values(), state_dict["state"].values(), strict=True):
            own["momentum_buffer"].copy_(saved["momentum_buffer"])


class Listed(torch.optim.lr_scheduler.LambdaLR):
    """Has a list that it gives away, and loads into."""

    seen: list[int]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen[:] = state_dict["seen"]


class Living(Hook):
    """Has a state that it gives away as it is, and loads into."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value.copy_(state["value"])


class Picky(Hook):
    """Finds its own state wrong, after all the others have taken theirs."""

    def state_dict(self) -> dict[str, Any]:
        return {"right": True}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state["right"]:
            raise ValueError("it is wrong")


def of_living_states(directory: Path, iterations: int) -> tuple[Trainer, Living, Listed]:
    """A trainer that has done so many iterations, and two that give away what they have."""
    living = Living(float(iterations))
    model = tiny_model()
    optimizer = InPlace(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = Listed(optimizer, lambda step: 1.0)
    scheduler.seen = [iterations]
    trainer = build_trainer(
        model=model,
        optimizer=optimizer,
        schedulers=[scheduler],
        hooks=[living, Picky()],
        max_iters=iterations,
        work_dir=directory,
    )
    trainer.train()
    return trainer, living, scheduler


def test_what_is_put_back_is_a_copy(tmp_path: Path) -> None:
    """Whatever loads a state in place, and gave it away as it is, has its own again after a resume that failed."""

    def refused_by_a_hook(saved: dict[str, Any]) -> None:
        saved["hooks"]["Picky"].update(right=False)
        (groups,) = saved["meta"]["settings"]["optimizer"].values()
        groups[0]["lr"] = 0.3

    of_living_states(tmp_path / "other", 3)[0].close()
    rewrite(tmp_path / "other" / "iter_3", refused_by_a_hook)
    trainer, living, scheduler = of_living_states(tmp_path / "own", 2)
    momenta = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    before = [momentum.clone() for momentum in momenta]
    settings = copy.deepcopy(trainer.state.settings.state_dict())

    with pytest.raises(ValueError, match="it is wrong"):
        trainer.resume(tmp_path / "other" / "iter_3", changed="keep")

    assert all(map(torch.equal, momenta, before))
    assert living.value.tolist() == [2.0]
    assert scheduler.seen == [2]
    assert trainer.state.settings.state_dict() == settings
    trainer.close()


def test_settings_are_those_of_the_beginning(tmp_path: Path) -> None:
    """What a schedule changes of its own afterwards, or the owner of a loaded state, changes none of them."""
    trainer, _, scheduler = of_living_states(tmp_path / "run", 2)
    settings = trainer.state.settings
    saved = {"settings": {"optimizer": {}, "param_schedulers": [{"seen": [5]}]}}

    scheduler.seen[:] = [7]
    applying = Applying(trainer, settings.record_begin())
    applying.scheduler_states([{"seen": [5]}])[0]["seen"].append(8)
    (built,) = applying.scheduler_states([{"seen": [5]}])
    settings.record(saved)
    saved["settings"]["param_schedulers"][0]["seen"].append(6)  # type: ignore[index]

    assert built["seen"] == [2]
    assert settings.state_dict()["param_schedulers"] == [{"seen": [5]}]
    trainer.close()
