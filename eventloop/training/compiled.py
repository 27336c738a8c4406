"""Compile the parts of a trainer by `torch.compile`: the model, or forward, loss and the optimizers' steps.

The trainer calls `compile_parts` once, when it is built. `eventloop.evaluation.compiled_outputs` copies the
outputs of compiled code for the loops.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch

from eventloop.metrics import EventStorage
from eventloop.metrics.rows import Scalar
from eventloop.model.forward import forward
from eventloop.optim.optimizers import named_values
from eventloop.util.suggest import suggest

logger = logging.getLogger("eventloop")

REPEATS = 3
"""The number of repeated compilations at which a warning is logged; PyTorch gives up after eight."""

Compile = Literal["model", "step"] | Mapping[str, Mapping[str, Any]]


class Parts(NamedTuple):
    """The parts of a trainer that depend on its argument `compile`."""

    compiled: bool
    options: Compile | None
    """The argument itself; None compiles nothing."""
    metrics: EventStorage
    forward: Callable[..., Any]
    train_step: Callable[..., Any] | None


def compile_parts(
    given: Compile | None,
    model: torch.nn.Module,
    optimizer: Any,
    train_step: Callable[..., Any] | None,
) -> Parts:
    """Compile the model, and with "step" the optimizers' steps, in place; return the trainer's other parts.

    A program calls the model and the optimizers as before, and the names in their states are the same.

    Args:
        given: the trainer's argument `compile`; None compiles nothing.
        model, optimizer, train_step: arguments of the trainer.

    Raises:
        TypeError, ValueError: `given` is no choice or has an unknown option, the model is compiled already,
            or the step of an optimizer object was replaced.
    """
    if given is None:
        return Parts(False, None, EventStorage(), forward, train_step)
    choice, options = _checked(given)
    _refuse_compiled(model)
    if choice == "model":
        _compile_model(model, options)
        return Parts(True, given, _CopyingStorage(), forward, train_step)
    for name, one_optimizer in named_values("optimizer", optimizer):
        _refuse_replaced(name, one_optimizer)
        _compile_step(one_optimizer, options)
    _compile_model(model, options)
    compiled_step = None if train_step is None else torch.compile(train_step, **options)
    return Parts(True, given, _CopyingStorage(), torch.compile(forward, **options), compiled_step)


class _CopyingStorage(EventStorage):
    """A storage of metrics that copies each tensor, because a CUDA graph overwrites its former outputs."""

    def _put(self, names: tuple[str, ...], values: list[Scalar], smooth: bool, cur_iter: int | None) -> None:
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        super()._put(names, copies, smooth, cur_iter)


def _checked(given: Any) -> tuple[str, Mapping[str, Any]]:
    """Return "model" or "step", and the options of `torch.compile`, from the trainer's argument `compile`.

    Raises:
        ValueError: the argument is not one of these choices.
        TypeError: `torch.compile` has no such option.
    """
    has_options = isinstance(given, Mapping) and len(given) == 1
    choice, options = next(iter(given.items())) if has_options else (given, {})
    if choice not in ["model", "step"] or not isinstance(options, Mapping):
        raise ValueError(
            "compile must be 'model' or 'step', or one of them with options of torch.compile, as in "
            f"compile={{'model': {{'mode': 'reduce-overhead'}}}}, got {given!r}"
        )
    known = [*inspect.signature(torch.compile).parameters][1:]
    for name in options:
        if name not in known:
            raise TypeError(
                f"compile[{choice!r}]: torch.compile has no option {name!r}{suggest(str(name), known)}"
            )
    return choice, options


def _refuse_compiled(model: torch.nn.Module) -> None:
    """Raise ValueError if the model is the result of `torch.compile`.

    A model that `Module.compile` has compiled in place is allowed, and compiled again.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            f"compile: the model is compiled already, got {type(model).__name__}: leave compile out, or pass "
            "the model that was not given to torch.compile"
        )


def _compile_model(model: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the calls of a model in place, as `Module.compile` does.

    `Module.compile` itself compiles nothing if the model's class is one of PyTorch's, such as `Sequential`,
    because `torch.compile` begins no graph in a function of PyTorch. So `run`, a function of this module, is
    compiled here.
    """
    call: Callable[..., Any] = model._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    model._compiled_call_impl = torch.compile(run, **options)


def _refuse_replaced(name: str, optimizer: Any) -> None:
    """Raise ValueError if the program has replaced the method `step` of an optimizer object.

    The wrapper that a PyTorch scheduler puts around `step` is allowed.
    """
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        raise ValueError(
            f"compile='step' compiles {type(optimizer).__name__}.step, and the step of {name} was replaced "
            f"by {step!r:.100}: pass compile='model', or an optimizer whose step is that of its class"
        )


def _compile_step(optimizer: Any, options: Mapping[str, Any]) -> None:
    """Compile the step of an optimizer in place, without the wrapper that a scheduler may have put around it.

    The wrapper would break the graph. It only sets `_opt_called` at each step, without which PyTorch warns
    that a scheduler was stepped before the optimizer. This function sets the attribute once.
    """
    compiled_step: Any = torch.compile(type(optimizer).step, **options)
    watch = _FloatWatch(type(optimizer).__name__)

    @wraps(type(optimizer).step)  # so that an optimizer whose step needs a closure is still found
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with watch.of(optimizer):
            return compiled_step(optimizer, *args, **kwargs)

    marked: Any = step
    marked._wrapped_by_lr_sched = True
    optimizer.step = MethodType(marked, optimizer)
    optimizer._opt_called = True


class _FloatWatch:
    """Log a warning once if PyTorch compiles a step again each time that a float in a param group changes.

    Whether it does so depends on the optimizer's class and options. For most it compiles once more, for the
    first change, and not for later ones.

    Args:
        name: the class of the optimizer, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._floats: list[tuple[str, Any]] = []  # in the order of the groups, as at the last step
        self._repeats = 0

    @contextmanager
    def of(self, optimizer: Any) -> Iterator[None]:
        """Compare the floats before a step with those of the last one, and count if the step is compiled."""
        before, self._floats = self._floats, _floats(optimizer)
        if self._repeats >= REPEATS or not before or before == self._floats:
            yield
            return
        graphs = _compiled_graphs()
        yield
        self._repeats += _compiled_graphs() > graphs
        if self._repeats == REPEATS:
            changed = {
                name for (name, old), (_, new) in zip(before, self._floats, strict=False) if old != new
            }
            logger.warning(
                "compile='step' compiles the step of %s again for each new value of the floats %s, and "
                "gives up after some of them: %s, or pass compile='model'",
                self._name,
                ", ".join(sorted(changed)) or "of its param groups",
                "give the optimizer a tensor, as lr=torch.tensor(0.1), also with capturable=True if it has it"
                if changed <= {"lr"}
                else "let nothing but the learning rate change, and give it as a tensor",
            )


def _floats(optimizer: Any) -> list[tuple[str, Any]]:
    """Return the options of an optimizer's param groups that are floats or tuples, such as betas."""
    return [
        (name, value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if type(value) is float or type(value) is tuple
    ]


def _compiled_graphs() -> int:
    """Return the number of graphs that PyTorch has compiled in this process."""
    from torch._dynamo.utils import counters  # imported by `torch.compile` by now

    return int(counters["stats"]["unique_graphs"])
