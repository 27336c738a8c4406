"""Run hooks, synchronous subscribers, on the training thread; a file has one hook or one family of hooks.

Start with `hook`, the base class; `iter_timer` is a short example. Hooks may import every package of the
engine except `cli`. They never import `eventloop.writers`; of the engine only `cli` and `bridges` import
hooks.

A hook's module is imported with the first use of its name. So a run imports those that it has, and
not the checkpoint store if it saves none.
"""

import importlib
from typing import TYPE_CHECKING, Any

from eventloop.migration.names import explain_absent

if TYPE_CHECKING:
    from eventloop.hooks.activation_stats import ActivationStats
    from eventloop.hooks.amp import AmpOptimizerHook, Fp16OptimizerHook, GradientCumulativeFp16OptimizerHook
    from eventloop.hooks.async_validation import AsyncValidationHook
    from eventloop.hooks.callback import CallbackHook, ClosureHook
    from eventloop.hooks.check_invalid_loss import CheckInvalidLossHook
    from eventloop.hooks.checkpoint import CheckpointHook
    from eventloop.hooks.costs import CostsHook
    from eventloop.hooks.early_stopping import EarlyStoppingHook
    from eventloop.hooks.ema import EMAHook
    from eventloop.hooks.empty_cache import EmptyCacheHook
    from eventloop.hooks.garbage_collection import GarbageCollectionHook
    from eventloop.hooks.gradient_cumulative import GradientCumulativeOptimizerHook
    from eventloop.hooks.hook import Hook, on
    from eventloop.hooks.iter_timer import IterTimerHook
    from eventloop.hooks.iteration_timer import IterationTimer
    from eventloop.hooks.logger import LoggerHook
    from eventloop.hooks.lr_policies import (
        CosineAnnealingLrUpdaterHook,
        CosineRestartLrUpdaterHook,
        CyclicLrUpdaterHook,
        ExpLrUpdaterHook,
        FixedLrUpdaterHook,
        FlatCosineAnnealingLrUpdaterHook,
        InvLrUpdaterHook,
        LinearAnnealingLrUpdaterHook,
        OneCycleLrUpdaterHook,
        PolyLrUpdaterHook,
        StepLrUpdaterHook,
    )
    from eventloop.hooks.lr_scheduler import LRScheduler
    from eventloop.hooks.lr_updater import LrUpdaterHook
    from eventloop.hooks.memory import MemoryHook
    from eventloop.hooks.momentum_updater import (
        CosineAnnealingMomentumUpdaterHook,
        CyclicMomentumUpdaterHook,
        LinearAnnealingMomentumUpdaterHook,
        MomentumUpdaterHook,
        OneCycleMomentumUpdaterHook,
        StepMomentumUpdaterHook,
    )
    from eventloop.hooks.one_rank import on_rank
    from eventloop.hooks.optimizer import OptimizerHook
    from eventloop.hooks.param_scheduler import ParamSchedulerHook
    from eventloop.hooks.periodic_writer import PeriodicWriter
    from eventloop.hooks.pet_timer import TestHook
    from eventloop.hooks.precise_bn import PreciseBN
    from eventloop.hooks.preemption import PreemptionHook
    from eventloop.hooks.profiler import ProfilerHook
    from eventloop.hooks.rollback import RollbackHook
    from eventloop.hooks.runtime_info import RuntimeInfoHook
    from eventloop.hooks.sampler_seed import DistSamplerSeedHook
    from eventloop.hooks.sync_buffers import SyncBuffersHook
    from eventloop.hooks.throughput import ThroughputHook
    from eventloop.hooks.trace import TraceHook
    from eventloop.hooks.visualization import VisualizationHook
    from eventloop.model.averages import (
        BaseAveragedModel,
        ExponentialMovingAverage,
        MomentumAnnealingEMA,
        StochasticWeightAverage,
    )
    from eventloop.model.batchnorm_statistics import get_bn_modules, update_bn_stats

