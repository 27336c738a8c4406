"""Hooks: synchronous subscribers on a training's critical path. One idea a file."""

from eventloop.hooks.checkpoint import CheckpointHook
from eventloop.hooks.hook import Hook, on
from eventloop.hooks.iter_timer import IterTimerHook
from eventloop.hooks.logger import LoggerHook
from eventloop.hooks.optimizer import OptimizerHook
from eventloop.hooks.param_scheduler import ParamSchedulerHook
from eventloop.hooks.runtime_info import RuntimeInfoHook
from eventloop.hooks.sampler_seed import DistSamplerSeedHook

__all__ = [
    "CheckpointHook",
    "DistSamplerSeedHook",
    "Hook",
    "IterTimerHook",
    "LoggerHook",
    "OptimizerHook",
    "ParamSchedulerHook",
    "RuntimeInfoHook",
    "on",
]
