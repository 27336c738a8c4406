"""List attributes of other systems' trainers with their replacements, for error messages.

The trainer derives from `KnowsPeers`. Each replacement is a noun phrase that follows "use".
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import NoReturn, ParamSpec, TypeVar

from eventloop.util.suggest import suggest

P = ParamSpec("P")
T = TypeVar("T")

_TRAINS = "trainer.train(), or a loop of your own over trainer.epochs() and trainer.batches(loader)"
_SAVES = "hooks=[CheckpointHook(interval=..., save_best=...)] of the Trainer, which saves"
_HOOKS = "hooks=[...] of the Trainer, or trainer.bus.on(event) for a function"
_LOGS = "trainer.metrics.put_scalar(name, value)"
_NUMBERS = "trainer.metrics, with latest() for the newest values"

ATTRIBUTES = {
    "MMEngine": {
        "runner": "the trainer itself",
        "train_loop": _TRAINS,
        "_train_loop": _TRAINS,
        "val_loop": "trainer.val()",
        "_val_loop": "trainer.val()",
        "test_loop": "trainer.test()",
        "_test_loop": "trainer.test()",
        "train_dataloader": "trainer.train_loader",
        "val_dataloader": "trainer.val_loader",
        "test_dataloader": "trainer.test_loader",
        "data_loader": "trainer.loader",
        "data_batch": "trainer.batch",
        "optim_wrapper": "trainer.optimizer",
        "param_schedulers": "trainer.schedulers",
        "message_hub": _NUMBERS,
        "log_buffer": _NUMBERS,
        "visualizer": "trainer.metrics.put_image(name, image), which goes to all of trainer.writers",
        "inner_iter": "trainer.batch_idx",
        "_inner_iter": "trainer.batch_idx",
        "_iter": "trainer.iter",
        "_epoch": "trainer.epoch",
        "_max_iters": "trainer.max_iters",
        "_max_epochs": "trainer.max_epochs",
        "_hooks": "trainer.hooks",
        "register_hook": _HOOKS,
        "register_training_hooks": _HOOKS,
        "get_hooks_info": "print(trainer.bus), which shows every handler in its order",
        "call_hook": "trainer.bus.emit(event)",
        "from_cfg": "Trainer(...), where hooks, writers and schedulers may be configs",
        "load_or_resume": 'trainer.resume("auto"), or trainer.load_checkpoint(path)',
        "save_checkpoint": _SAVES,
        "logger": 'logging.getLogger("eventloop")',
        "experiment_name": "the name of trainer.work_dir",
    },
    "Lightning": {
        "fit": "trainer.train(); the model and the loaders are the Trainer's arguments",
        "fit_loop": _TRAINS,
        "validate": "trainer.val()",
        "predict": "model.eval(), and model(inputs) for each batch under torch.no_grad(), in the script",
        "save_checkpoint": _SAVES,
        "global_step": "trainer.iter",
        "current_epoch": "trainer.epoch",
        "max_steps": "trainer.max_iters",
        "estimated_stepping_batches": "trainer.max_iters",
        "num_training_batches": "len(trainer.train_loader)",
        "callback_metrics": _NUMBERS,
        "logged_metrics": _NUMBERS,
        "log": _LOGS,
        "log_dict": "trainer.metrics.put_scalars(values)",
        "lightning_module": "trainer.model",
        "optimizers": "trainer.optimizer, one or a mapping of several",
        "train_dataloader": "trainer.train_loader",
        "val_dataloaders": "trainer.val_loader",
        "test_dataloaders": "trainer.test_loader",
        "callbacks": "trainer.hooks",
        "logger": "trainer.writers",
        "loggers": "trainer.writers",
        "checkpoint_callback": "the CheckpointHook among trainer.hooks",
        "ckpt_path": 'trainer.resume("auto") or trainer.resume(path)',
        "should_stop": "trainer.stop(reason), after which trainer.asked_to_stop is True",
        "global_rank": "trainer.rank",
        "is_global_zero": "trainer.rank == 0",
        "log_dir": "trainer.work_dir",
        "default_root_dir": "trainer.work_dir",
    },
    "Transformers": {
        "evaluate": "trainer.val()",
        "add_callback": _HOOKS,
        "save_model": _SAVES,
        "save_state": _SAVES,
        "log": _LOGS,
        "lr_scheduler": "trainer.schedulers",
    },
    "detectron2": {
        "storage": _NUMBERS,
        "max_iter": "trainer.max_iters",
        "register_hooks": _HOOKS,
        "build_hooks": _HOOKS,
        "build_writers": "writers=[...] of the Trainer",
        "resume_or_load": 'trainer.resume("auto"), or trainer.load_checkpoint(path)',
        "checkpointer": _SAVES,
    },
    "ignite": {
        "add_event_handler": "trainer.bus.on(event)",
        "on": "trainer.bus.on(event)",
        "fire_event": "trainer.bus.emit(event)",
        "terminate": "trainer.stop(reason)",
    },
}
"""By system and name: the replacement on the trainer."""

_LOADERS = "an argument of the Trainer: train_loader, val_loader or test_loader"
CALLS = {
    "ckpt_path": (
        'trainer.resume("auto") or trainer.resume(path) before it, or trainer.load_checkpoint(path) for the '
        "weights only"
    ),
    "resume_from_checkpoint": 'trainer.resume("auto") or trainer.resume(path) before it',
    "dataloaders": _LOADERS,
    "train_dataloaders": _LOADERS,
    "val_dataloaders": _LOADERS,
    "datamodule": _LOADERS,
    "data_loaders": _LOADERS,
}
"""Arguments of train, val, test and run in other systems."""


class _Replaced:
    """A descriptor that raises an AttributeError with the replacement of an attribute.

    The attribute can be set as any other.

    `__getattr__` would not do: Python also calls it when a property raises an AttributeError of its own, and
    would replace that error. `trainer.stopping` calls handlers.
    """

    def __init__(self, name: str) -> None:
        whose: dict[str, list[str]] = {}
        for system, names in ATTRIBUTES.items():
            if name in names:
                whose.setdefault(names[name], []).append(f"{system}'s")
        advice = [f"instead of {' and '.join(systems)} use {here}" for here, systems in whose.items()]
        self._name, self._advice = name, "; ".join(advice)

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}: {self._advice}")


class KnowsPeers:
    """A base class that explains attributes of other systems.

    It does not have these attributes: not for `hasattr`, not for `dir`, and not for a type checker.
    """

    __slots__ = ()

    def __dir__(self) -> Iterable[str]:
        return [
            name
            for name in super().__dir__()
            if not isinstance(inspect.getattr_static(self, name, None), _Replaced)
        ]


for _name in dict.fromkeys(name for names in ATTRIBUTES.values() for name in names):
    setattr(KnowsPeers, _name, _Replaced(_name))


def knowing_calls(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method raise a TypeError that says where an unknown argument belongs."""
    parameters = inspect.signature(method).parameters

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in parameters:
                raise TypeError(
                    f"{method.__qualname__} has no argument {name!r}{_meant(name, type(args[0]))}"
                )
        return method(*args, **kwargs)

    return checked


def _meant(name: str, owner: type) -> str:
    if name in CALLS:
        return f": use {CALLS[name]}"
    arguments = [*inspect.signature(owner).parameters]
    if name in arguments:
        return f": it is an argument of {owner.__name__}(...)"
    return suggest(name, arguments)
