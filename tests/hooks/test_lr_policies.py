"""mmcv's learning rate policies, against mmcv's formulas written out, and against PyTorch's schedulers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import cos, pi
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as torch_lr

from eventloop import Trainer
from eventloop.hooks import (
    CosineAnnealingLrUpdaterHook,
    CosineRestartLrUpdaterHook,
    CyclicLrUpdaterHook,
    ExpLrUpdaterHook,
    FixedLrUpdaterHook,
    FlatCosineAnnealingLrUpdaterHook,
    Hook,
    InvLrUpdaterHook,
    LinearAnnealingLrUpdaterHook,
    LrUpdaterHook,
    OneCycleLrUpdaterHook,
    PolyLrUpdaterHook,
    StepLrUpdaterHook,
)

MakeTrainer = Callable[..., Trainer]
BASE, RUN = 2.0, 12


class Rates(Hook):
    """Writes down the rate of the first param group at each step."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def before_optimizer_step(self, trainer: Trainer, event: Any) -> None:
        """Read it."""
        self.used.append(trainer.optimizer.param_groups[0]["lr"])


@pytest.fixture
def rates(make_trainer: MakeTrainer) -> Callable[..., list[float]]:
    """The rates of 12 iterations (of so many epochs of one), and the one after the run."""

    def train(hook: LrUpdaterHook) -> list[float]:
        recorder, model = Rates(), torch.nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=BASE)
        length = (
            {"batches": 1, "max_epochs": RUN} if hook.by_epoch else {"batches": 4, "max_epochs": RUN // 4}
        )
        make_trainer(model=model, optimizer=optimizer, hooks=[hook, recorder], **length).train()
        return [*recorder.used, optimizer.param_groups[0]["lr"]]

    return train


def cosine(start: float, end: float, factor: float, weight: float = 1.0) -> float:
    """mmcv's annealing_cos."""
    return end + 0.5 * weight * (start - end) * (cos(pi * factor) + 1)


def mmcv_step(progress: int, steps: int | list[int], gamma: float) -> float:
    """mmcv's exponent, with its loop."""
    if isinstance(steps, int):
        return BASE * gamma ** (progress // steps)
    exponent = len(steps)
    for i, step in enumerate(steps):
        if progress < step:
            exponent = i
            break
    return BASE * gamma**exponent


def mmcv_restart(progress: int) -> float:
    """mmcv's CosineRestart of the periods 5 and 7, by the weights 1 and 0.5, down to 0.1."""
    cumulative, periods, weights = [5, 12], [5, 7], [1, 0.5]
    index = 0 if progress < 5 else 1
    nearest = 0 if index == 0 else cumulative[index - 1]
    return cosine(BASE, 0.1, min((progress - nearest) / periods[index], 1), weights[index])


def mmcv_cyclic(progress: int) -> float:
    """mmcv's Cyclic of 2 cycles with a peak of 10, an end of 1e-4, up for 0.4 of 6 iterations, gamma 0.5."""
    at, scale = progress % 6, 0.5 ** (progress // 6)
    if at < 2:
        return cosine(BASE, BASE * (1 - scale + 10 * scale), at / 2)
    return cosine(BASE * (1 - scale + 10 * scale), BASE * 1e-4, (at - 2) / 4)


def mmcv_flat(progress: int) -> float:
    """mmcv's FlatCosineAnnealing with its default start."""
    start = round(RUN * 0.75)
    return BASE if progress < start else cosine(BASE, 0.2, (progress - start) / (RUN - start))


POLICIES: dict[str, tuple[Callable[[bool], LrUpdaterHook], Callable[[int], float]]] = {
    "fixed": (lambda e: FixedLrUpdaterHook(by_epoch=e), lambda p: BASE),
    "step": (lambda e: StepLrUpdaterHook(5, by_epoch=e), lambda p: mmcv_step(p, 5, 0.1)),
    "steps": (lambda e: StepLrUpdaterHook([2, 9], 0.5, by_epoch=e), lambda p: mmcv_step(p, [2, 9], 0.5)),
    "clipped step": (
        lambda e: StepLrUpdaterHook([2, 9], min_lr=0.05, by_epoch=e),
        lambda p: max(mmcv_step(p, [2, 9], 0.1), 0.05),
    ),
    "exp": (lambda e: ExpLrUpdaterHook(0.9, by_epoch=e), lambda p: BASE * 0.9**p),
    "inv": (lambda e: InvLrUpdaterHook(0.5, 2, by_epoch=e), lambda p: BASE * (1 + 0.5 * p) ** -2),
    "poly": (
        lambda e: PolyLrUpdaterHook(0.9, 0.2, by_epoch=e),
        lambda p: (BASE - 0.2) * (1 - p / RUN) ** 0.9 + 0.2,
    ),
    "cosine": (
        lambda e: CosineAnnealingLrUpdaterHook(min_lr=0.2, by_epoch=e),
        lambda p: cosine(BASE, 0.2, p / RUN),
    ),
    "cosine by ratio": (
        lambda e: CosineAnnealingLrUpdaterHook(min_lr_ratio=0.2, by_epoch=e),
        lambda p: cosine(BASE, BASE * 0.2, p / RUN),
    ),
    "flat cosine": (lambda e: FlatCosineAnnealingLrUpdaterHook(min_lr=0.2, by_epoch=e), mmcv_flat),
    "linear": (
        lambda e: LinearAnnealingLrUpdaterHook(min_lr_ratio=0.1, by_epoch=e),
        lambda p: BASE + (0.1 * BASE - BASE) * p / RUN,
    ),
    "restart": (lambda e: CosineRestartLrUpdaterHook([5, 7], [1, 0.5], 0.1, by_epoch=e), mmcv_restart),
}


@pytest.mark.representative(12)
@pytest.mark.parametrize("by_epoch", [True, False], ids=["epochs", "iters"])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_equals_mmcvs_formula(rates: Callable[..., list[float]], name: str, by_epoch: bool) -> None:
    """Each iteration, or epoch, is trained with mmcv's rate."""
    make, formula = POLICIES[name]

    used = rates(make(by_epoch))[:RUN]

    assert used == pytest.approx([formula(p) for p in range(RUN)])


def test_cyclic_equals_mmcvs_formula(rates: Callable[..., list[float]]) -> None:
    """Cycles whose peaks shrink, as in mmcv 1.4.4 and later."""
    used = rates(CyclicLrUpdaterHook(cyclic_times=2, gamma=0.5))[:RUN]

    assert used == pytest.approx([mmcv_cyclic(p) for p in range(RUN)])


def test_cyclic_by_lines(rates: Callable[..., list[float]]) -> None:
    """`anneal_strategy="linear"` and a peak alone, whose end is 1e-5 of it."""
    used = rates(CyclicLrUpdaterHook(target_ratio=4.0, step_ratio_up=0.5, anneal_strategy="linear"))

    assert used[:6] == pytest.approx([BASE * (1 + 3 * i / 6) for i in range(6)])
    assert used[6:] == pytest.approx([BASE * (4 + (4e-5 - 4) * i / 6) for i in range(7)])


def test_iterations_after_the_last_cycle_keep_its_end(rates: Callable[..., list[float]]) -> None:
    """12 iterations in 5 cycles of 2: mmcv would begin a sixth."""
    used = rates(CyclicLrUpdaterHook(target_ratio=(4.0, 0.5), cyclic_times=5, step_ratio_up=0.5))

    assert used == pytest.approx([2, 8] * 5 + [1, 1, 1])


# --- PyTorch -------------------------------------------------------------------------------------------------


def torch_rates(schedule: Callable[[SGD], Any], steps: int = RUN) -> list[float]:
    """The rates of a plain PyTorch loop, and the one after it."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE)
    scheduler = schedule(optimizer)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*used, optimizer.param_groups[0]["lr"]]


SAME: dict[str, tuple[Callable[[], LrUpdaterHook], Callable[[SGD], Any]]] = {
    "StepLR": (lambda: StepLrUpdaterHook(5, by_epoch=False), lambda o: torch_lr.StepLR(o, 5)),
    "MultiStepLR": (lambda: StepLrUpdaterHook([2, 9]), lambda o: torch_lr.MultiStepLR(o, [2, 9])),
    "ExponentialLR": (lambda: ExpLrUpdaterHook(0.9), lambda o: torch_lr.ExponentialLR(o, 0.9)),
    "PolynomialLR": (lambda: PolyLrUpdaterHook(2.0), lambda o: torch_lr.PolynomialLR(o, RUN, 2.0)),
    "CosineAnnealingLR": (
        lambda: CosineAnnealingLrUpdaterHook(min_lr=0.1, by_epoch=False),
        lambda o: torch_lr.CosineAnnealingLR(o, RUN, 0.1),
    ),
    "LinearLR": (
        lambda: LinearAnnealingLrUpdaterHook(min_lr_ratio=0.25, by_epoch=False),
        lambda o: torch_lr.LinearLR(o, 1.0, 0.25, RUN),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_policy_equals_pytorchs_scheduler(rates: Callable[..., list[float]], name: str) -> None:
    """In every iteration, and with the last value it has after the run: the end is reached."""
    updater, schedule = SAME[name]
    last = 1 if updater().reaches_end else 0  # a policy without an end keeps the rate of the last iteration

    assert rates(updater())[: RUN + last] == pytest.approx(torch_rates(schedule)[: RUN + last])


@pytest.mark.representative(2)
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("pct_start", [0.0, 0.3, 0.5, 1.0])
def test_one_cycle_equals_pytorchs(
    rates: Callable[..., list[float]], strategy: Any, three_phase: bool, pct_start: float
) -> None:
    """Both forms, both strategies, every rise."""
    hook = OneCycleLrUpdaterHook(3.0, None, pct_start, strategy, 10.0, 100.0, three_phase)
    expected = torch_rates(
        lambda o: torch_lr.OneCycleLR(
            o,
            3.0,
            RUN,
            pct_start=pct_start,
            anneal_strategy=strategy,
            div_factor=10.0,
            final_div_factor=100.0,
            three_phase=three_phase,
            cycle_momentum=False,
        ),
        RUN - 1,
    )

    assert rates(hook)[:RUN] == pytest.approx(expected)


def test_one_cycle_longer_than_the_run(rates: Callable[..., list[float]]) -> None:
    """`total_steps` beyond the run leaves the rate on its way."""
    used = rates(OneCycleLrUpdaterHook(3.0, total_steps=100))
    expected = torch_rates(lambda o: torch_lr.OneCycleLR(o, 3.0, 100, cycle_momentum=False))

    assert used == pytest.approx(expected)


def test_one_cycle_of_several_groups_and_optimizers(make_trainer: MakeTrainer) -> None:
    """`max_lr` by the optimizer's name, and by group."""
    model = torch.nn.Linear(2, 1)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [torch.nn.Parameter(torch.zeros(1))]},
    ]
    optimizer = {
        "weight": SGD(groups, lr=1.0),
        "bias": SGD([model.bias], lr=1.0),
    }
    hook = OneCycleLrUpdaterHook({"weight": [1.0, 2.0], "bias": 3.0})

    make_trainer(model=model, optimizer=optimizer, hooks=[hook])

    assert [g["initial_lr"] for o in optimizer.values() for g in o.param_groups] == [0.04, 0.08, 0.12]


# --- the end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "end"),
    [
        (PolyLrUpdaterHook(0.9, 0.125), 0.125),
        (CosineAnnealingLrUpdaterHook(min_lr_ratio=0.125), 0.25),
        (LinearAnnealingLrUpdaterHook(min_lr=0.125), 0.125),
        (FlatCosineAnnealingLrUpdaterHook(0.5, min_lr=0.125), 0.125),
        (CosineRestartLrUpdaterHook([4, 8], [1, 1], 0.125), 0.125),
        (CyclicLrUpdaterHook(target_ratio=(4, 0.125), cyclic_times=3), 0.25),
        (OneCycleLrUpdaterHook(4.0, div_factor=4, final_div_factor=8), 0.125),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LrUpdaterHook) else "",
)
def test_completed_run_ends_at_the_minimum(
    rates: Callable[..., list[float]], hook: LrUpdaterHook, end: float
) -> None:
    """mmcv's rate stays one step short of it."""
    assert rates(hook)[-1] == end


