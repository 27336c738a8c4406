"""A hook that records samples, tokens or other units per second, and FLOP/s, as metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from eventloop.evaluation.batch_sizes import batch_size
from eventloop.events import AfterBackward, AfterTrainIter, BeforeTrain, BeforeTrainIter
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.model.flops import FlopCounter, known_peak
from eventloop.util.checks import check_bools, positive

if TYPE_CHECKING:
    from eventloop.bus import Bus
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")

Number = float | torch.Tensor
Count = Callable[[Any], Number]

WARM_UP = 2
"""The number of first iterations of a training that no rate includes.

FLOPs are counted in the first iteration, and a compiled model is compiled in the second.
"""


class ThroughputHook(Hook):
    """Record samples per second as `throughput/samples_per_sec`, and other units and FLOP/s on request.

        ThroughputHook(count={"tokens": lambda batch: batch["attention_mask"].sum()})
        ThroughputHook(flops=True)      # also throughput/flops_per_sec and throughput/mfu

    Each rate is that of the iterations since the previous record, without evaluations and without the first
    two iterations of a training. The number of samples in a batch is the first dimension that most of its
    tensors have, or the length of a list of samples; `count={"samples": ...}` replaces this count. With
    several ranks a rate is that of all ranks: each rank records its own rate times `trainer.data_ranks`, the
    number of ranks with different data. The mean of these values, which `LoggerHook(reduce=True)` logs, is
    the exact sum of the rates.

    With `flops` the first iteration of a training runs under PyTorch's `FlopCounterMode`, which is slow, and
    without `torch.compile`, so it needs the memory of an uncompiled model. All later iterations are assumed
    to have as many operations. `throughput/flops_per_sec` is the rate of all ranks. `throughput/mfu`, the
    model FLOPs utilization, is this rank's rate as a fraction, 0 to 1, of its device's peak. Operations that
    activation checkpointing repeats are included.

    Args:
        interval: iterations between two records; the last iteration is recorded too.
        count: for each unit, by its name, a function `(batch) -> number`. The rate of a unit is recorded as
            `throughput/<unit>_per_sec`. A function may return a tensor of one element; such tensors are added
            up on their device, and no step waits for them.
        flops: True counts the operations of the first iteration.
        peak_flops: the peak FLOP/s of the device. By default that of the data sheet, without sparsity, for
            bfloat16 and float16 on A100, H100 (SXM and PCIe) and H200. Other devices and types have no
            `throughput/mfu` without this argument.

    Raises:
        TypeError, ValueError: `interval` is not a positive int, `count` is not a mapping of names to
            functions, `flops` is not a bool, or `peak_flops` is not above 0 or given without `flops`.
    """

    priority = Priority.HIGH + 1
    """Directly after OptimizerHook, and before LoggerHook."""

    def __init__(
        self,
        interval: int = 10,
        count: Mapping[str, Count] | None = None,
        *,
        flops: bool = False,
        peak_flops: float | None = None,
    ) -> None:
        positive("interval", interval)
        check_bools(flops=flops)
        _check_count(count)
        _check_peak(peak_flops, flops=flops)
        self._interval, self._wants_flops, self._given_peak = interval, flops, peak_flops
        self._counts: dict[str, Count] = {"samples": batch_size, **(count or {})}
        self._counter: FlopCounter | None = None
        self._has_several_batches = False  # whether an iteration has, as with `Trainer(unit="update")`
        self._reset()

    def _reset(self) -> None:
        """Start the warm-up and all counts of a training."""
        self._warmed_up = self._iterations = 0  # iterations of the warm-up, and since the last record
        self._start = 0.0  # the time of the last record by `trainer.clock`
        self._totals: dict[str, Number] = dict.fromkeys(self._counts, 0)
        self._flops, self._peak = 0, self._given_peak

    def attach(self, bus: Bus) -> None:
        """Subscribe the hook's event methods, and the handlers for FLOPs and for single batches if needed."""
        super().attach(bus)
        if self._wants_flops:  # at the lowest priority: the forward pass follows directly
            bus.subscribe(self.begin_flops, BeforeTrainIter, priority=Priority.LOWEST)
        if self._has_several_batches:
            bus.subscribe(self._after_backward, AfterBackward, priority=self.priority)

    def check(self, trainer: Trainer) -> None:
        """Store whether an iteration has several batches, which are then counted after each backward."""
        self._has_several_batches = trainer.counting.accumulator is not None

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Discard the counts of an earlier training, and register the end of counting FLOPs with the run."""
        self._reset()
        if self._wants_flops:
            trainer.during_run.callback(self._exit_counter)

    def begin_flops(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        """Begin to count FLOPs, only in the first iteration of a training."""
        if not self._warmed_up and self._counter is None:
            self._counter = FlopCounter()
            self._counter.__enter__()

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Count the samples and other units of the batch, and record the rates at the interval.

        Raises:
            TypeError: a function of `count` returned something other than one number.
        """
        if self._counter is not None:
            self._store_flops(trainer, self._counter)
        if self._warmed_up < WARM_UP:
            self._warmed_up += 1
            self._start = trainer.clock.now()
            return
        self._iterations += 1
        if not self._has_several_batches:
            self._count_batch(trainer.batch)
        if self.every_n_train_iters(trainer, self._interval) or self.is_last_train_iter(trainer):
            self._record_rates(trainer)

    def _after_backward(self, trainer: Trainer, event: AfterBackward) -> None:
        """Count one of the several batches of an iteration, except in the warm-up."""
        if self._warmed_up >= WARM_UP:
            self._count_batch(trainer.batch)

    def _count_batch(self, batch: Any) -> None:
        """Add the samples and other units of a batch to the totals."""
        for unit, count in self._counts.items():
            self._totals[unit] = self._totals[unit] + _one_number(unit, count(batch))

    def _record_rates(self, trainer: Trainer) -> None:
        """Record the rates since the last call as metrics, and reset the totals."""
        now = trainer.clock.now()
        if (seconds := now - self._start) > 0:
            factor = trainer.data_ranks / seconds  # turns this rank's count into the rate of all ranks
            rates: dict[str, Number] = {
                f"{unit}_per_sec": total * factor for unit, total in self._totals.items()
            }
            if self._flops:
                rates["flops_per_sec"] = self._flops * self._iterations * factor
                if self._peak is not None:
                    # ranks with the same data (tensor parallelism) share the operations
                    rates["mfu"] = rates["flops_per_sec"] / trainer.world_size / self._peak
            values = {f"throughput/{name}": rate for name, rate in rates.items()}
            trainer.metrics.put_scalars(values, smoothing_hint=False)
        self._iterations, self._start = 0, now
        self._totals = dict.fromkeys(self._counts, 0)

    def _store_flops(self, trainer: Trainer, counter: FlopCounter) -> None:
        """Stop counting FLOPs, store their number, and look up the device's peak FLOP/s."""
        self._exit_counter()
        self._flops = counter.flops
        device_of_model = next((p.device for p in trainer.model.parameters()), torch.device("cpu"))
        device = trainer.device or device_of_model
        if self._peak is None:
            self._peak = known_peak(device, counter.dtype)
        if not self._flops:
            logger.warning("ThroughputHook logs no FLOP/s: PyTorch's FlopCounterMode counted no operation")
        elif self._peak is None:
            logger.warning(
                "ThroughputHook logs no throughput/mfu: it knows no peak of %s for products in %s; pass "
                "peak_flops=, the FLOP/s of the data sheet without sparsity",
                device,
                counter.dtype,
            )

    def _exit_counter(self) -> None:
        """Stop counting FLOPs if it has begun."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)


def _one_number(unit: str, number: Any) -> Number:
    """Convert a count to a float, or a tensor of one element to float32 or int64 without a graph.

    Raises:
        TypeError: the count is not one number.
    """
    if isinstance(number, torch.Tensor) and number.numel() == 1:
        return number.detach().float() if number.is_floating_point() else number.detach().long()
    if isinstance(number, Real):  # includes NumPy's scalars
        return float(number)
    got = f"a tensor of shape {tuple(number.shape)}" if isinstance(number, torch.Tensor) else repr(number)
    raise TypeError(f"count[{unit!r}] must return a number or a tensor of one element, got {got}")


def _check_count(count: object) -> None:
    """Refuse a `count` that is not a mapping of names to functions."""
    if count is None:
        return
    if not isinstance(count, Mapping):
        raise TypeError(
            f"count must map names of units to functions, such as {{'tokens': count_tokens}}, got {count!r}"
        )
    for unit, function in count.items():
        if not isinstance(unit, str) or not unit:
            raise TypeError(f"count must have names of units as keys, got {unit!r}")
        if not callable(function):
            raise TypeError(f"count[{unit!r}] must be a function (batch) -> number, got {function!r}")


def _check_peak(peak: object, *, flops: bool) -> None:
    """Refuse a `peak_flops` that is not above 0, or given without `flops`."""
    if peak is None:
        return
    if isinstance(peak, bool) or not isinstance(peak, int | float):
        raise TypeError(f"peak_flops must be a number of FLOP/s, got {peak!r}")
    if not peak > 0:
        raise ValueError(f"peak_flops must be above 0 FLOP/s, got {peak}")
    if not flops:
        raise ValueError(f"peak_flops={peak} needs flops=True, which counts the operations")
