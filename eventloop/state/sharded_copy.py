"""Copy the tensors of a model that is sharded over ranks, to hold an average of its weights.

`BaseAveragedModel` uses this module. FSDP2 refuses to copy a model, so the copy is a tree of modules without
a forward pass. It has a tensor for each of the model's, with the same name, in the same order, and with the
same part of it on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from eventloop.state.sharded import reshard


class ShardedCopy(nn.Module):
    """The parameters and buffers of one module of a sharded model, without its forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError: the copy has values and no forward pass."""
        raise RuntimeError(
            "the average of a model that is sharded over ranks has values but no forward pass: evaluate it "
            "with trainer.val(), for which EMAHook swaps it into the model, or load its state_dict() into a "
            "model on the same mesh"
        )


def copy_shards(model: nn.Module, copied: Callable[[Tensor, bool], Tensor]) -> nn.Module:
    """Return a tree of `ShardedCopy` with a copy of each tensor of `model`, by the same names.

    Args:
        model: the model; modules and tensors that it has several times are shared in the copy, too.
        copied: `(tensor, is_parameter) -> copy`, called once for each tensor.

    Raises:
        TypeError: the model's own `named_parameters` or `state_dict` has names that its modules do not give.
    """
    reshard(model)
    # the copies of modules, buffers and parameters, by the id of the original
    made: dict[int, Any] = {id(module): ShardedCopy() for module in model.modules()}
    made |= {id(buffer): copied(buffer, False) for buffer in model.buffers()}
    made |= {id(p): nn.Parameter(copied(p, True), requires_grad=False) for p in model.parameters()}
    for module in model.modules():
        tree = made[id(module)]
        for kind in ("_parameters", "_buffers", "_modules"):
            members = getattr(module, kind).items()
            getattr(tree, kind).update((name, made.get(id(member))) for name, member in members)
        tree._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
        _copy_hooks(tree, module)
    _refuse_other_names(model, made)
    return cast(nn.Module, made[id(model)])


def _copy_hooks(tree: nn.Module, module: nn.Module) -> None:
    """Copy the hooks that change names in a `state_dict`, as those of torch's `checkpoint_wrapper` do."""
    tree._state_dict_hooks.update(module._state_dict_hooks)
    hooks: Any = module._load_state_dict_pre_hooks
    for each in hooks.values():
        # the hooks of FSDP2 are left out: they change the model itself
        if not each.hook.__module__.startswith("torch.distributed.fsdp"):
            tree._register_load_state_dict_pre_hook(each.hook, each.with_module)


def _refuse_other_names(model: nn.Module, made: dict[int, Any]) -> None:
    """Raise TypeError if the model gives one of its tensors a name that the copy does not have.

    Args:
        made: the copies of modules and tensors, by the id of the original.
    """
    tree = made[id(model)]
    for method, theirs, ours in (
        ("named_parameters", model.named_parameters(), tree.named_parameters()),
        ("state_dict", model.state_dict(keep_vars=True).items(), tree.state_dict().items()),
    ):
        names = dict(ours)
        unknown = [name for name, value in theirs if id(value) in made and name not in names]
        if unknown:
            raise TypeError(
                f"{unknown[0]!r} is a name of {type(model).__name__}.{method}(): expected one of the names "
                f"that its modules give, such as {next(iter(names), None)!r}, because the average of a model "
                "that is sharded over ranks has those; remove what changes the names"
            )
