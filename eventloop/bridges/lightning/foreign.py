"""Run callbacks of Lightning in our trainer: the adapter that `Foreign` uses for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from eventloop.bridges.host import require
from eventloop.bridges.lightning.methods import WITHOUT_EVENT, base_of, defines, package_of
from eventloop.bridges.lightning.own_trainer import OwnTrainer
from eventloop.bridges.lightning.packages import LEAST, PACKAGES

SYSTEM = "lightning"
REFUSED = {
    "GradientAccumulationScheduler": "hooks=[GradientCumulativeOptimizerHook(cumulative_iters=...)]",
    "LearningRateFinder": "trainer.find_lr()",
    "BatchSizeFinder": "a loop over batch sizes by hand, or Lightning itself",
    "StochasticWeightAveraging": 'hooks=[EMAHook(ema_type="StochasticWeightAverage")]',
    "Checkpoint": "hooks=[CheckpointHook(...)]",
    "BasePredictionWriter": "trainer.predict(loader, to=...)",
    "ThroughputMonitor": "the phases and times in eventloop report",
    "EventLoopCallback": "its hooks and writers in the arguments of this Trainer",
}
"""The callbacks of Lightning that are refused because they act on its loop, with our alternatives."""


def check(callback: Any) -> None:
    """Refuse an object that is not a callback of Lightning, or that would have no effect in our trainer.

    Raises:
        TypeError: the object is not a callback of Lightning.
        ValueError: the callback would have no effect here.
        ImportError: Lightning is too old.
    """
    package, name = package_of(callback), type(callback).__name__
    if not package:
        raise TypeError(
            f"Foreign takes a callback of Lightning, got {name}, which does not derive from Callback"
        )
    for cls in type(callback).__mro__:
        if cls.__name__ in REFUSED:
            raise ValueError(
                f"{name} needs Lightning's own loop, and would have no effect here: use "
                f"{REFUSED[cls.__name__]}"
            )
    for method in WITHOUT_EVENT:
        if defines(callback, method):
            raise ValueError(
                f"{name} defines {method}, which would never be called: no event of this trainer corresponds "
                "to it"
            )
    distribution = next(name for module, name in PACKAGES.items() if module.partition(".")[0] == package)
    require(package, distribution, LEAST, extra="lightning")


def stateful(callback: Any) -> bool:
    """Return whether the callback's class overrides `state_dict`."""
    return type(callback).state_dict is not cast(Any, base_of(callback)).state_dict


def build(trainer: Any, callbacks: Sequence[Any]) -> OwnTrainer:
    """Return a Lightning trainer that never runs, which the callbacks receive in place of our trainer.

    Raises:
        ValueError: the callbacks come from both of Lightning's packages, or need a run of one process.
    """
    if trainer.world_size > 1 and any(
        cls.__name__ == "SpikeDetection" for callback in callbacks for cls in type(callback).__mro__
    ):
        raise ValueError(
            f"SpikeDetection of Lightning needs a run of one process, got one of {trainer.world_size}: each "
            "rank would decide alone, and Lightning decides for all ranks"
        )
    packages = sorted({package_of(callback) for callback in callbacks})
    if len(packages) > 1:
        raise ValueError(
            f"expected callbacks of one package, got some of {' and some of '.join(packages)}: import all "
            "from one of them"
        )
    return OwnTrainer(trainer, callbacks, packages[0])
