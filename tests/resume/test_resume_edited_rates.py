"""A rate edited in the param groups after its schedules were built is the base rate of the resumed run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError
from eventloop.hooks import CosineAnnealingLrUpdaterHook, StepLrUpdaterHook
from tests.support.interrupted import stopped
from tests.support.trainers import MakeTrainer, batches, tiny_model

# SequentialLR of older releases of torch steps its parts in the way that torch itself warns of
pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")

PER_EPOCH, EPOCHS, DONE = 3, 4, 4
ITERS = PER_EPOCH * EPOCHS
BUILT, EDITED = 0.1, 0.05

Build = Callable[..., Trainer]
Edit = Callable[[Any], None]


def edit(*keys: str) -> Edit:
    """Write these entries of the first param group: the rate alone, or the initial rate too, as forums advise."""

    def write(optimizer: Any) -> None:
        for key in keys:
            optimizer.param_groups[0][key] = EDITED

    return write


edit_rate, edit_both, edit_initial = edit("lr"), edit("lr", "initial_lr"), edit("initial_lr")


@pytest.fixture
def build(make_trainer: MakeTrainer, tmp_path: Path) -> Build:
    """Build a trainer of one run; `edit` changes its param groups when everything is built."""

    def make(
        schedulers: Any = lambda o: [], edit: Edit | None = None, early: Edit | None = None, adam: bool = False,
        **options: Any,
    ) -> Trainer:  # fmt: skip
        model = tiny_model()
        parameters = [*model.parameters()]
        groups: list[dict[str, Any]] = [
            {"params": parameters[:1]},
            {"params": parameters[1:], "lr": 2 * BUILT},
        ]
        optimizer: Any = (
            torch.optim.Adam(groups, BUILT) if adam else torch.optim.SGD(groups, BUILT, momentum=0.8)
        )
        made = schedulers(optimizer)
        if early is not None:
            early(optimizer)
        trainer = make_trainer(
            model=model, optimizer=optimizer, schedulers=made, max_epochs=EPOCHS,
            train_loader=batches(PER_EPOCH), work_dir=tmp_path, **options,
        )  # fmt: skip
        if edit is not None:
            edit(optimizer)
        return trainer

    return make


def values(trainer: Trainer, name: str = "lr") -> list[Any]:
    """Train on, and return the value of the first group in each iteration."""
    found: list[Any] = []
    trainer.bus.subscribe(
        lambda trainer, event: found.append(trainer.optimizer.param_groups[0][name]), "before_train_iter"
    )
    trainer.train()
    return found


def line(step: float, length: float, start: float = 0.1) -> float:
    """The factor of a linear warm-up."""
    return start + (1 - start) * min(step / length, 1)


def cosine(step: float, length: float) -> float:
    """The part of the rate above the minimum that is left."""
    return (1 + math.cos(math.pi * step / length)) / 2


Case = tuple[Any, dict[str, Any], Callable[[float, int], float]]
KINDS: dict[str, Case] = {
    "warm-up": (lambda o: [torch_lr.LinearLR(o, 0.1, total_iters=6)], {}, lambda base, i: base * line(i, 6)),
    "minimum": (
        lambda o: [torch_lr.CosineAnnealingLR(o, ITERS, eta_min=0.01)], {},
        lambda base, i: 0.01 + (base - 0.01) * cosine(i, ITERS),
    ),
    "sequence": (
        lambda o: [torch_lr.SequentialLR(o, [torch_lr.LinearLR(o, 0.1, total_iters=6), torch_lr.CosineAnnealingLR(o, 6)], [6])],
        {}, lambda base, i: base * (line(i, 6) if i < 6 else cosine(i - 6, 6)),
    ),
    "chain": (
        lambda o: [torch_lr.ChainedScheduler([torch_lr.ConstantLR(o, 0.1, 6), torch_lr.StepLR(o, 5, 0.5)])], {},
        lambda base, i: base * (0.1 if i < 6 else 1) * 0.5 ** (i // 5),
    ),
    "two": (
        lambda o: [torch_lr.LinearLR(o, 0.1, total_iters=6), torch_lr.ExponentialLR(o, 0.9)], {},
        lambda base, i: base * line(i, 6) * 0.9**i,
    ),
    "lambda": (
        lambda o: [torch_lr.LambdaLR(o, lambda step: 0.25 + step)], {}, lambda base, i: base * (0.25 + i)
    ),
    "one cycle": (
        lambda o: [torch_lr.OneCycleLR(o, 0.5, ITERS + 1, pct_start=0.75, anneal_strategy="linear")], {},
        lambda base, i: base + (0.5 - base) * i / 8.75 if i < 9 else 0.5 + (2e-6 - 0.5) * (i - 8.75) / 3.25,
    ),
    "windows": (
        lambda o: [
            {"type": "CosineAnnealingLR", "begin": 6, "end": ITERS, "T_max": 6, "eta_min": 0.01, "by_epoch": False},
            {"type": "LinearLR", "start_factor": 0.1, "end": 6, "by_epoch": False},
        ],
        {}, lambda base, i: base * line(i, 5) if i < 6 else 0.01 + (base - 0.01) * cosine(i - 6, 6),
    ),
    "window by epoch": (
        lambda o: [{"type": "LinearLR", "start_factor": 0.1, "end": 4}], {},
        lambda base, i: base * line(i // PER_EPOCH, 3),
    ),
    "mmcv by epoch": (
        lambda o: [], {"hooks": lambda: [StepLrUpdaterHook(2, warmup="linear", warmup_iters=6)]},
        lambda base, i: base * 0.1 ** (i // PER_EPOCH // 2) * line(i, 6),
    ),
    "mmcv by iteration": (
        lambda o: [], {"hooks": lambda: [CosineAnnealingLrUpdaterHook(min_lr=0.01, by_epoch=False)]},
        lambda base, i: 0.01 + (base - 0.01) * cosine(i, ITERS),
    ),
}  # fmt: skip


def of(kind: str) -> tuple[Any, dict[str, Any], Callable[[float, int], float]]:
    """The schedulers and the options of a kind, and its closed form."""
    schedulers, options, rate = KINDS[kind]
    return schedulers, {name: make() for name, make in options.items()}, rate


def resumed(build: Build, kind: str, changed: Any, **edits: Edit) -> Trainer:
    """A trainer of a kind that goes on with an edited rate."""
    schedulers, options, _ = of(kind)
    stopped(build(schedulers, **options), DONE)
    schedulers, options, _ = of(kind)
    second = build(schedulers, **edits, **options)
    second.resume(changed=changed)
    return second


@pytest.mark.representative(3)
@pytest.mark.parametrize(
    ("kind", "edits"),
    [
        ("sequence", {"early": edit_rate}),
        *((kind, {"edit": edit_rate}) for kind in KINDS),
        *(("windows", {"edit": edit}) for edit in (edit_both, edit_initial)),
        ("mmcv by epoch", {"edit": edit_both}),
        *(("sequence", {"early": edit}) for edit in (edit_both, edit_initial)),
    ],
)
def test_apply_takes_an_edited_rate_as_the_base(build: Build, kind: str, edits: dict[str, Edit]) -> None:
    """Each rate that follows is the schedule's, of the edited base, whether it was edited before the trainer was built or
    after; the group that was not edited keeps its own."""
    second = resumed(build, kind, "apply", **edits)
    found = values(second)

    schedulers, options, rate = of(kind)
    unedited = build(schedulers, **options).optimizer.param_groups[1]
    assert found == pytest.approx([rate(EDITED, i) for i in range(DONE, ITERS)])
    assert [group["initial_lr"] for group in second.optimizer.param_groups] == [
        EDITED,
        unedited["initial_lr"],
    ]


@pytest.mark.parametrize("kind", ["sequence", "windows"])
def test_keep_and_refuse_see_the_edit(build: Build, kind: str) -> None:
    """The edit is listed as the refused setting, and "keep" goes on with the checkpoint's base."""
    schedulers, _, rate = of(kind)

    with pytest.raises(CheckpointError, match=r"lr of param group 0: 0\.1 in the checkpoint, 0\.05 in this"):
        resumed(build, kind, "refuse", edit=edit_rate)
    second = build(schedulers, edit_rate)
    second.resume(changed="keep")

    assert values(second) == pytest.approx([rate(BUILT, i) for i in range(DONE, ITERS)])


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("warm-up", "its schedules make it 0.035 at iteration 4 (epoch 1)"),
        ("windows", "its schedules make it 0.041 at iteration 4 (epoch 1)"),
        ("mmcv by epoch", "StepLrUpdaterHook sets the value from it at iteration 4 (epoch 1)"),
    ],
)
def test_one_line_says_base_rate_and_step(
    build: Build, caplog: pytest.LogCaptureFixture, kind: str, how: str
) -> None:
    """The log of a whole resumed run has one line on the rate: both bases, the scheduled rate and its step."""
    resumed(build, kind, "apply", edit=edit_both).train()

    (said,) = [message for message in caplog.messages if "lr" in message.lower()]
    assert (
        "lr of param group 0: 0.1 in the checkpoint, 0.05 in this trainer; the run continues with 0.05 as"
        in said
    )
    assert said.endswith(how)


