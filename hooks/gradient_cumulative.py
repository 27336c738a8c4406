"""One optimizer step for several iterations."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from eventloop.costs.step_clock import BACKWARD_BEGINS, BACKWARD_ENDS, OPTIMIZER_ENDS
from eventloop.events import (
    COMPLETED,
    AfterBackward,
    AfterOptimizerStep,
    AfterTrain,
    AfterTrainEpoch,
    AfterTrainIter,
    BeforeOptimizerStep,
    BeforeSaveCheckpoint,
    BeforeTrain,
    BeforeTrainIter,
)
from eventloop.events.priority import Priority
from eventloop.hooks.hook import on
from eventloop.hooks.optimizer import OptimizerHook, detached, explain_freed_graph, loss_of
from eventloop.state.schema import Count, read_as
from eventloop.state.sharded import fsdp_modules
from eventloop.util.checks import positive

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

Scaling = Literal["none", "static", "dynamic"]
"""How losses are scaled against underflow, for the gradients that a checkpoint may hold."""


class GradientCumulativeOptimizerHook(OptimizerHook):
    """Steps every `cumulative_iters` iterations with the mean of their gradients: a batch that many times as large.

        hooks=[GradientCumulativeOptimizerHook(cumulative_iters=4, grad_clip=dict(max_norm=35))]

    Windows of iterations are counted over the whole run, across epochs, as in mmcv and MMEngine, and the last one
    is shorter where the run ends within it: each loss is divided by the iterations of its window, so 8 iterations by
    3 have the divisors 3 3 3 3 3 3 2 2. Where the length of the run is not known beforehand, the gradients of a
    window that ended early are weighted anew when the last epoch ends. A run that is stopped within a window keeps
    its gradients in the checkpoint, and goes on with them when resumed.

    `after_backward` comes in every iteration, `before_optimizer_step` and `after_optimizer_step` with a step.
    Schedulers that count iterations count all of them, as in MMEngine. Under `DistributedDataParallel` gradients
    are exchanged once a window, and so they are under FSDP2 (`fully_shard`) where the length of the run is known
    beforehand; other wrappers exchange them in every iteration.

    Args:
        cumulative_iters: iterations a step.
        grad_clip, detect_anomalous_params: as in `OptimizerHook`; gradients are clipped once a step.

    Raises:
        TypeError, ValueError: `cumulative_iters` is no positive int, or `grad_clip` is not one.

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
        self._count = 0
        """Iterations whose gradients wait for the step."""
        self._divisor = 1
        """What the losses of this window are divided by: the iterations it is to have."""
        self._no_sync: AbstractContextManager[None] | None = None
        """Open from before the forward pass until after backward, in iterations that exchange no gradients."""
        self._fsdp: list[Any] = []
        """Return the modules of the model that FSDP2 shards."""
        self._schedulers_allowed = False
        self._begins_with_share = type(self)._backward is GradientCumulativeOptimizerHook._backward

    def check(self, trainer: Trainer) -> None:
        """Warn of BatchNorm, and know the optimizers before a checkpoint's gradients are given to them."""
        super().check(trainer)
        if trainer.optimizer is not None:
            self._adopt(trainer.optimizer)
        modules = trainer.model.modules()
        if self._cumulative_iters > 1 and any(isinstance(module, _BatchNorm) for module in modules):
            warnings.warn(
                f"cumulative_iters={self._cumulative_iters} makes the gradients those of larger batches, not the "
                "statistics of BatchNorm, which remain those of each batch",
                UserWarning,
                stacklevel=2,
            )

    # --- accumulating --------------------------------------------------------------------------------------

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Find the modules that FSDP2 shards."""
        self._fsdp = fsdp_modules(trainer.model)

    @on(priority=Priority.LOWEST)
    def before_train_iter(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Keep the ranks from exchanging gradients where no step follows; the forward pass must know already."""
        self._leave_no_sync()  # left open by a batch that was skipped
        window = self._divisor if self._count else self._window(trainer)
        if self._count + 1 < window:
            if (model := _distributed(trainer.model)) is not None:
                self._no_sync = model.no_sync()
            elif self._postpones_reduction(trainer):
                self._no_sync = _without_reduction(self._fsdp)
            if self._no_sync is not None:
                self._no_sync.__enter__()

    def _postpones_reduction(self, trainer: Trainer) -> bool:
        """Return whether FSDP2 reduces once per window; the window's last iteration must be known."""
        return bool(self._fsdp) and trainer.max_iters is not None

    def _leave_no_sync(self) -> None:
        if self._no_sync is not None:
            opened, self._no_sync = self._no_sync, None
            opened.__exit__(None, None, None)

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Add this iteration's gradients, and step at the end of the window.

        Raises:
            TypeError, RuntimeError: as in `OptimizerHook`.
        """
        # as in OptimizerHook, no helper is called that has nothing to do
        clock = trainer.clock
        device, began = clock.device, perf_counter() - clock.excluded
        if trainer.optimizer is not self._given or self._given is None:
            self._adopt(trainer.optimizer)
        loss = loss_of(trainer.outputs)
        if not self._count:
            self._divisor = self._window(trainer)
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
        if self._anomalous is not None:
            self._anomalous.look(loss, trainer.model)
        self._others = 0.0
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
        else:  # an error kept the step from a full window, which has the gradients of this iteration
            self._leave_forward()
        clock.backward = perf_counter() - clock.excluded - backward
        if device is not None:
            device.mark(BACKWARD_ENDS)
        if self._no_sync is not None:
            self._leave_no_sync()
        ends = self._count >= self._divisor
        if not ends:
            trainer.within = "iter"  # its gradients are in: after an error the batch is not accumulated again
            if not self._schedulers_allowed:
                self._allow_schedulers()
        if trainer.bus.wants(AfterBackward):
            self._announce(trainer, AfterBackward)
        if ends:
            self._step(trainer)
            trainer.within = "iter"
        if device is not None:
            device.mark(OPTIMIZER_ENDS)
        trainer.outputs = detached(trainer.outputs)
        clock.optimizer = perf_counter() - clock.excluded - began - clock.backward - self._others

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """When the last epoch ended within a window, step with what there is."""
        self._leave_no_sync()  # left open where the forward pass failed
        if self._count and event.reason == COMPLETED and self.is_last_train_epoch(trainer):
            if self._count < self._divisor:
                if self._postpones_reduction(trainer):
                    return  # only the backward of the window's last iteration reduces them
                self._weigh_anew(trainer)
            self._step(trainer)

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Warn of gradients that are in no step."""
        if self._count:
            keeper = (
                "FSDP2 keeps them on each rank, and only a longer train() of this trainer goes on with them"
                if self._postpones_reduction(trainer)
                else "a checkpoint of this moment holds them, and a run resumed from it goes on with them"
            )
            logger.warning(
                "training ended (%s) with the gradients of %d iterations accumulated and in no step yet; %s",
                event.reason,
                self._count,
                keeper,
            )

    # --- stepping ------------------------------------------------------------------------------------------

    def _window(self, trainer: Trainer) -> int:
        """The iterations of a window that begins now."""
        if trainer.max_iters is None:
            return self._cumulative_iters
        left = trainer.max_iters - trainer.iter
        return left if 0 < left < self._cumulative_iters else self._cumulative_iters

    def _accumulate(self, loss: torch.Tensor) -> None:
        """Backward of the loss's share of the window. One that begins with 1 / n gives the gradients of loss / n, bit by
        bit, and saves the division and its part of the graph: a third of the time of a small backward. To a
        subclass with a backward of its own the divided loss is given."""
        divisor = self._divisor
        if divisor == 1:
            self._backward(loss)
        elif self._begins_with_share:
            loss.backward(torch.full_like(loss, 1.0 / divisor))
        else:
            self._backward(loss / divisor)

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _leave_forward(self) -> None:
        """Leave a forward pass that has no backward; FSDP2 would keep its weights beyond the step."""
        for module in self._fsdp:
            module.reshard()

    def _step(self, trainer: Trainer) -> None:
        """End the window with a step. After an error before it, its iteration is done again, without a backward."""
        if self._clip is not None:
            self._clip_gradients(trainer)
        wants = trainer.bus.wants
        if wants(BeforeOptimizerStep):
            self._announce(trainer, BeforeOptimizerStep)
        copying = trainer.copying
        for optimizer in self._optimizers:
            if id(optimizer) not in copying.waited:
                copying.before_step(optimizer)
            optimizer.step()
            self._count = 0  # also if the step of a later optimizer fails: this one is not made twice
            trainer.within = trainer.within or "iter"  # "epoch" where the rest of an epoch is stepped
        if wants(AfterOptimizerStep):
            self._announce(trainer, AfterOptimizerStep)

    def _weigh_anew(self, trainer: Trainer) -> None:
        """Make what was divided by the intended iterations the mean of those there were, of all ranks."""
        parameters = [*self._parameters()]
        if (model := _distributed(trainer.model)) is not None:
            for parameter, mean in zip(parameters, _mean_over_ranks(model, parameters), strict=True):
                parameter.grad = mean
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, self._divisor / self._count)

    def _allow_schedulers(self) -> None:
        """A scheduler that is stepped before the first optimizer step would warn of it; here that is right."""
        self._schedulers_allowed = True
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def _adopt(self, given: Any) -> None:
        super()._adopt(given)
        self._schedulers_allowed = False

    def _parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def settings(self) -> dict[str, Any]:
        """How gradients are clipped, and over how many iterations they are gathered."""
        return {**super().settings(), "cumulative_iters": self._cumulative_iters}

    # --- saving and resuming -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where in a window it is, and the gradients so far: one for each parameter, in the optimizers' order."""
        state: dict[str, Any] = {"count": self._count, "loss_scaling": self.loss_scaling}
        if self._count:
            state["divisor"] = self._divisor
            state["gradients"] = [parameter.grad for parameter in self._parameters()]
        return state

    def prepare_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Go on within the window that was saved, and end it as it was begun, whatever `cumulative_iters` is now.

        Raises:
            CheckpointError: it is the state of something else.
            ValueError: the losses were scaled in another way, or the gradients are not those of the trainer's
                parameters.
        """
        saved = read_as(_State, state, f"{type(self).__name__} cannot take its state")
        if saved.loss_scaling != self.loss_scaling:
            raise ValueError(
                f"the checkpoint is of a run whose loss scaling was {saved.loss_scaling!r}, this hook's is "
                f"{self.loss_scaling!r}: give the hook the loss_scale and dtype of that run, or take the weights "
                "alone with load_checkpoint"
            )
        gradients = self._fitting(saved.gradients) if saved.count else []

        def take() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self._count, self._divisor = saved.count, saved.divisor if saved.count else self._divisor

        return take

    def _fitting(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the parameters, each with a copy of its gradient."""
        parameters = [*self._parameters()]
        if len(parameters) != len(gradients) or any(
            gradient is not None and not is_lazy(parameter) and gradient.shape != parameter.shape
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ):
            raise ValueError(
                f"the checkpoint's {len(gradients)} accumulated gradients do not fit the optimizer's "
                f"{len(parameters)} parameters: is it of another model or optimizer?"
            )
        return [
            (parameter, None if gradient is None else gradient.to(parameter, copy=True))
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]

    @on(priority=Priority.HIGHEST)
    def before_save_checkpoint(self, trainer: Trainer, event: BeforeSaveCheckpoint) -> None:
        """Within a window each rank has gradients of its own: save their mean, which all can go on with."""
        model = _distributed(trainer.model)
        if self._count and model is not None and trainer.checkpoint is not None:
            means = _mean_over_ranks(model, [*self._parameters()])
            trainer.checkpoint["hooks"][self.name]["gradients"] = means


class _State(msgspec.Struct):
    count: Count
    loss_scaling: str
    divisor: Annotated[int, msgspec.Meta(ge=1)] = 1
    gradients: list[torch.Tensor | None] = []


@contextmanager
def _without_reduction(modules: Sequence[Any]) -> Iterator[None]:
    """Let FSDP2 keep whole gradients on each rank, and reduce them with those of the next backward outside."""
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
    """What DistributedDataParallel would have made of the gradients without `no_sync`. It waits for the device, to
    learn which parameters have a gradient on any rank: it is for the end of a run and for checkpoints."""
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
