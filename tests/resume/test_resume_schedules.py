"""Test runs that are made longer, or whose rate was edited: their schedules continue as if built so from the
start."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CheckpointHook, CosineAnnealingLrUpdaterHook, StepLrUpdaterHook
from tests.support.interrupted import stopped
from tests.support.trainers import MakeTrainer, batches, collect, tiny_model

# SequentialLR of older releases of torch steps its parts in the way that torch itself warns of
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

PER_EPOCH, SHORT, LONG, DONE = 3, 2, 4, 4
BUILT, EDITED = 0.1, 0.05

Build = Callable[..., Trainer]
Edit = Callable[[Any], None]
Values = list[tuple[float, float]]


@pytest.fixture
def build(make_trainer: MakeTrainer, tmp_path: Path) -> Build:
    """Return a function that builds a trainer of two param groups with schedules for its length. `early`
    changes the groups before the trainer is built, `edit` after."""

    def make(
        kind: str,
        epochs: int = LONG,
        name: str = "run",
        *,
        lr: Any = BUILT,
        second: Any = 2 * BUILT,
        early: Edit | None = None,
        edit: Edit | None = None,
        **options: Any,
    ) -> Trainer:
        model = tiny_model()
        first, *rest = model.parameters()
        optimizer: Any = (torch.optim.Adam if kind == "betas" else torch.optim.SGD)(
            [{"params": [first]}, {"params": rest, "lr": second}], lr
        )
        for group in optimizer.param_groups:
            group |= {} if kind == "betas" else {"momentum": 0.9}
        schedulers, hooks = KINDS[kind](optimizer, epochs * PER_EPOCH), HOOKS.get(kind, list)()
        if early is not None:
            early(optimizer)
        trainer = make_trainer(
            model=model,
            optimizer=optimizer,
            schedulers=schedulers,
            hooks=hooks,
            max_epochs=epochs,
            train_loader=batches(PER_EPOCH),
            work_dir=tmp_path / name,
            **options,
        )
        if edit is not None:
            edit(optimizer)
        return trainer

    return make


def values(trainer: Trainer) -> Values:
    """Train, and return the rate and the momentum of the first group in each iteration."""
    found: Values = []

    def record(trainer: Trainer, event: Any) -> None:
        group = trainer.optimizer.param_groups[0]
        found.append((float(group["lr"]), group["momentum"] if "momentum" in group else group["betas"][0]))

    trainer.bus.subscribe(record, "before_train_iter")
    trainer.train()
    return found


def window(kind: str, **arguments: Any) -> dict[str, Any]:
    """Return the config of one of MMEngine's schedulers that counts iterations."""
    return {"type": kind, "by_epoch": False, **arguments}


class OwnDecay(torch_lr.LRScheduler):
    """A user's scheduler that multiplies the last rate, as PyTorch's do."""

    def __init__(self, optimizer: Any, steps: int) -> None:
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        left, former = max(0, self.steps - self.last_epoch), self.steps - self.last_epoch + 1
        factor = 1 if self.last_epoch == 0 else left / max(1, former)
        return [group["lr"] * factor for group in self.optimizer.param_groups]