@pytest.mark.parametrize("kind", ["sequence", "windows", "mmcv by epoch"])
def test_the_same_edit_is_no_change(build: Build, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """A script that edits the rate in each of its runs resumes exactly, and logs nothing."""
    found = []
    for _ in range(3):
        schedulers, options, _ = of(kind)
        found.append(build(schedulers, edit_rate, **options))
    whole, first, second = found
    expected = values(whole)
    stopped(first, DONE)
    caplog.clear()

    second.resume(first.work_dir / f"iter_{DONE}")

    assert not caplog.text
    assert values(second) == expected[DONE:]
    if "mmcv" in kind:  # a policy of mmcv begins from the edited rate in the first run too
        assert expected == pytest.approx([KINDS[kind][2](EDITED, i) for i in range(ITERS)])


def test_what_was_applied_is_what_later_checkpoints_say(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """A script whose optimizer is then built with the rate goes on with no change."""
    schedulers, _, rate = of("warm-up")
    stopped(resumed(build, "warm-up", "apply", edit=edit_rate), 6)
    third = build(lambda o: edit_rate(o) or schedulers(o))
    caplog.clear()

    third.resume()

    assert not caplog.text
    assert values(third) == pytest.approx([rate(EDITED, i) for i in range(6, ITERS)])


def test_a_rate_that_a_plateau_reduced_is_kept_in_proportion(build: Build) -> None:
    """A plateau that has halved the rate twice leaves a quarter of the new base."""

    def plateau(optimizer: Any) -> list[Any]:
        return [
            torch_lr.LinearLR(optimizer, 0.1, total_iters=2),
            torch_lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9),
        ]

    stopped(build(plateau, val_loader=batches(1)), 7)
    second = build(plateau, edit_rate, val_loader=batches(1))

    second.resume(changed="apply")

    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(EDITED / 4)
    assert second.schedulers[0].base_lrs == [EDITED, 2 * BUILT]


@pytest.mark.parametrize("adam", [False, True], ids=["momentum", "betas"])
def test_a_momentum_that_a_schedule_moves(build: Build, adam: bool) -> None:
    """The momentum's warm-up begins from an edited base too, in `betas` as well."""
    name = "betas" if adam else "momentum"

    def warm(optimizer: Any) -> list[Any]:
        return [{"type": "LinearMomentum", "start_factor": 0.5, "end": 9, "by_epoch": False}]

    def edit(optimizer: Any) -> None:
        optimizer.param_groups[0][name] = (0.6, 0.99) if adam else 0.6

    stopped(build(warm, adam=adam), DONE)
    second = build(warm, edit, adam=adam)

    second.resume(changed="apply")
    found = values(second, name)

    momenta = [value[0] if adam else value for value in found]
    assert momenta == pytest.approx([0.6 * line(i, 8, 0.5) for i in range(DONE, ITERS)])
    assert not adam or {value[1] for value in found} == {0.99}
