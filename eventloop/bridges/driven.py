"""Define the trainer whose run is driven by the loop of another engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from eventloop.assembly.attach import check_bus_owners
from eventloop.bus import Bus
from eventloop.costs.step_clock import TIMES
from eventloop.events import ScalarsLogged
from eventloop.metrics import EventStorage
from eventloop.migration.names import knowing_renamed
from eventloop.optim.optimizers import Optimizers, named_values
from eventloop.training.trainer import Trainer
from eventloop.util.checks import at_least

HOST_OWNED_HOOKS = (
    "optimizer",
    "param_scheduler",
    "sampler_seed",
    "preemption",
    "garbage_collection",
    "checkpoint",
)
"""The default hooks that a driven trainer leaves out unless they are given, as the host does their work."""


def name_of_host(name: str) -> str:
    """Return the name under which a number of the host's training is logged.

    It is `host/NAME` for the times of iterations and the learning rates, because this engine itself logs
    values of these names at the same steps.
    """
    return f"host/{name}" if name in TIMES or name.partition("/")[0] == "lr" else name


@knowing_renamed
class DrivenTrainer(Trainer):
    """Emit the events of a training whose loop another engine, or your own code, runs.

        driven = DrivenTrainer(model, optimizer=optimizer, hooks=[EMAHook()], writers=[JSONLWriter()])
        driven.begin_run()
        for epoch in range(3):
            driven.begin_epoch(len(loader))
            for inputs, target in loader:
                if driven.begin_iter((inputs, target)):
                    loss = train_on(inputs, target)    # forward, backward and the optimizer's step
                    if driven.end_iter({"loss": loss}):
                        break
            driven.end_epoch()
            if driven.stopping:
                break
        driven.end_run()

    The engine, called the host, owns the model, its step and its data: this trainer moves nothing to a
    device, sets no mode and steps no optimizer. `begin_run` explains the steps. Handlers get this trainer,
    with `model`, `optimizer`, `iter`, `epoch`, `batch`, `outputs`, `metrics`, `work_dir`, `stop` and
    `native`.

    Args:
        model: the module that the host trains.
        optimizer: the host's optimizer, or several by name; its learning rates are logged.
        max_epochs, max_iters: the end of the run, as far as the host knows it.
        by_epoch: whether intervals of hooks count epochs by default.
        hooks, writers, default_hooks, work_dir, bus: as for `Trainer`. Only those default hooks are present
            that measure and log. A checkpoint hook must be given.
        native: the host's own trainer object, for handlers that need more.
        host: the host's name, for error messages.

    Raises:
        TypeError, ValueError: an argument is invalid, or a hook does a part of the loop that the host does.
        OSError: `work_dir` cannot be written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        optimizer: Optimizers | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        by_epoch: bool = True,
        hooks: Sequence[Any] = (),
        writers: Sequence[Any] | None = (),
        default_hooks: Mapping[str, Any] | None = None,
        work_dir: str | Path | None = None,
        bus: Bus | None = None,
        native: Any = None,
        host: str = "the loop that drives this trainer",
    ) -> None:
        for name, limit in (("max_epochs", max_epochs), ("max_iters", max_iters)):
            if limit is not None:
                at_least(name, limit, 1)
        if bus is not None:
            check_bus_owners(bus, host)
        self.host, self.native, self._counts_epochs = host, native, by_epoch
        self._rates: dict[str, Any] = {}
        self.step_rates = MappingProxyType(self._rates)
        super().__init__(
            model,
            optimizer=optimizer,
            hooks=hooks,
            writers=writers,
            work_dir=work_dir,
            bus=bus,
            default_hooks=dict.fromkeys(HOST_OWNED_HOOKS) | dict(default_hooks or {}),
            # the Trainer needs exactly one limit, which sets its unit; the host's own limits are set below
            max_epochs=1 if by_epoch else None,
            max_iters=None if by_epoch else 1,
        )
        self.max_epochs, self.max_iters = max_epochs, max_iters

    @property
    def by_epoch(self) -> bool:
        """True when intervals count epochs, even if the host does not know the number of epochs."""
        return self._counts_epochs

    def open_epoch(self) -> None:
        """Prepare a training epoch, without setting the mode of the model, which the host does."""
        self.batch_idx = 0
        self.metrics.epoch = self.epoch

    def begin_iter(self, batch: Any) -> bool:
        """Begin an iteration with its batch; return False if a handler skips the batch."""
        self._rates.clear()
        return super().begin_iter(batch)

    def record_rates(self, optimizer: Any) -> None:
        """Record the learning rate that an optimizer's next step uses, to be logged for this iteration.

        The host's schedulers may change the rate before the iteration ends. Without a record, the rate at
        the end of the iteration is logged.

        Args:
            optimizer: one of the trainer's optimizers. For any other object, all of their rates are recorded.
        """
        optimizers = list(named_values("lr", self.optimizer))
        stepping = [(name, candidate) for name, candidate in optimizers if candidate is optimizer]
        for name, recorded in stepping or optimizers:
            rate = recorded.param_groups[0].get("lr")
            self._rates[name] = rate.clone() if isinstance(rate, torch.Tensor) else rate

    def drop_iter(self) -> None:
        """Drop the iteration under way, which the host will not end, without counting it."""
        self._skip_batch()

    def log(self, scalars: Mapping[str, Any], *, mode: str = "train", step: int | None = None) -> None:
        """Emit `scalars_logged` with numbers that the host has logged, without waiting for a device.

        Numbers of the training whose names the engine itself logs, which are `time`, `data_time`,
        `step_time`, `hook_time`, `lr` and `lr/...`, are logged as `host/time` and so on.

        Args:
            scalars: numbers, and tensors of one element, by name. Tensors are read in the background.
            mode: "train", "val", "test", or another name that the host chooses.
            step: the number of completed iterations; None means the number that this trainer has counted.

        Raises:
            TypeError: a value is not a number.
        """
        if step is None:
            step = self.iter + (self.within == "iter")  # the iteration under way counts as completed
        if mode == "train":
            scalars = {name_of_host(name): value for name, value in scalars.items()}
        numbers = {
            name: float(value) for name, value in scalars.items() if not isinstance(value, torch.Tensor)
        }
        if numbers:
            self.announce(ScalarsLogged, mode=mode, step=step, scalars=numbers)
        if tensors := {name: value for name, value in scalars.items() if name not in numbers}:
            logged = EventStorage(start_iter=step)
            logged.epoch, logged.mode = self.epoch, mode
            logged.in_iteration = False  # else the storage would add 1 for an iteration under way
            logged.put_scalars(tensors)
            self.bus.post(logged.collect(self.place), ScalarsLogged)
