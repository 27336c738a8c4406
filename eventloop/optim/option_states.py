"""Find options of an optimizer that need a state which a checkpoint lacks, and states that none has.

PyTorch's optimizers make the state of an option, such as `max_exp_avg_sq` of `amsgrad`, with the first state
of a parameter, and never later. If the option is set only on a resume, their first step raises a KeyError.
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
_MOST_WRAPPERS = 8


def why_not_stepped(optimizer: Any, number: int) -> str | None:
    """Return the missing state if an optimizer cannot step with the options and state of its param group.

    One parameter, a copy with a gradient of 0 and a copy of its state, is stepped. Of a wrapper the optimizer
    inside it is asked, because a wrapper's `step` could step the real one. Return None if the step works,
    fails for another reason than a missing or misplaced state, or could change more than that parameter.

    Args:
        number: the index of the param group.
    """
    optimizer = _innermost(optimizer)
    if (kind := _class_to_step(optimizer)) is None or number >= len(optimizer.param_groups):
        return None
    group = optimizer.param_groups[number]
    used = [p for p in group["params"] if not is_lazy(p) and optimizer.state.get(p)]
    if not used:
        return None
    parameter = min(used, key=torch.Tensor.numel)
    probe = parameter.detach().clone().requires_grad_()
    probe.grad = torch.zeros_like(probe)
    stand_in = object.__new__(kind)
    stand_in.__dict__ |= vars(optimizer) | {
        "param_groups": [{**group, "params": [probe]}],
        "state": defaultdict(dict, {probe: copy.deepcopy(optimizer.state[parameter])}),
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    try:
        with torch.no_grad():
            inspect.unwrap(kind.step)(stand_in)  # without the user's global step hooks
    except KeyError as error:
        return f"{type(optimizer).__name__} needs the state {error}"
    except AssertionError as error:
        return f"{type(optimizer).__name__} needs {error}"
    except Exception:  # such as a step that needs a closure
        return None
    return None


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer inside any wrappers, whose attribute it is; or the optimizer itself."""
    for _ in range(_MOST_WRAPPERS):
        inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
        if not inner:
            break
        optimizer = inner[0]
    return optimizer


def _class_to_step(optimizer: Any) -> Any:
    """Return the class whose `step` changes nothing but its own groups and state, or None.

    It is PyTorch's class, or a user's class whose objects hold only plain values besides these.
    """
    defining = next((base for base in type(optimizer).__mro__ if "step" in vars(base)), object)
    if defining.__module__.startswith("torch.optim."):
        return defining
    own = isinstance(optimizer, torch.optim.Optimizer) and vars(optimizer).keys() >= {"param_groups", "state"}
    others = _attributes_of_its_own(optimizer).values()
    return type(optimizer) if own and all(isinstance(value, _PLAIN) for value in others) else None


def _attributes_of_its_own(optimizer: Any) -> dict[str, Any]:
    """Return the attributes that PyTorch's optimizers do not have."""
    of_torch = {*vars(torch.optim.SGD([torch.empty(0)])), "step", "_opt_called"}  # a scheduler sets these
    return {name: value for name, value in vars(optimizer).items() if name not in of_torch}


def unsaved_tensors(optimizer: Any) -> list[str]:
    """Return the attributes with tensors that an optimizer's `state_dict` does not have.

    PyTorch's `state_dict` has only `state` and the param groups; a `state_dict` of the optimizer's own may
    have more. The parameters of the groups are no such tensors.
    """
    if getattr(type(optimizer), "state_dict", None) is not torch.optim.Optimizer.state_dict:
        return []
    if type(optimizer).__module__.startswith("torch.optim.") or optimizer._optimizer_state_dict_post_hooks:
        return []
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = _attributes_of_its_own(optimizer).items()
    return [name for name, value in own if any(id(each) not in parameters for each in _tensors_in(value))]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)
