"""What trial trainings, evaluations, predictions and passes change is undone, wherever Ctrl-C comes."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.checkpoint import weights
from eventloop.data import rng, side_pass
from eventloop.evaluation import evaluation, prediction
from eventloop.hooks import EMAHook, PreciseBN
from eventloop.metrics.storage import ENTERED
from eventloop.model import average_pairs, batchnorm_statistics
from eventloop.state import rollback, undo
from eventloop.state.rollback import Rollback
from eventloop.state.undo import Undo
from eventloop.training import evaluation_loop
from eventloop.tuning import range_test, trial
from tests.support.cutting import each_cut
from tests.support.inside_torch import module_hooks
from tests.support.interrupted import BATCH, Augmented, assert_same, seed, state_of
from tests.support.trainers import MakeTrainer

# --- the steps ---------------------------------------------------------------------------------------------


def changed(cuts: Callable[[], object] = lambda: None) -> tuple[list[int], bool]:
    """Change a list and the grad mode within a block, and return them after it."""
    values = [1, 2, 3]
    undoing = Undo()
    with undoing, undoing:
        undoing.step(values.__setitem__, slice(None), [*values])
        torch.set_grad_enabled(False)
        for place in range(3):
            undoing.step(values.__setitem__, place, 7 + place)
            undoing.step(cuts)
            values[place] = 0
    return values, torch.is_grad_enabled()


def test_the_first_step_is_made_last() -> None:
    """Values are those of the first recorded step, and the grad mode is as before."""
    assert changed() == ([1, 2, 3], True)


def test_every_interrupt_lets_all_steps_be_made() -> None:
    """At whatever line of the undo the interrupt comes, the block leaves everything as before and raises it."""
    values: list[int] = []

    def work() -> None:
        undoing = Undo()
        with undoing, undoing:
            undoing.step(values.__setitem__, slice(None), [])
            torch.set_grad_enabled(False)
            values.append(1)

    lines = [(values[:], torch.is_grad_enabled()) for _ in each_cut([undo], work)]
    assert lines == [([], True)] * len(lines)
    assert len(lines) > 10


def test_a_step_that_is_interrupted_several_times_is_made_again() -> None:
    """A second signal in the same step stops it no more than the first; one of them is raised after the last step."""
    left = 3

    def cuts() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        changed(cuts)

    assert (left, torch.is_grad_enabled()) == (-3, True)


def test_an_error_of_a_step_is_raised_after_the_others() -> None:
    """The first error is raised, and the other steps are made."""
    made: list[str] = []
    undoing = Undo()
    for action, value in ((made.append, "last"), ({}.__getitem__, "first"), ({}.__getitem__, "second")):
        undoing.step(action, value)

    with pytest.raises(KeyError, match="second"), undoing, undoing:
        pass

    assert made == ["last"]


def test_every_interrupt_lets_a_rollback_be_complete() -> None:
    """At whatever line of a rollback Ctrl-C comes, all objects are as before the load, and a note says so."""
    values: list[int] = []
    notes: list[str] = []

    def work() -> None:
        loading = Rollback("a.pth")
        try:
            with loading, loading:
                for _ in range(3):
                    loading.on_rollback("a list", values.clear)
                values.append(1)
                raise ZeroDivisionError
        except KeyboardInterrupt as interrupt:
            notes.extend(getattr(interrupt, "__notes__", []))
            raise
        except ZeroDivisionError:
            pass

    left = [values[:] for _ in each_cut([rollback], work)]
    assert left == [[]] * len(left)
    assert len(left) > 20
    assert not [note for note in notes if "except" in note]


# --- what uses them ----------------------------------------------------------------------------------------


def build(make_trainer: MakeTrainer) -> Trainer:
    """A trainer with everything that a pass could change."""
    seed()
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 2))
    model[2].eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Augmented(8), BATCH, shuffle=True)
    evaluated = [*loader]  # an evaluation that a user asks for may draw from the random states
    trainer = make_trainer(
        model=model,
        optimizer=optimizer,
        train_loader=loader,
        val_loader=evaluated,
        test_loader=evaluated,
        hooks=[EMAHook(momentum=0.1), PreciseBN(num_iter=2, data_loader=loader)],
        max_iters=2,
        max_epochs=None,
    )
    trainer.train()
    return trainer


def everything(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint holds, and what it does not."""
    optimizer: Any = trainer.optimizer
    return {
        "state": state_of(trainer),
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in trainer.model.parameters()],
        "modes": [module.training for module in trainer.model.modules()],
        "hooks of modules": module_hooks(trainer.model),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "parameters": [[*map(id, group["params"])] for group in optimizer.param_groups],
        "momentum": trainer.model[1].momentum,  # type: ignore[index]
        "trainer": {
            name: id(value)
            for name, value in vars(trainer).items()
            if not isinstance(value, int | str | float | None) and name not in ("facts", "during_run")
        },
        "counters": (trainer.mode, trainer.within, trainer.iter, trainer.epoch, trainer.running),
        "place": trainer.clock.waits.place,
        "storages": len(ENTERED.get()),
        "grad mode": torch.is_grad_enabled(),
        "subscriptions": sorted(stats.name for stats in trainer.bus.stats() if not stats.error),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "torch": torch.get_rng_state(),
    }


def precise(trainer: Trainer) -> None:
    """Compute statistics in a pass that ends before they are written."""
    hook = next(hook for hook in trainer.hooks if isinstance(hook, PreciseBN))

    def ends(model: nn.Module, batch: Any) -> Any:
        model(batch[0])
        raise ZeroDivisionError

    hook._forward = ends
    with suppress(ZeroDivisionError):
        hook.update_stats(trainer)


USES: dict[str, tuple[Callable[[Trainer], object], list[ModuleType]]] = {
    "find_lr": (lambda trainer: trainer.find_lr(1e-3, 1.0, 2), [trial, rollback, range_test]),
    "predict to": (
        lambda trainer: trainer.predict(trainer.train_loader, to=len),
        [prediction, evaluation_loop],
    ),  # type: ignore[arg-type]
    "val": (lambda trainer: trainer.val(), [evaluation_loop, average_pairs]),
    "PreciseBN": (precise, [batchnorm_statistics]),
}
SHARED: list[ModuleType] = [undo, weights, side_pass, rng, evaluation]


def lines_cut(trainer: Trainer, work: Callable[[Trainer], object], modules: list[ModuleType]) -> int:
    """Interrupt each line of these modules, compare what is left, and return the number of lines."""
    before, lines = everything(trainer), 0
    for line in each_cut(modules, lambda: work(trainer)):
        assert_same(everything(trainer), before, f"line {line}")
        lines += 1
    return lines


@pytest.mark.representative(1)
@pytest.mark.parametrize("use", USES)
def test_an_interrupt_of_the_undo_leaves_everything_as_before(make_trainer: MakeTrainer, use: str) -> None:
    """Ctrl-C before each line of the undo itself does not stop it."""
    assert lines_cut(build(make_trainer), USES[use][0], [undo]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_an_interrupt_leaves_everything_as_before(make_trainer: MakeTrainer, use: str) -> None:
    """Ctrl-C before each line of the code that changes and restores leaves all as it was before the call."""
    work, modules = USES[use]
    assert lines_cut(build(make_trainer), work, [*SHARED, *modules]) > 100
