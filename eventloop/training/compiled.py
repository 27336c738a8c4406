"""Compile the parts of a trainer by `torch.compile`: the model, or forward, loss and the optimizers' steps.

The trainer calls `compile_parts` once, when it is built. `eventloop.evaluation.compiled_outputs` has what its
loops do for the outputs of compiled code.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch

from eventloop.metrics import EventStorage
from eventloop.metrics.rows import Scalar
from eventloop.model.forward import forward
from eventloop.optim.optimizers import named_values
from eventloop.util.suggest import suggest

logger = logging.getLogger("eventloop")

Compile = Literal["model", "step"] | Mapping[str, Mapping[str, Any]]


class Parts(NamedTuple):
    """The parts of a trainer that are others if something is compiled."""

    compiled: bool
    metrics: EventStorage
    forward: Callable[..., Any]
    train_step: Callable[..., Any] | None


def compile_parts(
    given: Compile | None,
    model: torch.nn.Module,
    optimizer: Any,
    train_step: Callable[..., Any] | None,
    schedulers: Sequence[Any],
) -> Parts:
    """Compile the model, and the optimizers' steps, in place, and return the parts that are others by that.

    A program calls the model and the optimizers as before, and the names in their states are the same.

    Args:
        given: what to compile; None compiles nothing.
        model, optimizer, train_step, schedulers: arguments of the trainer.

    Raises:
        TypeError, ValueError: `given` is no choice or has an unknown option, the model is compiled already,
            or the step of an optimizer object was replaced.
    """
    if given is None:
        return Parts(False, EventStorage(), forward, train_step)
    what, options = _checked(given)
    _refuse_compiled(model)
    if what == "model":
        _compile_model(model, options)
        return Parts(True, _CopyingStorage(), forward, train_step)
    for name, each in named_values("optimizer", optimizer):
        _refuse_replaced(name, each)
        if schedulers:
            _warn_of_float_rate(each)
        _compile_step(each, options)
    _compile_model(model, options)
    own = None if train_step is None else torch.compile(train_step, **options)
    return Parts(True, _CopyingStorage(), torch.compile(forward, **options), own)


class _CopyingStorage(EventStorage):
    """A storage that copies each tensor, because the next replay of a CUDA graph overwrites its outputs."""

    def _put(self, names: tuple[str, ...], values: list[Scalar], smooth: bool, cur_iter: int | None) -> None:
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        super()._put(names, copies, smooth, cur_iter)


def _checked(given: Any) -> tuple[str, Mapping[str, Any]]:
    """Return what to compile and the options of `torch.compile`; refuse other arguments."""
    one = isinstance(given, Mapping) and len(given) == 1
    what, options = next(iter(given.items())) if one else (given, {})
    if what not in ["model", "step"] or not isinstance(options, Mapping):
        raise ValueError(
            "compile must be 'model' or 'step', or one of them with options of torch.compile, as in "
            f"compile={{'model': {{'mode': 'reduce-overhead'}}}}, got {given!r}"
        )
    known = [*inspect.signature(torch.compile).parameters][1:]
    for name in options:
        if name not in known:
            raise TypeError(
                f"compile[{what!r}]: torch.compile has no option {name!r}{suggest(str(name), known)}"
            )
    return what, options


def _refuse_compiled(model: torch.nn.Module) -> None:
    """Refuse the result of `torch.compile`; a model that is compiled in place is compiled again."""
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            f"compile: the model is compiled already, got {type(model).__name__}: leave compile out, or pass "
            "the model that was not given to torch.compile"
        )


def _compile_model(model: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the calls of a model in place, as `model.compile` does.

    That method compiles nothing of PyTorch's own classes, such as `Sequential`, because no graph begins in a
    function of theirs.
    """
    call: Callable[..., Any] = model._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    model._compiled_call_impl = torch.compile(run, **options)


def _refuse_replaced(name: str, optimizer: Any) -> None:
    """Refuse an optimizer whose object has a step of its own; a scheduler of PyTorch wraps it harmlessly."""
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"compile='step' compiles {type(optimizer).__name__}.step, and the step of {name} was replaced "
            f"by {step!r:.100}: pass compile='model', or an optimizer whose step is that of its class"
        )


def _compile_step(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Compile the step of an optimizer in place.

    The wrapper of a scheduler would break the graph. It only records that there was a step, for PyTorch's
    warning about the order of steps, so this is recorded here.
    """
    step: Any = torch.compile(type(optimizer).step, **options)
    step._wrapped_by_lr_sched = True
    optimizer.step = MethodType(step, optimizer)
    optimizer._opt_called = True


def _warn_of_float_rate(optimizer: Any) -> None:
    """Warn of rates that PyTorch compiles into the step as constants; it is given up after eight of them."""
    kinds = torch.optim.SGD | torch.optim.RMSprop | torch.optim.Adadelta
    if isinstance(optimizer, kinds) and any(
        isinstance(group["lr"], float) for group in optimizer.param_groups
    ):
        logger.warning(
            "compile='step' compiles the step of %s again for each learning rate that is a float, and gives "
            "up after some of them: with schedulers give it a tensor, as lr=torch.tensor(0.1)",
            type(optimizer).__name__,
        )