__all__ = [
    "ActivationStats",
    "AmpOptimizerHook",
    "AsyncValidationHook",
    "BaseAveragedModel",
    "CallbackHook",
    "CheckInvalidLossHook",
    "CheckpointHook",
    "ClosureHook",
    "CosineAnnealingLrUpdaterHook",
    "CosineAnnealingMomentumUpdaterHook",
    "CosineRestartLrUpdaterHook",
    "CostsHook",
    "CyclicLrUpdaterHook",
    "CyclicMomentumUpdaterHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "ExpLrUpdaterHook",
    "ExponentialMovingAverage",
    "FixedLrUpdaterHook",
    "FlatCosineAnnealingLrUpdaterHook",
    "Fp16OptimizerHook",
    "GarbageCollectionHook",
    "GradientCumulativeFp16OptimizerHook",
    "GradientCumulativeOptimizerHook",
    "Hook",
    "InvLrUpdaterHook",
    "IterTimerHook",
    "IterationTimer",
    "LRScheduler",
    "LinearAnnealingLrUpdaterHook",
    "LinearAnnealingMomentumUpdaterHook",
    "LoggerHook",
    "LrUpdaterHook",
    "MemoryHook",
    "MomentumAnnealingEMA",
    "MomentumUpdaterHook",
    "OneCycleLrUpdaterHook",
    "OneCycleMomentumUpdaterHook",
    "OptimizerHook",
    "ParamSchedulerHook",
    "PeriodicWriter",
    "PolyLrUpdaterHook",
    "PreciseBN",
    "PreemptionHook",
    "ProfilerHook",
    "RollbackHook",
    "RuntimeInfoHook",
    "StepLrUpdaterHook",
    "StepMomentumUpdaterHook",
    "StochasticWeightAverage",
    "SyncBuffersHook",
    "TestHook",
    "ThroughputHook",
    "TraceHook",
    "VisualizationHook",
    "get_bn_modules",
    "on",
    "on_rank",
    "update_bn_stats",
]

_ON_FIRST_USE = {
    "ActivationStats": ".activation_stats",
    "AmpOptimizerHook": ".amp",
    "AsyncValidationHook": ".async_validation",
    "BaseAveragedModel": "eventloop.model.averages",
    "CallbackHook": ".callback",
    "CheckInvalidLossHook": ".check_invalid_loss",
    "CheckpointHook": ".checkpoint",
    "ClosureHook": ".callback",
    "CosineAnnealingLrUpdaterHook": ".lr_policies",
    "CosineAnnealingMomentumUpdaterHook": ".momentum_updater",
    "CosineRestartLrUpdaterHook": ".lr_policies",
    "CostsHook": ".costs",
    "CyclicLrUpdaterHook": ".lr_policies",
    "CyclicMomentumUpdaterHook": ".momentum_updater",
    "DistSamplerSeedHook": ".sampler_seed",
    "EMAHook": ".ema",
    "EarlyStoppingHook": ".early_stopping",
    "EmptyCacheHook": ".empty_cache",
    "ExpLrUpdaterHook": ".lr_policies",
    "ExponentialMovingAverage": "eventloop.model.averages",
    "FixedLrUpdaterHook": ".lr_policies",
    "FlatCosineAnnealingLrUpdaterHook": ".lr_policies",
    "Fp16OptimizerHook": ".amp",
    "GarbageCollectionHook": ".garbage_collection",
    "GradientCumulativeFp16OptimizerHook": ".amp",
    "GradientCumulativeOptimizerHook": ".gradient_cumulative",
    "Hook": ".hook",
    "InvLrUpdaterHook": ".lr_policies",
    "IterTimerHook": ".iter_timer",
    "IterationTimer": ".iteration_timer",
    "LRScheduler": ".lr_scheduler",
    "LinearAnnealingLrUpdaterHook": ".lr_policies",
    "LinearAnnealingMomentumUpdaterHook": ".momentum_updater",
    "LoggerHook": ".logger",
    "LrUpdaterHook": ".lr_updater",
    "MemoryHook": ".memory",
    "MomentumAnnealingEMA": "eventloop.model.averages",
    "MomentumUpdaterHook": ".momentum_updater",
    "OneCycleLrUpdaterHook": ".lr_policies",
    "OneCycleMomentumUpdaterHook": ".momentum_updater",
    "OptimizerHook": ".optimizer",
    "ParamSchedulerHook": ".param_scheduler",
    "PeriodicWriter": ".periodic_writer",
    "PolyLrUpdaterHook": ".lr_policies",
    "PreciseBN": ".precise_bn",
    "PreemptionHook": ".preemption",
    "ProfilerHook": ".profiler",
    "RollbackHook": ".rollback",
    "RuntimeInfoHook": ".runtime_info",
    "StepLrUpdaterHook": ".lr_policies",
    "StepMomentumUpdaterHook": ".momentum_updater",
    "StochasticWeightAverage": "eventloop.model.averages",
    "SyncBuffersHook": ".sync_buffers",
    "TestHook": ".pet_timer",
    "ThroughputHook": ".throughput",
    "TraceHook": ".trace",
    "VisualizationHook": ".visualization",
    "get_bn_modules": "eventloop.model.batchnorm_statistics",
    "on": ".hook",
    "on_rank": ".one_rank",
    "update_bn_stats": "eventloop.model.batchnorm_statistics",
}
"""The modules of the names that are imported with their first use."""

if not TYPE_CHECKING:  # a type checker must see that there are no other names

    def __getattr__(name: str) -> Any:
        if name in _ON_FIRST_USE:
            return getattr(importlib.import_module(_ON_FIRST_USE[name], __name__), name)
        explain_absent(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
