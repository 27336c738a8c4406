"""Refuse subclasses of the trainer with methods that only another system's trainer would call."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType

from eventloop.migration.names import point_meant
from eventloop.migration.tables import table

OVERRIDES = table(
    # detectron2, cvpods and MMEngine
    ("build_hooks register_default_hooks register_custom_hooks", "hooks=[...] of the Trainer"),
    ("build_writers build_visualizer build_logger", "writers=[...] of the Trainer"),
    ("build_model", "model, the first argument of the Trainer"),
    ("build_optimizer build_optim_wrapper", "optimizer=... of the Trainer"),
    ("build_lr_scheduler build_param_scheduler", "schedulers=[...] of the Trainer"),
    ("build_train_loader build_dataloader", "train_loader=... of the Trainer"),
    ("build_val_loader", "val_loader=... of the Trainer"),
    ("build_test_loader", "test_loader=... of the Trainer"),
    ("build_evaluator", "evaluator=... of the Trainer"),
    ("build_train_loop build_val_loop build_test_loop", "a loop of your own over trainer.epochs()"),
    ("run_step run_iter", "train_step=... of the Trainer, a function (trainer, batch)"),
    # Lightning
    ("training_step", "train_step=... of the Trainer, a function (trainer, batch)"),
    ("validation_step test_step", "val_step=... of the Trainer, a function (trainer, batch)"),
    ("configure_optimizers", "optimizer=... and schedulers=[...] of the Trainer"),
    ("configure_callbacks", "hooks=[...] of the Trainer"),
    ("configure_gradient_clipping", "default_hooks=dict(optimizer=dict(grad_clip=dict(max_norm=...)))"),
    ("optimizer_step optimizer_zero_grad", "a subclass of OptimizerHook in hooks=[...]"),
    ("train_dataloader", "train_loader=... of the Trainer"),
    ("val_dataloader", "val_loader=... of the Trainer"),
    ("test_dataloader", "test_loader=... of the Trainer"),
    ("training_epoch_end", "after_train_epoch(self, trainer, event) of a Hook in hooks=[...]"),
    ("validation_epoch_end test_epoch_end", "evaluator=... of the Trainer"),
    # Transformers
    ("compute_loss", "loss_fn=... or train_step=... of the Trainer"),
    ("training_step", "train_step=... of the Trainer, a function (trainer, batch)"),
    ("prediction_step", "predict_step=... of the Trainer, a function (trainer, batch)"),
    ("evaluation_loop prediction_loop", "val_step=... of the Trainer"),
    ("compute_metrics", "evaluator=... of the Trainer"),
    (
        "create_optimizer create_scheduler create_optimizer_and_scheduler get_optimizer_cls_and_kwargs",
        "optimizer=... and schedulers=[...] of the Trainer",
    ),
    ("get_train_dataloader", "train_loader=... of the Trainer"),
    ("get_eval_dataloader", "val_loader=... of the Trainer"),
    ("get_test_dataloader", "test_loader=... of the Trainer"),
)
"""The methods that users override in other systems' trainers or modules, with the replacements."""


def _is_called(name: str, bases: Iterable[type]) -> bool:
    """Return whether a method of these classes uses a name, so that the method of that name is a helper."""
    attributes = [item for base in bases for item in vars(base).items() if item[0] != name]
    functions = [getattr(value, "__func__", value) for _, value in attributes]
    return any(
        name in function.__code__.co_names for function in functions if isinstance(function, FunctionType)
    )


def refuse_overrides(cls: type, events: Iterable[str]) -> None:
    """Refuse a subclass of the trainer that has a method which only another system's trainer would call.

    Args:
        cls: the subclass.
        events: the names of all events. Methods with these names are refused, too, because they belong in a
            hook.

    Raises:
        TypeError: there is such a method; the text names the replacement.
    """
    generic = {f"{when}_{part}" for when in ("before", "after") for part in ("step", "epoch", "iter")}
    event_names = {*events, *generic}
    bases = [
        base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("eventloop", "builtins")
    ]
    for name, value in [item for base in bases for item in vars(base).items()]:
        if name.startswith("__") or not callable(getattr(value, "__func__", value)):
            continue
        if name in OVERRIDES:
            meant = OVERRIDES[name]
        elif name in event_names or point_meant(name) in event_names:
            meant = f"{point_meant(name) or name}(self, trainer, event) of a Hook in hooks=[...]"
        else:
            continue
        if _is_called(name, bases):
            continue
        raise TypeError(
            f"{cls.__name__}.{name} would never be called, because methods do not configure the trainer: "
            f"use {meant} (or give a helper another name)"
        )
