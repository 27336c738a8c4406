"""An optimizer hook that accumulates the gradients of several iterations for one step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from eventloop.checkpoint.weights import unwrap
from eventloop.costs.step_clock import BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS
from eventloop.events import (
    COMPLETED,
    AfterBackward,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    BeforeSaveCheckpoint,
    BeforeTrain,
    BeforeTrainIter,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import on
from eventloop.hooks.optimizer import OptimizerHook, detached, explain_freed_graph, loss_of
from eventloop.optim.parameter_names import in_order_of, labels
from eventloop.state.schema import Count, read_as
from eventloop.state.sharded import fsdp_modules
from eventloop.util.checks import positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

Scaling = Literal["none", "static", "dynamic"]
"""How losses are scaled against underflow; gradients in a checkpoint fit only the same scaling."""


class GradientCumulativeOptimizerHook(OptimizerHook):
    """Step every `cumulative_iters` iterations with the mean of their gradients.

        hooks=[GradientCumulativeOptimizerHook(cumulative_iters=4, grad_clip=dict(max_norm=35))]

    A step then acts like one with a batch `cumulative_iters` times larger. Windows of iterations are counted
    over the whole run, across epochs, as in mmcv and MMEngine. The last window is shorter where the run ends
    within it. Each loss is divided by the iterations of its window, so 8 iterations with `cumulative_iters=3`
    have the divisors `3 3 3 3 3 3 2 2`. Where the length of the run is not known in advance, the gradients of
    a window that ended early are rescaled when the last epoch ends. A run that is stopped within a window
    saves its gradients in the checkpoint, and continues the window when it is resumed.

    `after_backward` is emitted in every iteration, `before_optimizer_step` and `after_optimizer_step` only
    with a step. Schedulers that count iterations count all of them, as in MMEngine. Under
    `DistributedDataParallel` the ranks exchange gradients once a window, and under FSDP2 (`fully_shard`) too
    if the length of the run is known in advance; other wrappers exchange them in every iteration.

    Args:
        cumulative_iters: iterations per optimizer step.
        grad_clip, detect_anomalous_params: see `OptimizerHook`; gradients are clipped once per step.

    Raises:
        TypeError, ValueError: `cumulative_iters` is not a positive int, or `grad_clip` is invalid.

    Warns:
        UserWarning: the model has BatchNorm, whose statistics remain those of single batches.
    """

    loss_scaling: Scaling = "none"

    def __init__(
        self,
        cumulative_iters: int = 1,
        grad_clip: Mapping[str, Any] | None = None,
        detect_anomalous_params: bool = False,
    ) -> None:
        super().__init__(grad_clip, detect_anomalous_params)
        positive("cumulative_iters", cumulative_iters)
        self._cumulative_iters = cumulative_iters
        self._model: torch.nn.Module | None = None
        self._divisor = 1
        """The number of iterations of this window, by which its losses are divided."""
        self._loaded: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Parameters and their gradients from a checkpoint, kept because a lazy parameter takes none yet."""
        self._no_sync: AbstractContextManager[None] | None = None
        """Context that suspends the exchange of gradients; open from the forward pass to after backward."""
        self._fsdp: list[Any] = []
        """The modules of the model that FSDP2 shards."""
        self._schedulers_allowed = False
        self._default_backward = type(self)._backward is GradientCumulativeOptimizerHook._backward

    def check(self, trainer: Trainer) -> None:
        """Warn about BatchNorm layers, and store the optimizers, which a checkpoint's gradients need."""
        super().check(trainer)
        self._model = trainer.model
        if trainer.optimizer is not None:
            self._set_optimizers(trainer.optimizer)
        modules = trainer.model.modules()
        if self._cumulative_iters > 1 and any(isinstance(module, _BatchNorm) for module in modules):
            warnings.warn(
                f"cumulative_iters={self._cumulative_iters} makes the gradients those of larger batches, "
                "but the statistics of BatchNorm remain those of each batch",
                UserWarning,
                stacklevel=2,
            )

    # --- accumulating --------------------------------------------------------------------------------------

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Find the modules that FSDP2 shards, and store a checkpoint's gradients in the parameters."""
        self._put_loaded()
        self._fsdp = fsdp_modules(trainer.model)

    @on(priority=Priority.LOWEST)
    def before_train_iter(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Suspend the exchange of gradients between ranks in an iteration without an optimizer step.

        This happens before the forward pass, because DistributedDataParallel reads the setting there.
        """
        self._leave_no_sync()  # still open after a skipped batch
        window = self._divisor if self._count else self._window(trainer)
        if self._count + 1 < window:
            if (model := _distributed(trainer.model)) is not None:
                self._no_sync = model.no_sync()
            elif self._postpones_reduction(trainer):
                self._no_sync = _without_reduction(self._fsdp)
            if self._no_sync is not None:
                self._no_sync.__enter__()

    def _postpones_reduction(self, trainer: Trainer) -> bool:
        """Return True if FSDP2 reduces gradients once per window, which requires a known last iteration."""
        return bool(self._fsdp) and trainer.max_iters is not None

    def _leave_no_sync(self) -> None:
        if self._no_sync is not None:
            opened, self._no_sync = self._no_sync, None
            opened.__exit__(None, None, None)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Add this iteration's gradients, and step at the end of the window.

        Raises:
            TypeError, RuntimeError: see `OptimizerHook.after_train_iter`.
        """
        # helpers with nothing to do are not called, as in OptimizerHook
        clock = trainer.clock
        device, began = clock.device, perf_counter() - clock.excluded
        if trainer.optimizer is not self._given or self._given is None:
            self._set_optimizers(trainer.optimizer)
        loss = loss_of(trainer.outputs)
        if not self._count:
            self._divisor = self._window(trainer)
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
        if self._anomalous is not None:
            self._anomalous.check(loss, trainer.model)
        self._other_seconds = 0.0
        backward = perf_counter() - clock.excluded
        if device is not None:
            device.mark(BACKWARD_BEGINS)
        if self._count < self._divisor:
            try:
                self._accumulate(loss)
            except RuntimeError as error:
                explain_freed_graph(error)
                raise
            self._count += 1
        else:  # an error prevented the step of a full window, which has this iteration's gradients
            self._leave_forward()
        clock.backward = perf_counter() - clock.excluded - backward
        if device is not None:
            device.mark(BACKWARD_ENDS)
        if self._no_sync is not None:
            self._leave_no_sync()
        ends = self._count >= self._divisor
        if not ends:
            trainer.within = "iter"  # the gradients are added: an error must not repeat the batch
            if not self._schedulers_allowed:
                self._allow_schedulers()
        if self._wanted[AfterBackward]:
            self._announce(trainer, AfterBackward)
        if ends:
            self._step(trainer)
            trainer.within = "iter"
        if device is not None:
            device.mark(OPTIMIZER_ENDS)
        trainer.outputs = detached(trainer.outputs)
        clock.optimizer = perf_counter() - clock.excluded - began - clock.backward - self._other_seconds

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Step with the accumulated gradients when the last epoch ended within a window."""
        self._leave_no_sync()  # still open after a failed forward pass
        if self._count and event.reason == COMPLETED and self.is_last_train_epoch(trainer):
            if self._count < self._divisor:
                if self._postpones_reduction(trainer):
                    return  # FSDP2 reduces gradients only in the backward of the window's last iteration
                self._rescale_gradients(trainer)
            self._step(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Warn if accumulated gradients are left without a step."""
        if self._count:
            keeper = (
                "FSDP2 keeps them on each rank, and only another train() of this trainer uses them"
                if self._postpones_reduction(trainer)
                else "a checkpoint saved now holds them, and a run resumed from it uses them"
            )
            left = f"the gradients of {self._count} iterations accumulated and not yet in a step"
            logger.warning("training ended (%s) with %s; %s", event.reason, left, keeper)

    # --- stepping ------------------------------------------------------------------------------------------

    def _window(self, trainer: Trainer) -> int:
        """Return the number of iterations of a window that begins now."""
        if trainer.max_iters is None:
            return self._cumulative_iters
        left = trainer.max_iters - trainer.iter
        return left if 0 < left < self._cumulative_iters else self._cumulative_iters

    def _accumulate(self, loss: torch.Tensor) -> None:
        """Run backward on the loss divided by the iterations of the window.

        A backward that starts with the gradient 1 / n yields bit-identical gradients to loss / n. It avoids
        the division and its node in the graph, which take a third of the time of a small backward. A subclass
        with its own `_backward` gets the divided loss.
        """
        divisor = self._divisor
        if divisor == 1:
            self._backward(loss)
        elif self._default_backward:
            loss.backward(torch.full_like(loss, 1.0 / divisor))
        else:
            self._backward(loss / divisor)

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _leave_forward(self) -> None:
        """Reshard after a forward pass without a backward; FSDP2 would keep its weights beyond the step."""
        for module in self._fsdp:
            module.reshard()

    def _rescale_gradients(self, trainer: Trainer) -> None:
        """Rescale gradients to the actual number of iterations in the window, and average them over ranks."""
        parameters = [*self._parameters()]
        if (model := _distributed(trainer.model)) is not None:
            for parameter, mean in zip(parameters, _mean_over_ranks(model, parameters), strict=True):
                parameter.grad = mean
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, self._divisor / self._count)

    def _allow_schedulers(self) -> None:
        """Prevent a scheduler's warning that it is stepped before the first optimizer step."""
        self._schedulers_allowed = True
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def _set_optimizers(self, given: Any) -> None:
        super()._set_optimizers(given)
        self._schedulers_allowed = False

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def settings(self) -> dict[str, Any]:
        """Return how gradients are clipped, and the iterations per step."""
        return {**super().settings(), "cumulative_iters": self._cumulative_iters}

    # --- saving and resuming -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the window, and each parameter's gradient, with the parameters' names."""
        self._put_loaded()
        state: dict[str, Any] = {"count": self._count, "loss_scaling": self.loss_scaling}
        if self._count:
            state["divisor"] = self._divisor
            state["gradients"] = [parameter.grad for parameter in self._parameters()]
            state["parameters"] = self._names()
        return state

    def _names(self) -> list[str]:
        return [] if self._model is None else labels(unwrap(self._model), self._given)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the saved gradients of an unfinished window.

        The unfinished window keeps its length, even if `cumulative_iters` has changed.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
            ValueError: the losses were scaled in another way, or the gradients do not fit the trainer's
                parameters.
        """
        saved = read_as(_State, state, f"{type(self).__name__} cannot take its state")
        if saved.loss_scaling != self.loss_scaling:
            raise ValueError(
                f"the checkpoint's run had loss scaling {saved.loss_scaling!r}, this hook has "
                f"{self.loss_scaling!r}: give the hook the loss_scale and dtype of that run, or load only "
                "the weights, with load_checkpoint"
            )
        gradients = in_order_of(self._names(), saved.parameters, saved.gradients)
        self._loaded = self._checked_gradients(gradients) if saved.count else []
        self._count, self._divisor = saved.count, saved.divisor if saved.count else self._divisor

    def _put_loaded(self) -> None:
        """Store the loaded gradients in the parameters; called when the resume can no longer be refused."""
        for parameter, gradient in self._loaded:
            parameter.grad = gradient
        self._loaded = []

    def _checked_gradients(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return each parameter with a copy of its saved gradient, on its device and of its type."""
        parameters = [*self._parameters()]
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

    @on(priority=Priority.HIGHEST)
    def before_save_checkpoint(self, trainer: Trainer, event: BeforeSaveCheckpoint) -> None:
        """Save an unfinished window's gradients as means over ranks, so that all ranks can resume."""
        model = _distributed(trainer.model)
        if self._count and model is not None and trainer.checkpoint is not None:
            means = _mean_over_ranks(model, [*self._parameters()])
            trainer.checkpoint["hooks"][self.name]["gradients"] = means


class _State(msgspec.Struct):
    count: Count
    loss_scaling: str
    divisor: Annotated[int, msgspec.Meta(ge=1)] = 1
    gradients: list[torch.Tensor | None] = []
    parameters: list[str] = []


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
