"""One of the ranks of test_two_ranks.py, started by torchrun; writes what it saw to `rank<n>.pt`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from eventloop import Bus, Trainer
from eventloop.events import AfterValEpoch, ScalarsLogged
from eventloop.hooks import (
    CheckpointHook,
    Hook,
    LoggerHook,
    PeriodicWriter,
    PreciseBN,
    SyncBuffersHook,
    on,
    on_rank,
    update_bn_stats,
)
from eventloop.hooks.sync_buffers import sync_buffers
from eventloop.writers import JSONLWriter, TensorBoardWriter

FOLDER = Path(sys.argv[-1])  # of the script; the tests that import it do not use this
SAID: dict[str, Any] = {}


def rows_of(size: int, seed: int, width: int = 2) -> torch.Tensor:
    """A batch."""
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed)) + seed


SHARES = ([rows_of(4, 1), rows_of(6, 2), rows_of(3, 3)], [rows_of(5, 4)])
"""Batches of unequal sizes, unequally many a rank."""


def model_with_bn() -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Watch(Hook):
    """Copies the buffers before and after they are synced."""

    def __init__(self) -> None:
        self.before: list[dict[str, torch.Tensor]] = []
        self.after: list[dict[str, torch.Tensor]] = []

    @on(priority=49)
    def after_train_epoch(self, trainer: Trainer, event: Any) -> None:
        """Before."""
        self.before.append({name: buffer.clone() for name, buffer in trainer.model.named_buffers()})

    @on(priority=51)
    def before_val_epoch(self, trainer: Trainer, event: Any) -> None:
        """After."""
        self.after.append({name: buffer.clone() for name, buffer in trainer.model.named_buffers()})


def data_parallel_training(rank: int) -> None:
    """A training with everything that writes, and collectives in a handler of before_save_checkpoint."""
    inputs = rows_of(12, 0)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long(), torch.arange(12))
    loader = DataLoader(data, 3, sampler=DistributedSampler(data, seed=3))
    plain = model_with_bn()
    model = DistributedDataParallel(plain, broadcast_buffers=False)
    seen: list[list[int]] = []
    gathered: list[Any] = []

    def step(trainer: Trainer, batch: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append(batch[2].tolist())
        return F.cross_entropy(trainer.model(batch[0]), batch[1])

    def by_class(preds: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
        """A metric whose names depend on the data: rank 0 has class 0 alone, rank 1 class 1."""
        return {f"class_{int(label)}": 1.0 + label for label in target.unique()}

    watch = Watch()
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=step,
        train_loader=loader,
        val_loader=[(inputs[: 3 + rank], torch.full((3 + rank,), rank))],
        evaluator=by_class,
        max_epochs=2,
        val_step=lambda trainer, batch: {"preds": plain(batch[0]), "target": batch[1]},
        hooks=[SyncBuffersHook(), watch, PreciseBN(num_iter=None)],
        default_hooks={"checkpoint": CheckpointHook(interval=1)},
        writers=[JSONLWriter(), TensorBoardWriter()],
        work_dir=FOLDER / "run",
    )

    @trainer.bus.on("before_save_checkpoint")
    def gather(trainer: Trainer, event: Any) -> None:
        ranks = [None] * trainer.world_size
        dist.all_gather_object(ranks, trainer.rank)
        gathered.append(ranks)

    trainer.train()
    metrics = trainer.val()
    trainer.close()
    SAID["training"] = {
        "orders": [seen[:2], seen[2:]],
        "gathered": gathered,
        "before": watch.before,
        "after": watch.after,
        "metrics": metrics,
        "end": {name: value.clone() for name, value in plain.state_dict().items()},
    }


def reduced_training(rank: int, hook: LoggerHook, name: str) -> None:
    """A training whose numbers differ between the ranks, and where rank 0 alone puts one more."""
    model = DistributedDataParallel(nn.Linear(2, 1))

    def step(trainer: Trainer, batch: torch.Tensor) -> dict[str, Any]:
        """Numbers on the host and in tensors, floats and a group of which the maximum is logged."""
        number = trainer.iter + 10.0 * rank
        trainer.metrics.put_scalars({"memory/peak": number, "lr_like": 0.1}, smoothing_hint=False)
        if rank == 0 and name == "reduced" and trainer.iter == 7:
            trainer.metrics.put_scalar("of rank 0", number)
        return {"loss": trainer.model(batch).sum() * 0 + number}

    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_step=step,
        max_epochs=2,
        train_loader=[rows_of(4, 1)] * 4,
        val_loader=[rows_of(2 + rank, 1)],
        val_step=lambda trainer, batch: {"rows": float(len(batch))},
        hooks=[hook],
        default_hooks={"checkpoint": None, "timer": None},
        writers=[JSONLWriter()],
        work_dir=FOLDER / name,
    )
    logged: list[ScalarsLogged] = []
    trainer.bus.subscribe(logged.append, ScalarsLogged, offload="thread")
    trainer.train()
    SAID[name] = {
        "logged": [(event.mode, event.step, event.scalars) for event in logged],
        "own": trainer.metrics.history("loss").values(),
    }
    trainer.close()


def precise_statistics(rank: int) -> None:
    """What update_bn_stats makes of unequal shares, of a layer only one rank uses, and of one nobody uses."""
    model = model_with_bn()
    ran = update_bn_stats(DistributedDataParallel(model), SHARES[rank], None)
    SAID["precise"] = {"ran": ran, "state": model.state_dict()}

    layers = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])

    def on_rank_1(model: nn.Module, batch: Any) -> None:
        if rank == 1:
            layers[0](batch)

    update_bn_stats(layers, SHARES[rank], None, forward=on_rank_1)
    SAID["one of two layers"] = layers.state_dict()


def passes_that_end_early(rank: int) -> None:
    """A loader that raises on rank 1, and a stop that only rank 1 asks for."""

    class Failing:
        def __iter__(self) -> Iterator[Any]:
            yield SHARES[rank][0]
            if rank == 1:
                raise OSError("the disk is gone")
            yield from SHARES[rank]

    model = model_with_bn()
    SAID["loader raises"] = error_of(lambda: update_bn_stats(model, Failing(), 9))
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(rank == 1 and len(asked) == 2)
        return asked[-1]

    SAID["stopped"] = (update_bn_stats(model, SHARES[rank], 9, stop=stop), len(asked))
    SAID["state after"] = model.state_dict()


def all_kinds_of_buffers(rank: int) -> None:
    """Buffers of every type, synced at once."""
    buffers = {
        "float": torch.tensor([1.0, 3.0]) * (rank + 1),
        "half": torch.tensor([60000.0], dtype=torch.float16),  # the sum is beyond the type
        "complex": torch.tensor([1 + 2j]) * (rank + 1),
        "int": torch.tensor([[7 + rank]]),
        "bool": torch.tensor(rank == 0),
        "empty": torch.zeros(0),
    }
    sync_buffers(buffers.values())
    SAID["buffers"] = {name: buffer.tolist() for name, buffer in buffers.items()}


def handlers_of_one_rank(rank: int) -> None:
    """A handler of rank 0 comes to a collective; afterwards the ranks still meet."""
    ran: list[str] = []

    @on_rank(0)
    def harmless(event: Any) -> None:
        ran.append(str(torch.ones(2).sum().item()))

    @on_rank(0)
    def reduces(event: Any) -> None:
        dist.all_reduce(torch.ones(1))

    @on_rank(0)
    def waits(event: Any) -> None:
        dist.barrier()

    said: list[str] = []

    @on_rank(0)
    async def reduces_in_background(event: Any) -> None:
        said.append(error_of(lambda: dist.all_reduce(torch.ones(1))))

    bus = Bus()
    bus.subscribe(reduces_in_background, "after_val_epoch")
    errors = []
    for handler in (harmless, reduces, waits):
        with bus.subscribe(handler, "after_val_epoch"):
            errors.append(error_of(lambda: bus.emit(AfterValEpoch())))
    bus.close()
    SAID["in the background"] = [*said]
    SAID["one rank"] = [ran, *errors]
    together = torch.ones(1)
    dist.all_reduce(together)
    SAID["together"] = together.item()


def forward_passes_of_one_rank(rank: int) -> None:
    """Handlers of rank 0 run models whose forward passes need the other rank: for their buffers, in either mode, or,
    in the second one that is trained, for the order of the gradients. Afterwards both ranks train them."""
    inputs = rows_of(4, 1 + rank)
    sends_buffers = DistributedDataParallel(model_with_bn())
    torch.manual_seed(0)
    agrees_on_order = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    agrees_on_order(inputs).sum().backward()

    def running(model: nn.Module) -> Callable[[Any], None]:
        @on_rank(0)
        def predict(event: Any) -> None:
            model(inputs)

        return predict

    bus = Bus()
    errors = {}
    models = {"buffers": sends_buffers, "evaluated": sends_buffers, "order": agrees_on_order}
    for name, model in models.items():
        model.train(name != "evaluated")
        with bus.subscribe(running(model), "after_val_epoch"), torch.set_grad_enabled(model.training):
            errors[name] = error_of(lambda: bus.emit(AfterValEpoch()))
    bus.close()
    SAID["forward passes"] = errors
    SAID["trained after them"] = [
        gradients(model.train(), inputs) for model in (sends_buffers, agrees_on_order)
    ]


def gradients(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Those of a step."""
    model.zero_grad()
    model(inputs).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error_of(call: Callable[[], Any]) -> str:
    """What it raises, as text; "" if nothing."""
    try:
        call()
    except (RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Everything, in one process group: starting one takes longer than all of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data_parallel_training(rank)
    reduced_training(rank, LoggerHook(3, reduce=True), "reduced")
    reduced_training(rank, PeriodicWriter(period=8, reduce=True, reduce_max=["loss"]), "maxima")
    for check in (
        precise_statistics,
        passes_that_end_early,
        all_kinds_of_buffers,
        handlers_of_one_rank,
        forward_passes_of_one_rank,
    ):
        check(rank)
    SAID["rank"] = [rank, dist.get_world_size(), int(os.environ["RANK"])]
    torch.save(SAID, FOLDER / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
