"""A lean step: PyTorch's `step()` without what does nothing; the state after it is PyTorch's to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as torch_lr

from eventloop.optim.lean_step import stepper, steps_plainly

Schedule = Callable[[Any], Any]
PLAIN: dict[str, Schedule] = {
    "StepLR": lambda o: torch_lr.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: torch_lr.MultiStepLR(o, [2, 5, 5]),
    "ConstantLR": lambda o: torch_lr.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: torch_lr.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: torch_lr.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: torch_lr.CosineAnnealingLR(o, 4),
    "PolynomialLR": lambda o: torch_lr.PolynomialLR(o, 8, 0.9),
    "LambdaLR": lambda o: torch_lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: torch_lr.MultiplicativeLR(o, lambda step: 0.9),
    "OneCycleLR": lambda o: torch_lr.OneCycleLR(o, 2.0, 12),
    "CyclicLR": lambda o: torch_lr.CyclicLR(o, 0.1, 1.0, 3),
}
OWN_STEP: dict[str, Schedule] = {
    "CosineAnnealingWarmRestarts": lambda o: torch_lr.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: torch_lr.SequentialLR(
        o, [torch_lr.LinearLR(o, 0.25, total_iters=4), torch_lr.CosineAnnealingLR(o, T_max=8)], [4]
    ),
    "ChainedScheduler": lambda o: torch_lr.ChainedScheduler([torch_lr.StepLR(o, 2)]),
}


def sgd(lr: float | torch.Tensor = 1.0) -> SGD:
    """An optimizer of two groups with rates of their own, and a momentum."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (lr, lr / 2)]
    return SGD(groups, momentum=0.5)


def state(scheduler: Any) -> dict[str, Any]:
    """All of a scheduler but its optimizer and its functions, and all the numbers of its groups."""
    own = {k: v for k, v in vars(scheduler).items() if k != "optimizer" and not callable(v)}
    own.pop("lr_lambdas", None)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in scheduler.optimizer.param_groups]
    return {"own": own, "groups": groups}


@pytest.mark.parametrize("name", PLAIN)
def test_the_state_is_that_of_pytorchs_step(name: str) -> None:
    """After every step, of the scheduler and of both groups, where somebody else moves the rate too."""
    theirs, ours = PLAIN[name](sgd()), PLAIN[name](sgd())
    step = stepper(ours)
    assert steps_plainly(ours)

    for _ in range(11):
        for scheduler in (theirs, ours):
            scheduler.optimizer.step()
            scheduler.optimizer.param_groups[0]["lr"] *= 0.9
        theirs.step()
        step()
        assert state(ours) == state(theirs)


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("name", OWN_STEP)
def test_a_scheduler_with_a_step_of_its_own_is_stepped_by_it(name: str) -> None:
    """PyTorch's that override it: nothing is known of what their `step` does."""
    scheduler = OWN_STEP[name](sgd())

    assert not steps_plainly(scheduler)
    assert stepper(scheduler) == scheduler.step


def test_a_patched_step_is_called() -> None:
    """A scheduler whose `step` was replaced on the object, as wrappers do, is stepped by that."""
    called = []
    scheduler = torch_lr.StepLR(sgd(), 1)
    scheduler.step = lambda epoch=None: called.append(epoch)  # type: ignore[method-assign]

    stepper(scheduler)()

    assert called == [None]


def test_what_is_no_scheduler_of_pytorchs_is_stepped_by_its_step() -> None:
    """Anything with a `step()` may be among a trainer's schedulers."""

    class Own:
        steps = 0

        def step(self) -> None:
            self.steps += 1

    scheduler = Own()
    stepper(scheduler)()

    assert scheduler.steps == 1


@pytest.mark.parametrize("name", ["LinearLR", "StepLR", "ExponentialLR"])
def test_a_rate_that_is_a_tensor_is_filled(name: str) -> None:
    """As PyTorch does for compiled optimizers: the same tensor all the time, of which `get_last_lr()` is an alias in the
    releases whose own step makes it one."""
    theirs, ours = PLAIN[name](sgd(torch.tensor(1.0))), PLAIN[name](sgd(torch.tensor(1.0)))
    rate = ours.optimizer.param_groups[0]["lr"]
    step = stepper(ours)

    for _ in range(4):
        theirs.optimizer.step()
        ours.optimizer.step()
        theirs.step()
        step()

    assert ours.optimizer.param_groups[0]["lr"] is rate
    alias = theirs.get_last_lr()[0] is theirs.optimizer.param_groups[0]["lr"]
    assert (ours.get_last_lr()[0] is rate) == alias
    assert rate == theirs.optimizer.param_groups[0]["lr"] == ours.get_last_lr()[0]


def test_a_rate_that_becomes_a_tensor_later_is_filled() -> None:
    """What a group holds is looked at in every step."""
    scheduler = torch_lr.StepLR(sgd(), 1, 0.5)
    step = stepper(scheduler)
    scheduler.optimizer.step()
    step()
    scheduler.optimizer.param_groups[1]["lr"] = rate = torch.tensor(1.0)

    step()

    assert rate.item() == 0.5
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.25


def test_pytorchs_warning_of_the_wrong_order_is_kept() -> None:
    """The first step is PyTorch's own, which looks whether the optimizer has stepped."""
    step = stepper(torch_lr.StepLR(sgd(), 1))

    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        step()


def test_groups_that_were_added_later_are_pytorchs_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that knows of fewer groups than there are is stepped by PyTorch's own step, whatever that does."""
    scheduler = torch_lr.StepLR(sgd(), 1)
    step, called = stepper(scheduler), list[object]()
    scheduler.optimizer.step()
    step()
    scheduler.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0})
    monkeypatch.setattr(torch_lr.LRScheduler, "step", lambda self: called.append(self))

    step()

    assert called == [scheduler]


def test_values_that_are_no_list_are_taken() -> None:
    """A `get_lr` may return an iterator; `get_last_lr()` is a list all the same."""

    class Own(torch_lr.LRScheduler):
        def get_lr(self) -> Any:
            return (rate * 0.5 for rate in self.base_lrs)

    scheduler = Own(sgd())
    step = stepper(scheduler)
    for _ in range(3):
        scheduler.optimizer.step()
        step()

    assert scheduler.get_last_lr() == [0.5, 0.25]


@pytest.mark.parametrize("count", [1, 3])
def test_one_value_a_group(count: int) -> None:
    """A `get_lr` that returns fewer or more is an error, and no group is half written."""

    class Own(torch_lr.LRScheduler):
        count = 2

        def get_lr(self) -> list[Any]:
            return [0.25] * self.count

    scheduler = Own(sgd())
    step = stepper(scheduler)
    scheduler.optimizer.step()
    step()
    scheduler.count = count
    scheduler.optimizer.param_groups[0]["lr"] = 1.0

    expected = rf"Own.get_lr\(\) must return one value .*2, got {count}"
    with pytest.raises(ValueError, match=expected):
        step()
    assert not scheduler._get_lr_called_within_step
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == [1.0, 0.25]
