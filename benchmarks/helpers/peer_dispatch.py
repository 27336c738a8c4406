"""Announce one training iteration to `n` handlers that do nothing, by each peer's own code.

Each function returns the statement their own training loop would run, with its variables. Peers are imported by
name at run time, so that one which is not installed can be reported as such.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

Announcement = tuple[str, dict[str, Any]]
"""A statement that announces the event once, and the variables it uses."""


def idle(n: int, base: type, method: str, make: Callable[[], Callable[..., None]]) -> list[Any]:
    """`n` objects with a method that does nothing, each of a class of its own, as the hooks of a training are. Of `n`
    objects of one class the interpreter would remember where their method is, and find it there `n` times."""
    return [type(f"Idle{index}", (base,), {method: make()})() for index in range(n)]


def blinker_send(n: int, event: object) -> Announcement:
    """blinker: `signal.send`, receivers held strongly."""
    signal = import_module("blinker").Signal()
    for _ in range(n):
        signal.connect(lambda sender, event: None, weak=False)
    return "signal.send(None, event=event)", {"signal": signal, "event": event}


def pluggy_hook(n: int, event: object) -> Announcement:
    """pluggy: `pm.hook.after_train_iter`, one plugin a handler."""
    pluggy = import_module("pluggy")
    spec, impl = pluggy.HookspecMarker("bench"), pluggy.HookimplMarker("bench")

    def after_train_iter(trainer: object, event: object) -> None: ...

    manager = pluggy.PluginManager("bench")
    manager.add_hookspecs(SimpleNamespace(after_train_iter=spec(after_train_iter)))
    for _ in range(n):
        plugin = type("Plugin", (), {"after_train_iter": staticmethod(impl(lambda trainer, event: None))})
        manager.register(plugin())
    return "hook.after_train_iter(trainer=None, event=event)", {"hook": manager.hook, "event": event}


def ignite_fire(n: int, event: object) -> Announcement:
    """ignite: `Engine.fire_event(Events.ITERATION_COMPLETED)`."""
    ignite = import_module("ignite.engine")
    engine = ignite.Engine(lambda engine, batch: None)
    completed = ignite.Events.ITERATION_COMPLETED
    for _ in range(n):
        engine.add_event_handler(completed, lambda engine: None)
    return "engine.fire_event(completed)", {"engine": engine, "completed": completed}


def mmengine_call_hook(n: int, event: object) -> Announcement:
    """mmengine: `Runner.call_hook`, on an object that has the hooks and nothing else of a runner."""
    runner_class = import_module("mmengine.runner").Runner
    hook_class = import_module("mmengine.hooks").Hook
    hooks = idle(
        n,
        hook_class,
        "after_train_iter",
        lambda: lambda self, runner, batch_idx, data_batch=None, outputs=None: None,
    )
    runner = SimpleNamespace(_hooks=hooks)
    source = "call_hook(runner, 'after_train_iter', batch_idx=7, data_batch=None, outputs=None)"
    return source, {"call_hook": runner_class.call_hook, "runner": runner}


def lightning_call(n: int, event: object) -> Announcement:
    """lightning: `_call_callback_hooks(trainer, "on_train_batch_end", ...)`, its default profiler."""
    lightning = import_module("lightning.pytorch")
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.callbacks = idle(n, lightning.Callback, "on_train_batch_end", lambda: lambda self, *args: None)
    call = import_module("lightning.pytorch.trainer.call")._call_callback_hooks
    return "call(trainer, 'on_train_batch_end', None, None, 7)", {"call": call, "trainer": trainer}


def transformers_handler(n: int, event: object) -> Announcement:
    """transformers: `CallbackHandler.on_step_end`, with a real state and control."""
    callback = import_module("transformers.trainer_callback")
    callbacks = idle(
        n, callback.TrainerCallback, "on_step_end", lambda: lambda self, args, state, control, **kw: None
    )
    handler = callback.CallbackHandler(callbacks, None, None, None, None)
    handler.callbacks = handler.callbacks[:n]
    names = {"handler": handler, "state": callback.TrainerState(), "control": callback.TrainerControl()}
    return "handler.on_step_end(None, state, control)", names


def torchtnt_handler(n: int, event: object, *, classes: bool = True) -> Announcement:
    """torchtnt: `CallbackHandler.on_train_step_end`, a method for each event, which its `train` calls."""
    callback = import_module("torchtnt.framework.callback").Callback
    callbacks = idle(n, callback, "on_train_step_end", lambda: lambda self, state, unit: None)
    if not classes:
        callbacks = [type(first)() for first in callbacks[:1] for _ in callbacks]
    handler = import_module("torchtnt.framework._callback_handler").CallbackHandler(callbacks)
    return "handler.on_train_step_end(None, None)", {"handler": handler}


ONE_CLASS = "torchtnt, callbacks all of one class"
"""What its loop takes at best: it is the only one here whose place depends on that."""
PEERS: dict[str, tuple[str, Callable[[int, object], Announcement]]] = {
    "blinker send": ("blinker", blinker_send),
    "pluggy hook": ("pluggy", pluggy_hook),
    "ignite fire_event": ("pytorch-ignite", ignite_fire),
    "mmengine call_hook": ("mmengine", mmengine_call_hook),
    "lightning _call_callback_hooks": ("lightning", lightning_call),
    "transformers CallbackHandler": ("transformers", transformers_handler),
    "torchtnt CallbackHandler": ("torchtnt", torchtnt_handler),
    ONE_CLASS: ("torchtnt", partial(torchtnt_handler, classes=False)),
}
"""Label: the distribution to install, and what makes the announcement."""