def test_stopped_run_keeps_its_rate(make_trainer: MakeTrainer) -> None:
    """What is set at the end is for a run that was completed."""
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=BASE)
    hook = CosineAnnealingLrUpdaterHook(min_lr=0.0, by_epoch=False)
    trainer = make_trainer(model=model, optimizer=optimizer, hooks=[hook])
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"), "after_train_iter", once=True, name="s"
    )

    trainer.train()

    assert optimizer.param_groups[0]["lr"] == BASE


def test_flat_start_of_all_epochs_has_no_slope(rates: Callable[..., list[float]]) -> None:
    """Where rounding leaves no epoch for the cosine, the rate is flat, and ends at the minimum."""
    used = rates(FlatCosineAnnealingLrUpdaterHook(0.99, min_lr=0.5))

    assert used == [BASE] * RUN + [0.5]


def test_one_cycle_with_a_rise_of_one_step(rates: Callable[..., list[float]]) -> None:
    """PyTorch divides by zero there; the only step of the rise is at its end."""
    used = rates(OneCycleLrUpdaterHook(3.0, pct_start=1 / RUN))

    assert used[0] == pytest.approx(3.0)


# --- what is refused -----------------------------------------------------------------------------------------

ONE_MINIMUM = [CosineAnnealingLrUpdaterHook, LinearAnnealingLrUpdaterHook, FlatCosineAnnealingLrUpdaterHook]


