"""Find states of an optimizer that a loaded checkpoint lacks, or that no checkpoint will have.

An option may need a state of its own, as `amsgrad` needs `max_exp_avg_sq`. PyTorch's optimizers make it in
the first step of a parameter, and never later. If the option is set only when a run resumes, the next step
raises a KeyError.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_PLAIN = (str, int, float, type(None))
"""The types of attributes that a step of a copy cannot change in the original."""
_MOST_WRAPPERS = 8
"""The largest number of wrappers around an optimizer that are looked through."""


def why_not_stepped(optimizer: Any, number: int) -> str | None:
    """Return a text that names the state without which an optimizer cannot step a param group; else None.

    To find out, a copy of the optimizer makes a step with a copy of one parameter, of which the gradient is
    0, and a copy of its state. In a wrapper this is done with the optimizer inside, because the wrapper's
    `step` could step the real optimizer. Return None if the step works, if it fails for another reason, or if
    it cannot be made because it could change more than the copies.

    Args:
        optimizer: the optimizer, or a wrapper of it.
        number: the index of the param group.
    """
    optimizer = _innermost(optimizer)
    if (kind := _class_to_step(optimizer)) is None or number >= len(optimizer.param_groups):
        return None
    group = optimizer.param_groups[number]
    with_state = [p for p in group["params"] if not is_lazy(p) and optimizer.state.get(p)]
    if not with_state:
        return None
    parameter = min(with_state, key=torch.Tensor.numel)
    copied = parameter.detach().clone().requires_grad_()
    copied.grad = torch.zeros_like(copied)
    copy_of_optimizer = object.__new__(kind)
    copy_of_optimizer.__dict__ |= vars(optimizer) | {
        "param_groups": [{**group, "params": [copied]}],
        "state": defaultdict(dict, {copied: copy.deepcopy(optimizer.state[parameter])}),
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    try:
        with torch.no_grad():
            inspect.unwrap(kind.step)(copy_of_optimizer)  # unwrapped, so that no global step hook is called
    except KeyError as error:
        return f"{type(optimizer).__name__} needs the state {error}"
    except AssertionError as error:
        return f"{type(optimizer).__name__} needs {error}"
    except Exception:  # such as a step that needs a closure
        return None
    return None


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer inside of wrappers, which have it as an attribute, or the optimizer itself."""
    for _ in range(_MOST_WRAPPERS):
        inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        if not inner:
            break
        optimizer = inner[0]
    return optimizer


def _class_to_step(optimizer: Any) -> Any:
    """Return the class of a copy of an optimizer whose `step` cannot change the original; else None.

    It is the class of PyTorch that defines `step`, or a user's class whose objects have only plain values
    besides the param groups and the state.
    """
    defining = next((base for base in type(optimizer).__mro__ if "step" in vars(base)), object)
    if defining.__module__.startswith("torch.optim."):
        return defining
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    has_groups = is_optimizer and vars(optimizer).keys() >= {"param_groups", "state"}
    others = _attributes_of_its_own(optimizer).values()
    return type(optimizer) if has_groups and all(isinstance(value, _PLAIN) for value in others) else None


def _attributes_of_its_own(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that PyTorch's own optimizers do not have, by name."""
    # a scheduler of PyTorch sets `step` and `_opt_called`
    of_torch = {*vars(torch.optim.SGD([torch.empty(0)])), "step", "_opt_called"}
    return {name: value for name, value in vars(optimizer).items() if name not in of_torch}


def unsaved_tensors(optimizer: Any) -> list[str]:
    """Return the names of attributes of an optimizer with tensors that its `state_dict` does not have.

    PyTorch's `state_dict` has only `state` and the param groups. If the optimizer's class or a hook defines
    the `state_dict`, return [], because it may have more. Parameters of the groups do not count.
    """
    if getattr(type(optimizer), "state_dict", None) is not torch.optim.Optimizer.state_dict:
        return []
    if type(optimizer).__module__.startswith("torch.optim.") or optimizer._optimizer_state_dict_post_hooks:
        return []
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = _attributes_of_its_own(optimizer).items()
    return [name for name, value in own if any(id(each) not in parameters for each in _tensors_in(value))]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
