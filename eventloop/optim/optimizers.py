"""Name and check one optimizer, or several optimizers by name, as in a GAN.

The trainer, its hooks and the resume use it. The argument `optimizer` of a function is an optimizer, a
mapping from names to optimizers, or None. `optimizer_states` saves and loads the states of optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from eventloop.util.functions import needs_argument

Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
logger = logging.getLogger("eventloop")

_BY_CLOSURE = """
  def train_step(trainer, batch):
      def closure():
          trainer.optimizer.zero_grad()
          loss = loss_fn(trainer.model(batch[0]), batch[1])
          loss.backward()
          return loss"""
"""The first lines of a train step with an optimizer that needs a closure, for an error message."""


def named_optimizers(optimizer: Any) -> dict[str, Any]:
    """Return the optimizers of a trainer by name; a single optimizer has the name "", and None gives {}."""
    if optimizer is None:
        return {}
    return dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}


def classes_text(optimizer: Any) -> str:
    """Return the classes of a trainer's optimizers as text, such as "SGD" or "gen: Adam, critic: Adam"."""
    return ", ".join(
        f"{name}: {type(each).__name__}" if name else type(each).__name__
        for name, each in named_optimizers(optimizer).items()
    )


def each_optimizer(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a trainer as a list."""
    return list(named_optimizers(optimizer).values())


def hookable(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer whose `step` calls its step hooks, which may be inside a wrapper; else None.

    A wrapper has the optimizer as its attribute `optimizer`. Accelerate's wrapper is a
    `torch.optim.Optimizer` itself, but calls no hooks.
    """
    while not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(
        optimizer, "_optimizer_step_pre_hooks"
    ):
        if (optimizer := getattr(optimizer, "optimizer", None)) is None:
            return None
    return optimizer


def named_values(what: str, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield each optimizer after the name under which a value of it, such as its rate, is logged.

    Args:
        what: the name of the value. If there are several optimizers, "/" and the optimizer's name follow.
    """
    for name, each in named_optimizers(optimizer).items():
        yield f"{what}/{name}" if name else what, each


def check_optimizer(optimizer: object) -> None:
    """Raise TypeError or ValueError unless an argument is an optimizer, optimizers by name, or None."""
    if not isinstance(optimizer, Mapping):
        if optimizer is not None and not _is_optimizer(optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}{_counterpart(optimizer)}"
            )
        return
    if isinstance(kind := optimizer.get("type"), str | type):
        kind = kind if isinstance(kind, str) else kind.__name__
        raise TypeError(
            f"optimizer is a config, and must be an object: write torch.optim.{kind}(model.parameters(), ...)"
        )
    if not optimizer:
        raise ValueError("optimizer is an empty mapping: pass one optimizer, a dict(name=optimizer), or None")
    for name, each in optimizer.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"the names of optimizers must be non-empty strings, got {name!r}")
        if not _is_optimizer(each):
            raise TypeError(
                f"optimizer[{name!r}] must be a torch.optim.Optimizer, got {each!r}{_counterpart(each)}"
            )
    if len({id(each) for each in optimizer.values()}) < len(optimizer):
        raise ValueError(
            f"two of the optimizers {sorted(optimizer)} are one object, which would be stepped twice: pass "
            "it once"
        )


def check_parameters(
    model: torch.nn.Module, optimizer: Any, loss_fn: object, *, refuses: bool, logs: bool = True
) -> None:
    """Refuse optimizers without a parameter of the model, and log parameters that are not the model's.

    The parameters of a `loss_fn` that is a module are trained as well, but no checkpoint has them. Only
    PyTorch's own optimizers and their subclasses are checked: a library's wrapper may hold copies of the
    weights in another type.

    Args:
        model, optimizer, loss_fn: arguments of the trainer.
        refuses: whether optimizers without a parameter of the model are refused. False if the training step
            is the user's own code, which may train any module.
        logs: whether other parameters are logged. False at the start of a run, where the trainer checks
            again because its model may have been replaced.
    """
    own = {id(parameter) for parameter in model.parameters()}
    of_loss = {id(p) for p in loss_fn.parameters()} if isinstance(loss_fn, torch.nn.Module) else set()
    given = {
        name: [id(parameter) for group in each.param_groups for parameter in group["params"]]
        for name, each in named_optimizers(optimizer).items()
        if isinstance(each, torch.optim.Optimizer)
    }
    foreign = {name: sum(each not in own for each in ids) for name, ids in given.items()}
    all_ids = {each for ids in given.values() for each in ids}
    if refuses and own and all(given.values()) and given and all_ids.isdisjoint(own | of_loss):
        raise ValueError(
            f"optimizer has none of the model's {len(own)} parameters: its own {len(all_ids)} are others, so "
            "the model would not change. Build it from this model, as torch.optim.SGD(model.parameters(), "
            "...), and after all code that replaces parameters. To train other modules, put them into the "
            "model (torch.nn.ModuleDict), or call step() in your own code with "
            "default_hooks=dict(optimizer=None)"
        )
    if logs and any(foreign.values()):
        logger.warning(
            "not all parameters of the optimizer are the model's: %s. No checkpoint has them, and "
            "parameters that were replaced in the model train nothing: put their module into the model, or "
            "build the optimizer after the model is complete",
            ", ".join(
                f"{count} of {len(given[name])} are not{f' in optimizer[{name!r}]' if name else ''}"
                for name, count in foreign.items()
                if count
            ),
        )


def refuse_closures(optimizer: Any) -> None:
    """Refuse optimizers whose `step` needs a closure: a function that computes the loss again.

    The optimizer hook calls `step()` without an argument. An optimizer such as LBFGS is recognised by the
    argument that its `step` requires, according to its signature or its source. An implementation of SAM is
    recognised by its methods `first_step` and `second_step`. Objects with `param_groups` that are no
    `torch.optim.Optimizer`, such as wrappers, are checked in the same way.

    Raises:
        TypeError: an optimizer needs a closure; the message has the train step to write.
    """
    for name, each in named_values("optimizer", optimizer):
        # SAM's step needs gradients, which the closure computes before; LBFGS calls the closure itself
        first_pass = "closure(); " if hasattr(each, "first_step") and hasattr(each, "second_step") else ""
        hint = "" if first_pass else "  # one that needs gradients: loss = closure(), and then the step"
        step = getattr(each, "step", None)
        if first_pass or (callable(step) and needs_argument(step)):
            raise TypeError(
                f"{name}: {type(each).__name__}.step computes the loss again by a closure, and the optimizer "
                "hook calls step() without one: pass train_step=train_step in place of loss_fn (val_step=... "
                "says what a validation reports), and "
                f"default_hooks=dict(optimizer=None), with{_BY_CLOSURE}\n"
                f"      loss = {first_pass}trainer.optimizer.step(closure){hint}\n"
                "      return loss.detach()"
            )


def _is_optimizer(candidate: object) -> bool:
    """Return whether an object, not a class, has param groups, as optimizers and their wrappers do."""
    return hasattr(candidate, "param_groups") and not isinstance(candidate, type)


def _counterpart(candidate: object) -> str:
    """Return the end of a message about an optimizer of Keras: PyTorch's in its place; "" for other objects.

    An optimizer of Keras trains Keras' variables, not a module's parameters, and no checkpoint would have its
    state. A module has a method `apply` as well, which is another.
    """
    kind = candidate if isinstance(candidate, type) else type(candidate)
    applies = any(callable(getattr(candidate, name, None)) for name in ("apply", "apply_gradients"))
    if not applies or hasattr(candidate, "step") or issubclass(kind, torch.nn.Module):
        return ""
    of_torch = {name.lower(): name for name, each in vars(torch.optim).items() if isinstance(each, type)}
    written = of_torch.get(kind.__name__.lower())
    return (
        ", an optimizer of Keras, which trains Keras' variables: "
        + (
            f"write torch.optim.{written}(model.parameters(), lr=...)"
            if written
            else f"torch.optim has no {kind.__name__}, so write another, as "
            "torch.optim.AdamW(model.parameters(), lr=...)"
        )
        + ", with all other options too, because their defaults differ"
    )
