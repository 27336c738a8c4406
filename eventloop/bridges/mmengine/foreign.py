"""Run hooks of MMEngine in this engine's `Trainer`, with an MMEngine runner that never runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import mmengine.hooks
import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner, ValLoop
from mmengine.runner import get_priority as priority_in_mmengine

from eventloop.bridges.foreign import ForeignCall
from eventloop.checkpoint.weights import OWN, unwrap
from eventloop.data.rng import rng_state, set_rng_state
from eventloop.optim.optimizers import named_optimizers
from eventloop.state.plain_values import plain

SYSTEM = "mmengine"
REFUSED = {
    "ParamSchedulerHook": "give the Trainer the schedulers, schedulers=[...], which steps them",
    "DistSamplerSeedHook": "this trainer seeds its samplers",
    "LoggerHook": "this trainer logs by its own LoggerHook, and writers=[...] record the numbers",
    "RuntimeInfoHook": "this trainer collects losses and learning rates itself",
    "EventLoopHook": "give its hooks and writers to this Trainer",
    "PrepareTTAHook": "it replaces the model of a test runner; wrap the model yourself",
    "NaiveVisualizationHook": "it reads batches of a form that MMEngine no longer makes; log images by "
    "trainer.metrics.put_image",
    "NPUProfilerHook": "this trainer runs on no NPU; ProfilerHook profiles the CPU and CUDA",
}
"""The hooks that cannot be used here, each with the reason or the substitute."""
STATE_KEYS = ("best_", "keep_ckpt_ids", "last_ckpt")
"""The prefixes of the keys under which a CheckpointHook keeps its state in MMEngine's message hub."""
OUTPUTS = ("after_train_iter", "after_val_iter", "after_test_iter")
"""The methods of hooks that receive the outputs of a step."""


def check(callback: Any) -> None:
    """Refuse an object that is not a hook of MMEngine, and hooks that can have no effect in our trainer.

    Raises:
        TypeError: the object is not a hook of MMEngine.
        ValueError: the hook is one of those in `REFUSED`.
    """
    if not isinstance(callback, mmengine.hooks.Hook):
        raise TypeError(
            f"Foreign takes a hook of MMEngine, got {type(callback).__name__}, which does not derive from "
            "mmengine.hooks.Hook"
        )
    for base in type(callback).__mro__:
        if base.__module__.startswith(("mmengine.", "eventloop.")) and base.__name__ in REFUSED:
            raise ValueError(f"{type(callback).__name__} can have no effect here: {REFUSED[base.__name__]}")


def stateful(callback: Any) -> bool:
    """Return whether a hook is a CheckpointHook, the only one whose state is saved here."""
    return isinstance(callback, mmengine.hooks.CheckpointHook)


def build(trainer: Any, callbacks: Sequence[Any]) -> _Driver:
    """Return the object that owns the runner which all MMEngine hooks of a trainer receive."""
    return _Driver(trainer, callbacks)


