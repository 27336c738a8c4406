"""Add the gradients of several iterations, a window, for one step of the optimizer; its hook uses this."""

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
    """An unfinished window as a checkpoint has it."""

    count: Count
    loss_scaling: str
    divisor: Annotated[int, msgspec.Meta(ge=1)] = 1
    gradients: list[torch.Tensor | None] = []
    parameters: list[str] = []


class Accumulation:
    """Count the iterations of a window, and postpone the exchange of gradients between ranks to its end.

    Args:
        cumulative_iters: iterations per optimizer step.
    """

    def __init__(self, cumulative_iters: int) -> None:
        self._cumulative_iters = cumulative_iters
        self.count = 0
        """Iterations whose gradients wait for the step."""
        self.divisor = 1
        """The number of iterations of this window, by which its losses are divided."""
        self.model: torch.nn.Module | None = None
        self.loss_fn: object = None
        """The trainer's loss function, whose parameters have the names of a module in it."""
        self._given: Any = None
        self._optimizers: Sequence[torch.optim.Optimizer] = []
        self._loaded: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Parameters and their gradients from a checkpoint, kept because a lazy parameter takes none yet."""
        self._no_sync: AbstractContextManager[None] | None = None
        """Context that suspends the exchange of gradients; open from the forward pass to after backward."""
        self._fsdp: list[Any] = []
        """The modules of the model that FSDP2 shards."""

    def use(self, given: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Set the optimizers whose gradients are accumulated.

        Args:
            given: `trainer.optimizer`, which may be one optimizer or a mapping of several.
            optimizers: the same ones as a list.
        """
        self._given, self._optimizers = given, optimizers

    def open(self, model: torch.nn.Module) -> None:
        """Find the modules that FSDP2 shards, and store a checkpoint's gradients in the parameters."""
        self._put_loaded()
        self._fsdp = fsdp_modules(model)

    def length(self, trainer: Trainer) -> int:
        """Return the number of iterations, or batches of an iteration, of a window that begins now."""
        if trainer.counting.accumulator is not None:
            return trainer.counting.batches
        if trainer.max_iters is None:
            return self._cumulative_iters
        left = trainer.max_iters - trainer.iter
        return left if 0 < left < self._cumulative_iters else self._cumulative_iters

    def suspend_exchange(self, trainer: Trainer) -> None:
        """Suspend the exchange of gradients between ranks in an iteration without an optimizer step.

        This happens before the forward pass, because DistributedDataParallel reads the setting there.
        """
        self.resume_exchange()  # still suspended after a skipped batch
        window = self.divisor if self.count else self.length(trainer)
        if self.count + 1 < window:
            if (model := _distributed(trainer.model)) is not None:
                self._no_sync = model.no_sync()
            elif self.postpones_reduction(trainer):
                self._no_sync = _without_reduction(self._fsdp)
            if self._no_sync is not None:
                self._no_sync.__enter__()

    def resume_exchange(self) -> None:
        """Resume the exchange of gradients, if it is suspended."""
        if self._no_sync is not None:
            opened, self._no_sync = self._no_sync, None
            opened.__exit__(None, None, None)

    def backward(self, loss: torch.Tensor, precision: MixedPrecision | None) -> None:
        """Run backward on the loss divided by the iterations of the window.

        A backward that starts with the gradient 1 / n yields bit-identical gradients to loss / n. It avoids
        the division and its node in the graph, which take a third of the time of a small backward.
        """
        if (
            self.count >= self.divisor
        ):  # an error prevented the step of a full window, which has these gradients
            if precision is not None:
                precision.end_forward()
            for module in self._fsdp:
                module.reshard()  # FSDP2 would keep its weights beyond the step, as there is no backward
            return
        if precision is not None:
            precision.backward(loss if self.divisor == 1 else loss / self.divisor)
        else:
            loss.backward(None if self.divisor == 1 else torch.full_like(loss, 1.0 / self.divisor))
        self.count += 1

    def ends(self, trainer: Trainer) -> bool:
        """Return whether the iteration, whose backward was run, ends with a step."""
        self.resume_exchange()
        if self.count >= self.divisor:
            return True
        if trainer.compiled and self.count == 1:  # the next gradients are added to them, in place
            self._copy_gradients()
        trainer.within = "iter"  # the gradients are added: an error must not repeat the batch
        self.allow_schedulers()
        return False

    def postpones_reduction(self, trainer: Trainer) -> bool:
        """Return True if FSDP2 reduces gradients once per window, which requires a known last iteration."""
        several = trainer.counting.accumulator is not None
        length = trainer.position.length if several else trainer.max_iters
        return bool(self._fsdp) and length is not None

    def rescale(self, model: torch.nn.Module) -> None:
        """Rescale gradients to the actual number of iterations in the window, and average them over ranks."""
        parameters = self.parameters()
        for parameter, mean in zip(parameters, self.means(model) or [], strict=False):
            parameter.grad = mean
        self.multiply_gradients(self.divisor / self.count)

    def complete(self, trainer: Trainer) -> None:
        """Prepare the gradients of an iteration of several batches for its step.

        Raises:
            RuntimeError: FSDP2 was to reduce them in the backward of a batch that the loader did not give.
        """
        self.resume_exchange()
        if self.count < self.divisor:  # a loader of unknown length ended within it
            if self.postpones_reduction(trainer):
                position = trainer.position
                raise RuntimeError(
                    f"expected {position.length} batches, the length of the train loader, got "
                    f"{position.batches + self.count}: FSDP2 reduces the gradients of an update in its last "
                    'batch, so with unit="update" give a loader whose length is right, or none'
                )
            self.rescale(trainer.model)

    def warn_of_batchnorm(self, model: torch.nn.Module) -> None:
        """Warn of BatchNorm layers, whose statistics do not accumulate."""
        modules = model.modules()
        if self._cumulative_iters > 1 and any(isinstance(module, _BatchNorm) for module in modules):
            warnings.warn(
                f"cumulative_iters={self._cumulative_iters} makes the gradients those of larger batches, "
                "but the statistics of BatchNorm remain those of each batch",
                UserWarning,
                stacklevel=3,
            )

    def multiply_gradients(self, factor: float) -> None:
        """Multiply the gradients of all optimizers, those of DTensors too."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        torch._foreach_mul_(local_tensors(gradients), factor)

    def means(self, model: torch.nn.Module) -> list[torch.Tensor | None] | None:
        """Return the gradients averaged over ranks; None for a model that is not distributed."""
        wrapped = _distributed(model)
        return None if wrapped is None else _mean_over_ranks(wrapped, self.parameters())

    def allow_schedulers(self) -> None:
        """Prevent a scheduler's warning that it is stepped before the first optimizer step."""
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def state(self, loss_scaling: str) -> dict[str, Any]:
        """Return the position in the window, and each parameter's gradient, with the parameters' names."""
        self._put_loaded()
        state: dict[str, Any] = {"count": self.count, "loss_scaling": loss_scaling}
        if self.count:
            state["divisor"] = self.divisor
            state["gradients"] = [parameter.grad for parameter in self.parameters()]
            state["parameters"] = self._names()
        return state

    def loaded(self, saved: SavedWindow) -> Accumulation:
        """Return a copy with a saved window, which keeps its length even if `cumulative_iters` has changed.

        A copy, because a resume that is refused later restores the attributes of hooks, not of their parts.

        Raises:
            ValueError: the gradients do not fit the optimizers' parameters.
        """
        gradients = in_order_of(self._names(), saved.parameters, saved.gradients)
        window = copy(self)
        window._loaded = self._checked_gradients(gradients) if saved.count else []
        window.count, window.divisor = saved.count, saved.divisor if saved.count else self.divisor
        return window

    def _copy_gradients(self) -> None:
        """Copy the gradients, because the CUDA graph of the next iteration would overwrite them."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _names(self) -> list[str]:
        return [] if self.model is None else labels(unwrap(self.model), self.loss_fn, self._given)

    def _put_loaded(self) -> None:
        """Store the loaded gradients in the parameters; called when the resume can no longer be refused."""
        for parameter, gradient in self._loaded:
            parameter.grad = gradient
        self._loaded = []

    def _checked_gradients(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return each parameter with a copy of its saved gradient, on its device and of its type."""
        parameters = self.parameters()
        if len(parameters) != len(gradients) or any(
            gradient is not None and not is_lazy(parameter) and gradient.shape != parameter.shape
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ):
            raise ValueError(
                f"the checkpoint's {len(gradients)} accumulated gradients do not fit the optimizer's "
                f"{len(parameters)} parameters: resume with the model and optimizer of that run"
            )
        return [
            (parameter, None if gradient is None else gradient.to(parameter, copy=True))
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]


@contextmanager
def _without_reduction(modules: Sequence[Any]) -> Iterator[None]:
    """Let FSDP2 keep whole gradients on each rank, and reduce them in the next backward outside the block."""
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def _distributed(model: torch.nn.Module) -> DistributedDataParallel | None:
    model = getattr(model, "_orig_mod", model)  # inside torch.compile
    return model if isinstance(model, DistributedDataParallel) else None


def _mean_over_ranks(
    model: DistributedDataParallel, parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients averaged over ranks, as DistributedDataParallel does without `no_sync`.

    Waits for the device to learn which parameters have a gradient on any rank, so it is used only at the end
    of a run and for checkpoints.
    """
    group = model.process_group
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    present = present.to(parameters[0].device)
    dist.all_reduce(present, dist.ReduceOp.MAX, group=group)
    means: list[torch.Tensor | None] = []
    for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
        if not anywhere:
            means.append(None)
            continue
        mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(mean, group=group)
        means.append(mean.div_(dist.get_world_size(group)))
    return means