def untyped(value: object) -> Any:
    """What a type checker would have refused already."""
    return value


@pytest.mark.parametrize("policy", ONE_MINIMUM)
def test_exactly_one_minimum(policy: Any) -> None:
    """Both or neither are refused, and what is below 0."""
    with pytest.raises(ValueError, match="exactly one of min_lr and min_lr_ratio, got neither"):
        policy()
    with pytest.raises(ValueError, match=r"got both \(min_lr=0.1, min_lr_ratio=0.2\)"):
        policy(min_lr=0.1, min_lr_ratio=0.2)
    with pytest.raises(ValueError, match="min_lr_ratio must be at least 0, got -1"):
        policy(min_lr_ratio=-1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: StepLrUpdaterHook(0), ValueError, "step must be at least 1, got 0"),
        (
            lambda: StepLrUpdaterHook(untyped("a")),
            TypeError,
            "step must be an int or a list of ints, got 'a'",
        ),
        (lambda: StepLrUpdaterHook([]), TypeError, r"step must be an int or a list of ints, got \[\]"),
        (lambda: StepLrUpdaterHook([2, 0]), ValueError, "each step must be at least 1, got 0"),
        (lambda: StepLrUpdaterHook(untyped([2, 3.0])), TypeError, "each step must be an int, got 3.0"),
        (lambda: StepLrUpdaterHook([3, 2]), ValueError, r"step must be a rising list .*got \[3, 2\]"),
        (lambda: StepLrUpdaterHook(3, gamma=0), ValueError, "gamma must be above 0, got 0"),
        (lambda: StepLrUpdaterHook(3, min_lr=-1), ValueError, "min_lr must be at least 0, got -1"),
        (lambda: ExpLrUpdaterHook(-0.5), ValueError, "gamma must be above 0, got -0.5"),
        (lambda: InvLrUpdaterHook(0), ValueError, "gamma must be above 0, got 0"),
        (lambda: InvLrUpdaterHook(1, power=0), ValueError, "power must be above 0, got 0"),
        (lambda: PolyLrUpdaterHook(0), ValueError, "power must be above 0, got 0"),
        (lambda: PolyLrUpdaterHook(min_lr=untyped("a")), TypeError, "min_lr must be a number, got 'a'"),
        (
            lambda: FlatCosineAnnealingLrUpdaterHook(1, min_lr=0),
            TypeError,
            r"start_percent must be a float in \[0, 1\), got 1",
        ),
        (
            lambda: FlatCosineAnnealingLrUpdaterHook(1.0, min_lr=0),
            ValueError,
            "start_percent must be at least 0 and below 1, got 1.0",
        ),
        (
            lambda: CosineRestartLrUpdaterHook(untyped(5), min_lr=0),
            TypeError,
            "periods must be a list of ints, got 5",
        ),
        (
            lambda: CosineRestartLrUpdaterHook([0], min_lr=0),
            ValueError,
            "each of periods must be at least 1, got 0",
        ),
        (
            lambda: CosineRestartLrUpdaterHook([2, 3], min_lr=0),
            ValueError,
            "restart_weights must .* 2 periods, got 1",
        ),
        (
            lambda: CyclicLrUpdaterHook(by_epoch=True),
            ValueError,
            "CyclicLrUpdaterHook counts iterations, got by_epoch=True",
        ),
        (
            lambda: CyclicLrUpdaterHook(target_ratio=untyped("a")),
            TypeError,
            "target_ratio must be a number, got 'a'",
        ),
        (
            lambda: CyclicLrUpdaterHook(target_ratio=(1.0, 2.0, 3.0)),
            ValueError,
            r"target_ratio must be a number, \(peak,\) or \(peak, end\)",
        ),
        (
            lambda: CyclicLrUpdaterHook(target_ratio=(1.0, -2.0)),
            ValueError,
            "target_ratio must be above 0, got -2.0",
        ),
        (lambda: CyclicLrUpdaterHook(cyclic_times=0), ValueError, "cyclic_times must be at least 1, got 0"),
        (
            lambda: CyclicLrUpdaterHook(step_ratio_up=1.0),
            ValueError,
            "step_ratio_up must be at least 0 and below 1, got 1.0",
        ),
        (lambda: CyclicLrUpdaterHook(gamma=1.5), ValueError, "gamma must be above 0 and at most 1, got 1.5"),
        (
            lambda: CyclicLrUpdaterHook(anneal_strategy="exp"),
            ValueError,
            "anneal_strategy must be 'cos' or 'linear', got 'exp'",
        ),
        (lambda: OneCycleLrUpdaterHook(untyped("a")), TypeError, "max_lr must be a number, got 'a'"),
        (lambda: OneCycleLrUpdaterHook([1.0, 0.0]), ValueError, "max_lr must be above 0, got 0.0"),
        (lambda: OneCycleLrUpdaterHook({"a": -1.0}), ValueError, "max_lr must be above 0, got -1.0"),
        (
            lambda: OneCycleLrUpdaterHook(1.0, total_steps=untyped(2.5)),
            TypeError,
            "total_steps must be an int, got 2.5",
        ),
        (
            lambda: OneCycleLrUpdaterHook(1.0, pct_start=1),
            TypeError,
            "pct_start must be a float between 0 and 1, got 1",
        ),
        (
            lambda: OneCycleLrUpdaterHook(1.0, pct_start=1.5),
            ValueError,
            "pct_start must be at least 0 and at most 1, got 1.5",
        ),
        (lambda: OneCycleLrUpdaterHook(1.0, div_factor=0), ValueError, "div_factor must be above 0, got 0"),
        (
            lambda: OneCycleLrUpdaterHook(1.0, by_epoch=True),
            ValueError,
            "OneCycleLrUpdaterHook counts iterations",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    """The constructor says what was expected and what came."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            CosineRestartLrUpdaterHook([2], min_lr=0, by_epoch=False),
            "periods are 2 together, and the run has 4",
        ),
        (CyclicLrUpdaterHook(cyclic_times=5), "cyclic_times=5 .*got 4"),
        (
            OneCycleLrUpdaterHook(1.0, total_steps=3),
            "total_steps=3 is shorter than the run, which has 4 iterations",
        ),
        (
            OneCycleLrUpdaterHook([1.0, 2.0]),
            r"max_lr must be one number, or one for each of the 1 param groups, got \[1.0, 2.0\]",
        ),
        (
            OneCycleLrUpdaterHook({"SDG": 1.0}),
            "max_lr has no value for the optimizer 'SGD': did you mean 'SDG'",
        ),
    ],
    ids=["restart", "cyclic", "one cycle", "groups", "name"],
)
def test_what_does_not_fit_the_run_is_refused(make_trainer: MakeTrainer, hook: Hook, message: str) -> None:
    """When the trainer is built, not when the iteration comes."""
    with pytest.raises(ValueError, match=message):
        make_trainer(hooks=[hook])


def test_policies_are_built_from_configs(make_trainer: MakeTrainer) -> None:
    """A config has the policy's arguments and the base's; a misspelled one gets a suggestion."""
    config = {"type": StepLrUpdaterHook, "step": [2], "warmup": "linear", "warmup_iters": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = make_trainer(hooks=[config])

    assert isinstance(trainer.hooks[-1], StepLrUpdaterHook)
    with pytest.raises(ValueError, match="StepLrUpdaterHook has no argument 'warmup_iter': did you mean"):
        make_trainer(hooks=[{**config, "warmup_iter": 3}])