class _Driver:
    """Call MMEngine hooks at our trainer's events, with a runner that gets our trainer's counters."""

    def __init__(self, trainer: Any, hooks: Sequence[Any]) -> None:
        self._trainer = ref(trainer)
        self._runner = _runner(trainer)
        # ids of hooks whose `before_run` was called early, for a checkpoint, with the number of that load
        self._begun: dict[int, int] = {}
        for hook in hooks:
            self._runner.register_hook(hook)

    def own_calls(self) -> Iterable[ForeignCall]:
        """Return no subscriptions, because the counters are set before each call of a hook."""
        return ()

    def calls(self, callback: Any) -> Iterable[ForeignCall]:
        """Yield a subscription for each method that the hook's class overrides."""
        priority = int(priority_in_mmengine(callback.priority))
        if stateful(callback):
            priority -= 1  # before our CheckpointHook of the same priority, which saves this hook's state
        for stage in callback.get_triggered_stages():
            if stage == "after_load_checkpoint":
                yield ForeignCall(stage, (stage,), self._load_handler(callback), priority)
            else:
                yield ForeignCall(
                    stage, (stage,), self._call_handler(getattr(callback, stage), stage), priority
                )

    def _load_handler(self, hook: Any) -> Callable[[Any, Any], object]:
        """Return a handler that calls `before_run` and then `after_load_checkpoint` of a hook.

        A hook such as EMAHook exchanges the averaged weights and the model's own in the checkpoint. That
        changes the weights with which a run resumes, under the key `OWN`; `state_dict` stays as saved.
        """

        def load(trainer: Any, event: Any) -> None:
            """Call `after_load_checkpoint` with copies of the dicts, whose weights the trainer then loads."""
            if not trainer.running:
                hook.before_run(self._runner)
                self._begun[id(hook)] = trainer.state.loads + 1
            checkpoint = {
                key: dict(value) if isinstance(value, Mapping) else value
                for key, value in trainer.checkpoint.items()
            }
            checkpoint["state_dict"] = dict(checkpoint.get(OWN, checkpoint["state_dict"]))
            self._runner._resume = True  # EMAHook exchanges weights only if the runner resumes
            hook.after_load_checkpoint(self._runner, checkpoint)
            trainer.checkpoint[OWN] = checkpoint["state_dict"]

        return load

    def _call_handler(self, method: Callable[..., Any], stage: str) -> Callable[[Any, Any], object]:
        """Return a handler that sets the runner's counters, calls a hook's method and applies its effects."""
        hook = method.__self__  # type: ignore[attr-defined]

        def call(trainer: Any, event: Any) -> None:
            """Call the hook's method with our counters, and log its numbers or stop as the hook requests."""
            runner = self._runner
            if stage == "before_run" and self._begun.pop(id(hook), None) == trainer.state.loads:
                return  # was called already, when the checkpoint was loaded
            loop = runner._train_loop
            loop._iter = event.iter
            loop._epoch = event.epoch if trainer.by_epoch else 0  # IterBasedTrainLoop has no epochs
            lengths = {name: len(buffer.data[0]) for name, buffer in runner.message_hub.log_scalars.items()}
            method(runner, **_arguments(trainer, event, stage))
            self._copy_numbers(trainer, lengths)
            if loop.stop_training:
                loop.stop_training = False
                trainer.stop(f"{type(hook).__name__} of MMEngine set stop_training")

        return call

    def _copy_numbers(self, trainer: Any, lengths: Mapping[str, int]) -> None:
        """Copy the numbers that a hook has put into MMEngine's message hub to our trainer's metrics.

        Args:
            lengths: for each name in the hub, how many values it had before the hook was called.
        """
        for name, buffer in self._runner.message_hub.log_scalars.items():
            if len(buffer.data[0]) > lengths.get(name, 0):
                trainer.metrics.put_scalar(name.partition("/")[2] or name, float(buffer.current()))

    def state_dict(self, callback: Any) -> dict[str, Any]:
        """Return a CheckpointHook's values in the message hub: best score, kept and last checkpoints."""
        state = {key: value for key, value in self._info.items() if key.startswith(STATE_KEYS)}
        return dict(plain(state, type(callback).__name__))

    def load_state_dict(self, callback: Any, state: Mapping[str, Any]) -> None:
        """Replace the values of a CheckpointHook in the message hub, for the hook's `before_train`."""
        for key in [key for key in self._info if key.startswith(STATE_KEYS)]:
            del self._info[key]
        self._info.update(state)

    @property
    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._runner.message_hub.runtime_info
        return info


def _arguments(trainer: Any, event: Any, stage: str) -> dict[str, Any]:
    """Return the arguments, besides the runner, of an MMEngine hook's method such as `after_train_iter`."""
    if stage.endswith("_iter"):
        # MMEngine's IterBasedTrainLoop counts batches through the whole training
        counts_on = stage.endswith("_train_iter") and not trainer.by_epoch
        index = event.iter if counts_on else event.batch_idx
        arguments = {"batch_idx": index, "data_batch": trainer.batch}
        return arguments | {"outputs": trainer.outputs} if stage in OUTPUTS else arguments
    if stage in ("after_val_epoch", "after_test_epoch"):
        return {"metrics": dict(event.metrics)}
    if stage == "before_save_checkpoint":
        return {"checkpoint": trainer.checkpoint}
    return {}


def _runner(trainer: Any) -> Runner:
    """Build a runner with the trainer's model and optimizers, without changing random state or device."""
    state = rng_state()  # the constructor of a runner seeds all random generators
    try:
        runner = Runner(
            model=torch.nn.Module(),
            work_dir=str(trainer.work_dir / "mmengine"),
            log_level="WARNING",
            default_hooks=dict.fromkeys(_DEFAULTS),
            experiment_name=f"run_{id(trainer)}",
            env_cfg={"mp_cfg": {"mp_start_method": None}},
        )
    finally:
        set_rng_state(state)
    runner.model = unwrap(trainer.model)
    runner.optim_wrapper = _wrapper(trainer.optimizer)
    loop = object.__new__(EpochBasedTrainLoop if trainer.by_epoch else IterBasedTrainLoop)
    loop._runner, loop.dataloader = runner, trainer.train_loader
    loop._iter = loop._epoch = 0
    loop._max_iters, loop._max_epochs, loop.stop_training = trainer.max_iters, trainer.max_epochs or 1, False
    runner._train_loop = loop
    if trainer.val_loader is not None:
        runner._val_loop = object.__new__(ValLoop)
        runner._val_loop._runner, runner._val_loop.dataloader = runner, trainer.val_loader
    return runner


def _wrapper(optimizer: Any) -> Any:
    """Return MMEngine's wrapper of our optimizer, or of several; None without an optimizer."""
    wrappers = {name: OptimWrapper(named) for name, named in named_optimizers(optimizer).items()}
    if "" in wrappers:  # a single optimizer has no name
        return wrappers[""]
    return OptimWrapperDict(**wrappers) if wrappers else None


_DEFAULTS = ("runtime_info", "timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