KINDS: dict[str, Any] = {
    "windows": lambda o, n: [
        window("LinearLR", start_factor=0.1, end=n // 3),
        window("CosineAnnealingLR", begin=n // 3, end=n, eta_min=0.01),
    ],
    "sequence": lambda o, n: [
        torch_lr.SequentialLR(
            o, [torch_lr.LinearLR(o, 0.1, 1, n // 4), torch_lr.CosineAnnealingLR(o, n - n // 4)], [n // 4]
        )
    ],
    "momentum": lambda o, n: [window("PolyLR", end=n), window("LinearMomentum", start_factor=0.5, end=n)],
    "betas": lambda o, n: [window("LinearMomentum", start_factor=0.5, end=n)],
    "cosine": lambda o, n: [torch_lr.CosineAnnealingLR(o, n)],
    "minimum": lambda o, n: [torch_lr.CosineAnnealingLR(o, n, eta_min=0.01)],
    "warm-up": lambda o, n: [torch_lr.LinearLR(o, 0.1, total_iters=n // 2)],
    "linear": lambda o, n: [torch_lr.LinearLR(o, 1.0, 0.0, n)],
    "poly": lambda o, n: [torch_lr.PolynomialLR(o, n)],
    "as long": lambda o, n: [torch_lr.PolynomialLR(o, SHORT * PER_EPOCH)],
    "one cycle": lambda o, n: [torch_lr.OneCycleLR(o, 0.5, n)],
    "too short a cycle": lambda o, n: [torch_lr.OneCycleLR(o, 0.5, SHORT * PER_EPOCH)],
    "cyclic": lambda o, n: [torch_lr.CyclicLR(o, 0.01, 0.1, step_size_up=n // 3)],
    "lambda": lambda o, n: [torch_lr.LambdaLR(o, lambda step: 0.9**step), torch_lr.StepLR(o, n // 3)],
    "two": lambda o, n: [torch_lr.LinearLR(o, 0.1, total_iters=6), torch_lr.ExponentialLR(o, 0.9)],
    "chain": lambda o, n: [
        torch_lr.ChainedScheduler([torch_lr.LinearLR(o, 0.1, 1, 2), torch_lr.PolynomialLR(o, n)])
    ],
    "epochs and iterations": lambda o, n: [
        {"type": "PolyLR", "end": n // PER_EPOCH, "eta_min": 0.02},
        window("CosineAnnealingLR", end=n, eta_min=0.01),
    ],
    "another unit": lambda o, n: [
        {"type": "PolyLR", "end": SHORT} if n == SHORT * PER_EPOCH else window("PolyLR", end=n)
    ],
    "own": lambda o, n: [OwnDecay(o, n)],
    "plateau": lambda o, n: [
        torch_lr.LinearLR(o, 0.1, total_iters=2),
        torch_lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1e9),
    ],
    "mmcv by epoch": lambda o, n: [],
    "mmcv by iteration": lambda o, n: [],
}
"""Schedulers by the number of iterations."""
HOOKS: dict[str, Callable[[], list[Any]]] = {
    "mmcv by epoch": lambda: [StepLrUpdaterHook(2, warmup="linear", warmup_iters=6)],
    "mmcv by iteration": lambda: [CosineAnnealingLrUpdaterHook(min_lr=0.01, by_epoch=False)],
}


# --- a longer run ------------------------------------------------------------------------------------------

LENGTHENED = [
    "another unit",
    "windows",
    "momentum",
    "cosine",
    "linear",
    "poly",
    "one cycle",
    "cyclic",
    "lambda",
    "sequence",
    "chain",
    "epochs and iterations",
    "own",
]


@pytest.mark.representative(3)
@pytest.mark.parametrize("after", [SHORT * PER_EPOCH, SHORT * PER_EPOCH - 2], ids=["end", "mid-epoch"])
@pytest.mark.parametrize("kind", LENGTHENED)
def test_apply_goes_on_where_the_longer_run_is(build: Build, kind: str, after: int) -> None:
    """With "apply" all values are bitwise those of a run that had the new arguments from its first
    iteration."""
    stopped(build(kind, SHORT), after)
    whole, longer = build(kind, LONG, "whole"), build(kind, LONG)
    expected = values(whole)

    longer.resume(changed="apply")

    assert values(longer) == expected[after:]
    assert [s.state_dict() for s in longer.schedulers] == [s.state_dict() for s in whole.schedulers]


def test_what_cannot_be_computed_goes_on_from_there(
    build: Build, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a user's function fails, the rate is scaled instead, and the log has the error."""
    gone = threading.Event()

    def half(step: int) -> float:
        if gone.is_set():
            raise RuntimeError("it is gone")
        return 0.5

    kind = lambda o, n: [torch_lr.MultiplicativeLR(o, half), torch_lr.StepLR(o, n)]
    monkeypatch.setitem(KINDS, "fails", kind)
    short = build("fails", SHORT)
    short.train()
    longer = build("fails", LONG, lr=4 * BUILT)
    gone.set()

    longer.resume(changed="apply")

    rate = short.optimizer.param_groups[0]["lr"]
    assert longer.optimizer.param_groups[0]["lr"] == pytest.approx(4 * rate)
    assert "the schedules continue from the current rate: RuntimeError('it is gone')" in caplog.text


@pytest.mark.parametrize("lr", [BUILT, torch.tensor(BUILT)], ids=["float", "tensor"])
def test_apply_tells_where_the_rate_goes_on(build: Build, caplog: pytest.LogCaptureFixture, lr: Any) -> None:
    """The log has both rates; a rate in a tensor stays a tensor."""
    build("poly", SHORT, lr=copy.deepcopy(lr)).train()
    longer = build("poly", LONG, lr=copy.deepcopy(lr))

    longer.resume(changed="apply")

    rate = longer.optimizer.param_groups[0]["lr"]
    assert float(rate) == pytest.approx(0.05)
    assert type(rate) is type(lr)
    assert "lr of param group 0: 0.0 by the checkpoint's schedules, 0.0" in caplog.text
    assert "the learning rate is 0" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "epochs", "changed", "warned"),
    [("linear", LONG, "keep", 1), ("as long", LONG, "refuse", 1), ("cosine", SHORT, "refuse", 0)],
)
def test_a_rate_of_0_is_logged(
    build: Build, caplog: pytest.LogCaptureFixture, kind: str, epochs: int, changed: Any, warned: int
) -> None:
    """A warning says that the rate is 0, unless the run is complete."""
    build(kind, SHORT).train()
    caplog.clear()

    build(kind, epochs).resume(changed=changed)

    told = [line for line in caplog.messages if "the learning rate is 0" in line]
    assert len(told) == warned
    assert all(
        "unless its schedules raise it again, the rest of the run trains nothing" in each for each in told
    )


@pytest.mark.representative(2)
@pytest.mark.parametrize("changed", ["keep", "apply", "refuse"])
def test_a_cycle_that_is_too_short_is_refused(build: Build, changed: Any) -> None:
    """A longer run with a OneCycleLR that ends earlier is refused; a run that was always longer is not."""
    build("one cycle", SHORT).train()
    longer = build("one cycle" if changed == "keep" else "too short a cycle", LONG)

    with pytest.raises(
        CheckpointError, match=r"nothing was loaded: a OneCycleLR of total_steps=6 .* run has 12"
    ):
        longer.resume(changed=changed)

    assert longer.iter == 0
    stopped(build("too short a cycle", LONG, "other"), 3)
    second = build("too short a cycle", LONG, "other")
    second.resume()
    assert second.iter == 3


# --- an edited rate ----------------------------------------------------------------------------------------


def writes(*keys: str, value: Any = EDITED) -> Edit:
    """Return a function that writes these entries of the first param group."""

    def write(optimizer: Any) -> None:
        for key in keys:
            optimizer.param_groups[0][key] = value

    return write


RATE, BOTH, INITIAL = writes("lr"), writes("lr", "initial_lr"), writes("initial_lr")
EDITS: list[tuple[str, dict[str, Edit]]] = [
    ("windows", {"early": RATE}),
    ("sequence", {"edit": RATE}),
    *(
        (kind, {"edit": RATE})
        for kind in (
            "windows",
            "minimum",
            "chain",
            "two",
            "lambda",
            "epochs and iterations",
            "mmcv by epoch",
            "mmcv by iteration",
        )
    ),
    *(("windows", {"edit": edit}) for edit in (BOTH, INITIAL)),
    ("mmcv by epoch", {"edit": BOTH}),
    *(("sequence", {"early": edit}) for edit in (BOTH, INITIAL)),
]


@pytest.mark.representative(2)
@pytest.mark.parametrize(("kind", "edits"), EDITS)
def test_apply_takes_an_edited_rate_as_the_base(build: Build, kind: str, edits: dict[str, Edit]) -> None:
    """With "apply" the rates are those of a run that was built with the edited base; other groups keep
    theirs."""
    expected = values(build(kind, name="whole", lr=EDITED))
    stopped(build(kind), DONE)
    second = build(kind, **edits)

    second.resume(changed="apply")

    assert values(second) == [pytest.approx(pair) for pair in expected[DONE:]]
    assert [group["initial_lr"] for group in second.optimizer.param_groups] == [EDITED, 2 * BUILT]


@pytest.mark.parametrize(("kind", "key"), [("momentum", "momentum"), ("betas", "betas")])
def test_a_momentum_that_a_schedule_moves(build: Build, kind: str, key: str) -> None:
    """An edited momentum is the new base of its warm-up, also in `betas`."""
    edit = writes(key, value=(0.6, 0.99) if key == "betas" else 0.6)
    stopped(build(kind), DONE)
    second = build(kind, edit=edit)

    second.resume(changed="apply")

    momenta = [momentum for _, momentum in values(second)]
    assert momenta == pytest.approx([0.6 * (0.5 + 0.5 * i / 11) for i in range(DONE, LONG * PER_EPOCH)])
    assert key != "betas" or second.optimizer.param_groups[0]["betas"][1] == 0.99


@pytest.mark.parametrize("kind", ["sequence", "windows"])
def test_keep_and_refuse_see_the_edit(build: Build, kind: str) -> None:
    """An edited rate is refused by default, and "keep" continues with the checkpoint's base."""
    expected = values(build(kind, name="whole"))
    stopped(build(kind), DONE)
    second = build(kind, edit=RATE)

    with pytest.raises(
        CheckpointError, match=r"lr of param group 0: 0\.1 in the checkpoint, 0\.05 in this trainer"
    ):
        second.resume()
    second.resume(changed="keep")

    assert values(second) == [pytest.approx(pair) for pair in expected[DONE:]]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("warm-up", "its schedules make it 0.035 at iteration 4 (epoch 1)"),
        ("windows", "its schedules make it 0.05 at iteration 4 (epoch 1)"),
        ("mmcv by epoch", "StepLrUpdaterHook sets the value from it at iteration 4 (epoch 1)"),
    ],
)
def test_one_line_says_base_rate_and_step(
    build: Build, caplog: pytest.LogCaptureFixture, kind: str, how: str
) -> None:
    """The log has one line with both bases, the scheduled rate and its step."""
    stopped(build(kind), DONE)
    second = build(kind, edit=BOTH)
    second.resume(changed="apply")
    second.train()

    (warned,) = [message for message in caplog.messages if "lr" in message.lower()]
    assert (
        "lr of param group 0: 0.1 in the checkpoint, 0.05 in this trainer; the run continues with" in warned
    )
    assert warned.endswith(f" 0.05 as the base: {how}")


@pytest.mark.representative(1)
@pytest.mark.parametrize("kind", ["sequence", "windows", "mmcv by epoch"])
def test_the_same_edit_is_no_change(build: Build, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """A script that edits the rate in each of its runs resumes exactly, and nothing is logged."""
    expected = values(build(kind, name="whole", edit=RATE))
    stopped(build(kind, edit=RATE), DONE)
    second = build(kind, edit=RATE)
    caplog.clear()

    second.resume()

    assert not caplog.text
    assert values(second) == expected[DONE:]


def test_what_was_applied_is_what_later_checkpoints_say(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """After "apply" later checkpoints have the new base, so a script built with it resumes without a
    change."""
    expected = values(build("warm-up", name="whole", lr=EDITED))
    stopped(build("warm-up"), DONE)
    second = build("warm-up", edit=RATE)
    second.resume(changed="apply")
    stopped(second, 6)
    third = build("warm-up", lr=EDITED)
    caplog.clear()

    third.resume()

    assert not caplog.text
    assert values(third) == [pytest.approx(pair) for pair in expected[6:]]


# --- rates that are left alone -----------------------------------------------------------------------------


@pytest.mark.representative(1)
@pytest.mark.parametrize("kind", ["cosine", "windows", "momentum"])
def test_a_resume_without_changes_touches_no_rate(build: Build, kind: str) -> None:
    """Without changes "apply" leaves all rates bitwise as they are."""
    expected = values(build(kind, name="whole"))
    stopped(build(kind), DONE)
    second = build(kind)

    second.resume(changed="apply")

    assert values(second) == expected[DONE:]


def test_a_rate_that_a_handler_moved_is_left_to_it(build: Build) -> None:
    """A changed weight decay does not recompute a rate that a handler has moved."""

    def halve(trainer: Trainer, event: Any) -> None:
        trainer.optimizer.param_groups[0]["lr"] *= 0.5

    first = build("cosine")
    first.bus.subscribe(halve, "before_train_iter", once=True)
    rate = stopped(first, 2).optimizer.param_groups[0]["lr"]
    second = build("cosine")
    second.optimizer.param_groups[0]["weight_decay"] = 0.01

    second.resume(changed="apply")

    assert second.optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize("changes", [{"edit": RATE}, {"lr": EDITED}], ids=["edited", "built"])
def test_a_rate_that_a_plateau_reduced_is_kept_in_proportion(build: Build, changes: dict[str, Any]) -> None:
    """A schedule that follows a metric is not recomputed: its reductions are applied to the new base."""
    stopped(build("plateau", val_loader=batches(1)), 7)
    second = build("plateau", val_loader=batches(1), **changes)

    second.resume(changed="apply")

    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(EDITED / 4)
    assert second.schedulers[0].base_lrs == [EDITED, 2 * BUILT]


# --- runs that are done ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "length", "warned"),
    [("epochs", 2, "max_epochs=2, and 2 are"), ("iters", 4, "max_iters=4, and 4 are")],
)
def test_a_run_that_is_done(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture, unit: str, length: int, warned: str
) -> None:
    """A complete run that is resumed trains nothing, and one warning says so."""
    options: dict[str, Any] = {f"max_{unit}": length}
    with caplog.at_level(logging.WARNING, "eventloop"):
        make_trainer(hooks=[CheckpointHook(interval=1)], **options).train()
    assert "nothing is left" not in caplog.text
    second = make_trainer(hooks=[CheckpointHook(interval=1)], **options)
    second.resume()
    trained = collect(second, "before_train_iter")

    with caplog.at_level(logging.WARNING, "eventloop"):
        second.train()

    assert trained == []
    (told,) = [line for line in caplog.messages if "nothing is left" in line]
    assert told.startswith(f"nothing is left to train: {warned} done; build the Trainer with more")


def test_a_run_whose_validation_is_left(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run whose last validation is missing makes it, and the warning says that nothing else is left."""
    make_trainer(max_epochs=1, val_loader=batches(1), hooks=[CheckpointHook(1, save_last=False)]).train()
    second = make_trainer(max_epochs=1, val_loader=batches(1))
    second.resume()
    validated = collect(second, "after_val")

    second.train()

    assert len(validated) == 1
    (told,) = [line for line in caplog.messages if "nothing is left" in line]
    assert "max_epochs=1, and 1 are done, and only the evaluation after them is missing" in told
