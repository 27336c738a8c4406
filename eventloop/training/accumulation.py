"""Accumulate the gradients of several iterations for one step of the optimizer.

The optimizer hook uses this module. The iterations whose gradients are added for one step are a window.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from eventloop.checkpoint.weights import unwrap
from eventloop.optim.meshes import local_tensors
from eventloop.optim.parameter_names import in_order_of, labels
from eventloop.state.schema import Count
from eventloop.state.sharded import fsdp_modules

if TYPE_CHECKING:
    from eventloop.training.mixed_precision import MixedPrecision
    from eventloop.training.trainer import Trainer


class SavedWindow(msgspec.Struct):
    """An unfinished window in a checkpoint."""

    count: Count
    """The number of iterations whose gradients were added."""
    loss_scaling: str
    """The kind of loss scaling, which the gradients contain."""
    divisor: Annotated[int, msgspec.Meta(ge=1)] = 1
    """The number of iterations of the whole window."""
    gradients: list[torch.Tensor | None] = []
    parameters: list[str] = []
    """The names of the parameters, in the order of the gradients."""


class Accumulation:
    """Count the iterations of a window, and postpone the exchange of gradients between ranks to its end.

    Args:
        cumulative_iters: iterations per optimizer step.
    """

    def __init__(self, cumulative_iters: int) -> None:
        self._cumulative_iters = cumulative_iters
        self.count = 0
        """The number of iterations in the window so far, whose gradients are added and not used yet."""
        self.divisor = 1
        """The number of iterations of the whole window, by which its losses are divided."""
        self.model: torch.nn.Module | None = None
        self.loss_fn: object = None
        """The trainer's loss function, which may be a module with parameters."""
        self._given: Any = None  # `trainer.optimizer`, one optimizer or a mapping of several
        self._optimizers: Sequence[torch.optim.Optimizer] = []
        self._loaded: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Parameters with their gradients from a checkpoint, until `_put_loaded` stores the gradients."""
        self._no_sync: AbstractContextManager[None] | None = None
        """The open context in which ranks exchange no gradients, from the forward pass to after backward."""
        self._fsdp: list[Any] = []
        """The modules of the model that FSDP2 shards."""

    def use(self, given: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Set the optimizers whose gradients are accumulated.

        Args:
            given: `trainer.optimizer`, which may be one optimizer or a mapping of several.
            optimizers: the optimizers in `given`, as a list.
        """
        self._given, self._optimizers = given, optimizers

    def open(self, model: torch.nn.Module) -> None:
        """Prepare for a run: find the modules that FSDP2 shards, and store the gradients of a checkpoint."""
        self._put_loaded()
        self._fsdp = fsdp_modules(model)

    def length(self, trainer: Trainer) -> int:
        """Return the number of iterations of a window that begins now; the last one of a run may be shorter.

        With `unit="update"` a window is one iteration, and the result is its number of batches.
        """
        if trainer.counting.accumulator is not None:
            return trainer.counting.batches
        if trainer.max_iters is None:
            return self._cumulative_iters
        remaining = trainer.max_iters - trainer.iter
        return remaining if 0 < remaining < self._cumulative_iters else self._cumulative_iters

    def suspend_exchange(self, trainer: Trainer) -> None:
        """Suspend the exchange of gradients between ranks in an iteration without an optimizer step.

        It is called before the forward pass, in which DistributedDataParallel reads the setting.
        """
        self.resume_exchange()  # a skipped batch has left it suspended
        length = self.divisor if self.count else self.length(trainer)
        if self.count + 1 < length:  # the window does not end with this iteration
            if (model := _distributed(trainer.model)) is not None:
                self._no_sync = model.no_sync()
            elif self.postpones_reduction(trainer):
                self._no_sync = _without_reduction(self._fsdp)
            if self._no_sync is not None:
                self._no_sync.__enter__()

    def resume_exchange(self) -> None:
        """Resume the exchange of gradients, if it is suspended."""
        if self._no_sync is not None:
            no_sync, self._no_sync = self._no_sync, None
            no_sync.__exit__(None, None, None)

    def backward(self, loss: torch.Tensor, precision: MixedPrecision | None) -> None:
        """Run backward on the loss divided by the number of iterations n of the window, and count it.

        Instead of dividing the loss, backward starts with the gradient 1 / n, which gives the same gradients
        to the bit. The division and its node in the graph would take a third of the time of a small backward.
        """
        # an error has prevented the step of a full window, so this iteration only repeats the step
        if self.count >= self.divisor:
            if precision is not None:
                precision.end_forward()
            for module in self._fsdp:
                module.reshard()  # otherwise done by backward; FSDP2 would keep all weights in memory
            return
        if precision is not None:
            precision.backward(loss if self.divisor == 1 else loss / self.divisor)
        else:
            loss.backward(None if self.divisor == 1 else torch.full_like(loss, 1.0 / self.divisor))
        self.count += 1

    def ends(self, trainer: Trainer) -> bool:
        """Return whether the iteration, whose backward was run, ends with an optimizer step.

        If not, make sure that a run that continues after an error does not repeat the iteration.
        """
        self.resume_exchange()
        if self.count >= self.divisor:
            return True
        self.copy_first_gradients(trainer)
        trainer.within = "iter"  # a repeated batch would add its gradients twice
        self.allow_schedulers()
        return False

    def postpones_reduction(self, trainer: Trainer) -> bool:
        """Return whether FSDP2 reduces gradients only in the last iteration of a window.

        This is possible only if the length of the run, or with `unit="update"` that of the loader, is known.
        """
        is_update = trainer.counting.accumulator is not None
        length = trainer.position.length if is_update else trainer.max_iters
        return bool(self._fsdp) and length is not None

    def rescale(self, model: torch.nn.Module) -> None:
        """Average the gradients over ranks, and rescale them because the window ends early."""
        parameters = self.parameters()
        for parameter, mean in zip(parameters, self.means(model) or [], strict=False):
            parameter.grad = mean
        # each loss was divided by the planned length of the window
        self.multiply_gradients(self.divisor / self.count)

    def complete(self, trainer: Trainer) -> None:
        """Prepare the gradients of an iteration of several batches for its step.

        Raises:
            RuntimeError: the loader gave fewer batches than its length, and FSDP2 was to reduce the gradients
                in the last one.
        """
        self.resume_exchange()
        if self.count < self.divisor:  # a loader of unknown length ended within the iteration
            if self.postpones_reduction(trainer):
                position = trainer.position
                raise RuntimeError(
                    f"expected {position.length} batches, the length of the train loader, got "
                    f"{position.batches + self.count}: FSDP2 reduces the gradients of an update in its last "
                    'batch, so with unit="update" give a loader whose length is right, or none'
                )
            self.rescale(trainer.model)

    def warn_of_batchnorm(self, model: torch.nn.Module) -> None:
        """Warn if the model has BatchNorm layers, whose statistics do not accumulate."""
        modules = model.modules()
        if self._cumulative_iters > 1 and any(isinstance(module, _BatchNorm) for module in modules):
            warnings.warn(
                f"cumulative_iters={self._cumulative_iters} makes the gradients those of larger batches, "
                "but the statistics of BatchNorm remain those of each batch",
                UserWarning,
                stacklevel=3,
            )

    def multiply_gradients(self, factor: float) -> None:
        """Multiply the gradients of all parameters in place; of a DTensor each rank multiplies its part."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        torch._foreach_mul_(local_tensors(gradients), factor)

    def means(self, model: torch.nn.Module) -> list[torch.Tensor | None] | None:
        """Return the gradients averaged over ranks; None if the model is no DistributedDataParallel."""
        distributed = _distributed(model)
        return None if distributed is None else _mean_over_ranks(distributed, self.parameters())

    def allow_schedulers(self) -> None:
        """Prevent PyTorch's warning that a scheduler is stepped before the first optimizer step."""
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def state(self, loss_scaling: str) -> dict[str, Any]:
        """Return the unfinished window for a checkpoint, with the fields of `SavedWindow`."""
        self._put_loaded()
        state: dict[str, Any] = {"count": self.count, "loss_scaling": loss_scaling}
        if self.count:
            state["divisor"] = self.divisor
            state["gradients"] = [parameter.grad for parameter in self.parameters()]
            state["parameters"] = self._names()
        return state

    def loaded(self, saved: SavedWindow) -> Accumulation:
        """Return a copy of this object, with the state of a saved window.

        The window keeps its length even if `cumulative_iters` has changed. This object stays unchanged,
        because the hook uses it again if the resume fails later.

        Raises:
            ValueError: the gradients do not fit the optimizers' parameters.
        """
        gradients = in_order_of(self._names(), saved.parameters, saved.gradients)
        accumulation = copy(self)
        accumulation._loaded = self._checked_gradients(gradients) if saved.count else []
        accumulation.count = saved.count
        accumulation.divisor = saved.divisor if saved.count else self.divisor
        return accumulation

    def copy_first_gradients(self, trainer: Trainer) -> None:
        """Replace the gradients of a window's first batch by copies, if code is compiled.

        The CUDA graph of the next batch overwrites them. Later batches add to the copies in place.
        """
        if not trainer.compiled or self.count != 1 or self.divisor == 1:
            return
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _names(self) -> list[str]:
        """Return the names of the optimizers' parameters."""
        return [] if self.model is None else labels(unwrap(self.model), self.loss_fn, self._given)

    def _put_loaded(self) -> None:
        """Store the gradients of a checkpoint in the parameters.

        It is called later than `loaded`: when the resume can no longer fail, and lazy parameters have shapes.
        """
        for parameter, gradient in self._loaded:
            parameter.grad = gradient
        self._loaded = []

    def _checked_gradients(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return each parameter with a copy of its saved gradient, on its device and of its type.

        Raises:
            ValueError: the number of the gradients, or a shape, is not that of the parameters.
        """
        parameters = self.parameters()
        if len(parameters) != len(gradients) or not all(map(_fits, gradients, parameters)):
            raise ValueError(
                f"the checkpoint's {len(gradients)} accumulated gradients do not fit the optimizer's "
                f"{len(parameters)} parameters: resume with the model and optimizer of that run"
            )
        return [
            (parameter, None if gradient is None else gradient.to(parameter, copy=True))
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]


def _fits(gradient: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Return whether a gradient has the parameter's shape; True without a gradient or without a shape yet."""
    return gradient is None or is_lazy(parameter) or gradient.shape == parameter.shape


@contextmanager
def _without_reduction(modules: Sequence[Any]) -> Iterator[None]:
    """Let backward passes in the block add gradients on each rank alone.

    FSDP2 reduces these gradients in the next backward pass outside of the block.
    """
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def _distributed(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the model if it is a DistributedDataParallel, also one that was compiled, else None."""
    model = getattr(model, "_orig_mod", model)  # the model that was given to torch.compile
    return model if isinstance(model, DistributedDataParallel) else None


def _mean_over_ranks(
    model: DistributedDataParallel, parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients averaged over ranks, as a DistributedDataParallel averages them in backward.

    A parameter without a gradient on any rank gets None. The training thread waits for the device to learn
    which parameters these are, so this is used only at the end of a run and for checkpoints.
    """
    group = model.process_group
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    has_gradient = has_gradient.to(parameters[0].device)
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group)
    means: list[torch.Tensor | None] = []
    for parameter, on_any_rank in zip(parameters, has_gradient.tolist(), strict=True):
        if not on_any_rank:
            means.append(None)
            continue
        mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(mean, group=group)
        means.append(mean.div_(dist.get_world_size(group)))
    return means
