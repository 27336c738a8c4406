"""Find options of an optimizer that need a state which a checkpoint does not have; the resume uses it.

PyTorch's optimizers make the state of an option, such as `max_exp_avg_sq` of `amsgrad`, with the first state
of a parameter, and never later. If the option is set only on a resume, their first step raises a KeyError.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.nn.parameter import is_lazy


def why_not_stepped(optimizer: Any, group: dict[str, Any]) -> str | None:
    """Return the missing state if an optimizer cannot step with the options and the state of a param group.

    The class's own `step` is called with a copy of one parameter and of its state, and a gradient of 0.
    Return None if that works, or fails for another reason than a missing or misplaced state.
    """
    used = [p for p in group["params"] if not is_lazy(p) and optimizer.state.get(p)]
    if not used or not isinstance(optimizer, torch.optim.Optimizer):
        return None
    parameter = min(used, key=torch.Tensor.numel)
    probe = parameter.detach().clone().requires_grad_()
    probe.grad = torch.zeros_like(probe)
    stand_in = object.__new__(type(optimizer))
    stand_in.__dict__ |= optimizer.__dict__ | {
        "param_groups": [{**group, "params": [probe]}],
        "state": defaultdict(dict, {probe: copy.deepcopy(optimizer.state[parameter])}),
        "_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict(),
    }  # fmt: skip
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(stand_in)  # without the user's global step hooks
    except KeyError as error:
        return f"the state {error}"
    except AssertionError as error:
        return str(error)
    except Exception:  # such as a step that needs a closure
        return None
    return None
