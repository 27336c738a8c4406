"""Refuse trainer arguments that are invalid or contradict each other, before anything is created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch

from eventloop.bus import Bus
from eventloop.data.loader_info import check_named_loaders
from eventloop.optim.optimizers import check_optimizer
from eventloop.util.checks import positive
from eventloop.util.functions import check_call, check_plain

_IN_USE: WeakSet[Bus] = WeakSet()
"""The buses that belong to a trainer; a second trainer must not use them."""


def check_trainer(
    model: object,
    optimizer: object,
    loss_fn: object,
    train_step: object,
    max_epochs: int | None,
    max_iters: int | None,
    *loaders: Iterable[Any] | None,
) -> None:
    """Refuse arguments of the trainer that are invalid or contradict each other.

    Args:
        loaders: `train_loader`, `val_loader` and `test_loader`, in this order.
    """
    if not isinstance(model, torch.nn.Module):
        got = (
            f"the class {model.__name__}: write {model.__name__}(...)"
            if isinstance(model, type)
            else repr(model)
        )
        raise TypeError(f"model must be a torch.nn.Module, got {got}")
    check_plain("model.train (rename a method of yours that does not set the mode)", model.train, "mode")
    if (max_epochs is None) == (max_iters is None):
        got = "neither" if max_epochs is None else f"both (max_epochs={max_epochs}, max_iters={max_iters})"
        raise ValueError(
            f"give exactly one of max_epochs and max_iters, the unit the run is measured in; got {got}"
        )
    positive(
        "max_epochs" if max_epochs is not None else "max_iters",
        max_epochs if max_epochs is not None else max_iters,
    )
    check_optimizer(optimizer)
    check_loss_fn(loss_fn)
    if loss_fn is not None and train_step is not None:
        raise ValueError("give loss_fn or train_step, not both: train_step replaces loss_fn")
    for name, loader in zip(("train_loader", "val_loader", "test_loader"), loaders, strict=True):
        if name == "train_loader" and isinstance(loader, Mapping):
            raise TypeError(
                f"train_loader must be one iterable of batches, got a mapping with {[*loader]}: only "
                "val_loader and test_loader may be several loaders by name"
            )
        if loader is not None:
            check_named_loaders(name, loader)


def check_bus(bus: object) -> None:
    """Refuse an object that is not a bus, and a bus of another trainer, whose hooks would be called too."""
    if bus is not None and not isinstance(bus, Bus):
        raise TypeError(f"bus must be a Bus, as Bus() makes one, got {bus!r}")
    if bus in _IN_USE:
        raise ValueError(
            "the bus belongs to another trainer, whose hooks would step, log and save in these iterations "
            "too: give each trainer a bus of its own"
        )


def register_bus(bus: Bus) -> None:
    """Record that a bus belongs to a trainer, so that no other trainer may use it."""
    _IN_USE.add(bus)
    bus.for_runs = True


def check_loss_fn(loss_fn: object) -> None:
    """Refuse a loss function that cannot be called."""
    if isinstance(loss_fn, type):
        raise TypeError(f"loss_fn is a class: give an object of it, {loss_fn.__name__}()")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function (model(inputs), target), got {loss_fn!r}")
    check_plain("loss_fn", loss_fn, "model(inputs)", "target")


def check_signatures(**steps: object) -> None:
    """Refuse steps that cannot be called with `(trainer, batch)`.

    Args:
        steps: the functions, by the names of the trainer's arguments, such as `train_step`.

    Raises:
        TypeError: a step is not a function, or has another signature.
    """
    for name, step in steps.items():
        if step is not None:
            check_call(name, step, "trainer", "batch")


def check_step(train_step: object, loss_fn: object, optimizer: object, *, steps_itself: bool) -> None:
    """Refuse arguments with which training would not change any weights.

    Args:
        train_step, loss_fn, optimizer: arguments of the trainer.
        steps_itself: whether the user has replaced the optimizer hook.
    """
    if train_step is None and loss_fn is None:
        raise ValueError(
            "the trainer has no step: pass loss_fn=..., train_step=..., or write the loop yourself"
        )
    if train_step is None and optimizer is None and not steps_itself:
        raise ValueError(
            "the trainer has no optimizer, so train() would change nothing: pass optimizer=..., or say "
            "default_hooks=dict(optimizer=None) when a hook of yours makes the steps"
        )


def check_lists(**lists: object) -> None:
    """Refuse arguments that are not lists of hooks or writers."""
    for name, given in lists.items():
        if isinstance(given, Mapping):
            raise TypeError(f"{name} must be a list of them, got one config: write {name}=[dict(type=...)]")
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"{name} must be a list, got {given!r}: write {name}=[...]")


def check_default_hooks(given: object) -> None:
    """Refuse a `default_hooks` that is not a mapping."""
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            f"default_hooks must be a mapping {{name: a hook, its options or None}}, got {given!r}; other "
            "hooks go to hooks=[...]"
        )
