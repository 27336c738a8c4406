"""One of the two ranks of test_ranks.py: `python ranks_script.py HOST FOLDER PART...` trains by an engine, the host.

It runs in the environment that torchrun sets; Lightning starts rank 1 itself. Each part is a training on the CPU, in
one process group; what a rank saw of it is in `PART.RANK.json`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Bus
from eventloop.hooks import EMAHook
from eventloop.writers import JSONLWriter
from tests.support.told import send_at

BATCHES = 4
"""The batches of an epoch on each rank; a training has two epochs."""
BAD_BATCH = "rank 1 got a bad batch"
TOLD: list[tuple[Any, ...]] = [
    ("note", "hello"),
    ("set", {"lr*": 0.5}),
    ("checkpoint",),
    ("validate",),
    ("pause",),
]
"""The commands that rank 0 receives in its first iteration of a told training."""
Options = dict[str, Any] | None
"""The arguments of the bridge; None for a training without it."""


class Net(nn.Module):
    """A small model with a dropout; on rank 1 its forward pass may fail in the third iteration."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        self._fails, self._passes = fails, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        self._passes += self.training
        if self._fails and self._passes == 3 and dist.get_rank() == 1:
            raise ValueError(BAD_BATCH)
        scores: torch.Tensor = self.layers(inputs)
        return scores


def samples() -> TensorDataset:
    """Return as many points, with their classes, as both ranks have in an epoch."""
    inputs = torch.randn(BATCHES * 4, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


def train_by_lightning(folder: Path, net: Net, options: Options) -> None:
    """Train with strategy ddp; the sampler is Lightning's."""
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    from eventloop.bridges.lightning import EventLoopCallback

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class Reader(Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if (
                trainer.is_global_zero
            ):  # waits until the other rank reduces the metrics, as a progress bar does
                assert "epoch_loss" in trainer.callback_metrics

    seed_everything(3, verbose=False)
    Trainer(
        max_epochs=2,
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        callbacks=[Reader()] if options is None else [Reader(), EventLoopCallback(**options)],
    ).fit(Module(), DataLoader(samples(), 2, shuffle=True), DataLoader(samples(), 2))


def train_by_transformers(folder: Path, net: Net, options: Options) -> None:
    """Train with use_cpu and ddp_backend; accelerate wraps the model and shares out the data."""
    from transformers import Trainer, TrainingArguments

    from eventloop.bridges.transformers import EventLoopCallback

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.net(inputs)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    rows: Any = [
        {"inputs": inputs, "labels": int(label)} for inputs, label in zip(*samples().tensors, strict=True)
    ]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        num_train_epochs=2,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        disable_tqdm=True,
        report_to=[],
        seed=3,
    )
    callbacks = [] if options is None else [EventLoopCallback(**options)]
    Trainer(Module(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks).train()


def train_by_ignite(folder: Path, net: Net, options: Options) -> None:
    """Train in the process group of `idist.Parallel`, with a model and a loader of `idist`."""
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Loss

    from eventloop.bridges.ignite import attach

    torch.manual_seed(3 + idist.get_rank())
    model: Any = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = idist.auto_dataloader(samples(), batch_size=4, shuffle=True)
    engine = create_supervised_trainer(model, optimizer, F.cross_entropy)
    evaluator = create_supervised_evaluator(model, metrics={"loss": Loss(F.cross_entropy)})
    held_out = idist.auto_dataloader(samples(), batch_size=4)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(held_out))
    if options is not None:
        attach(engine, model=model, optimizer=optimizer, evaluators={"val": evaluator}, **options)
    engine.run(loader, max_epochs=2)


def train_by_mmengine(folder: Path, net: Net, options: Options) -> None:
    """Train with launcher pytorch. MMEngine's own start of the group needs a GPU, so the group is there before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mmengine.evaluator import BaseMetric
        from mmengine.model import BaseModel
        from mmengine.runner import Runner

        from eventloop.bridges.mmengine import EventLoopHook

    class Module(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: Any, target: Any, mode: str = "tensor") -> Any:
            scores = self.net(inputs)
            if mode == "loss":
                return {"loss": F.cross_entropy(scores, target)}
            return [{"loss": float(F.cross_entropy(scores, target))}]

    class Mean(BaseMetric):  # type: ignore[misc]
        def process(self, data_batch: Any, data_samples: Any) -> None:
            self.results += [sample["loss"] for sample in data_samples]

        def compute_metrics(self, results: list[float]) -> dict[str, float]:
            return {"loss": sum(results) / len(results)}

    def loader(*, shuffle: bool) -> dict[str, Any]:
        return {
            "dataset": samples(),
            "batch_size": 2,
            "sampler": {"type": "DefaultSampler", "shuffle": shuffle},
            "collate_fn": {"type": "default_collate"},
        }

    Runner(
        Module(),
        str(folder / "mm"),
        train_dataloader=loader(shuffle=True),
        val_dataloader=loader(shuffle=False),
        train_cfg={"by_epoch": True, "max_epochs": 2, "val_interval": 1},
        val_cfg={},
        val_evaluator=[Mean()],
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
        custom_hooks=[] if options is None else [EventLoopHook(**options)],
        launcher="pytorch",
        env_cfg={"dist_cfg": {"backend": "gloo"}},
        randomness={"seed": 3},
        experiment_name=folder.name,
        cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},
        default_scope="mmengine",
        log_level="ERROR",
    ).train()


TRAINED: dict[str, Callable[[Path, Net, Options], None]] = {
    "lightning": train_by_lightning,
    "transformers": train_by_transformers,
    "ignite": train_by_ignite,
    "mmengine": train_by_mmengine,
}


def run_part(host: str, folder: Path, part: str) -> None:
    """Train once, and write what this rank saw."""
    seen: dict[str, Any] = {"events": []}
    bus, net = Bus(), Net(fails=part == "error")
    bus.subscribe(lambda event: seen["events"].append(type(event).__name__), "*", name="names")

    @bus.on("after_run", priority="LOWEST")
    def inspect(trainer: Any, event: Any) -> None:
        seen.update(
            rank=trainer.rank,
            world_size=trainer.world_size,
            iters=trainer.iter,
            reason=event.reason,
            stop_reason=trainer.stop_reason,
            error=event.error,
        )
        write(folder, part, trainer.rank, seen)

    when = {"stop": "after_train_iter", "stop in a validation": "after_val_epoch"}.get(part)
    if when is not None:

        @bus.on(when)
        def stop(trainer: Any, event: Any) -> None:
            if trainer.rank == 1 and (part != "stop" or event.iter == 1):
                trainer.stop("why")

    if part == "told":
        seen["commands"] = []
        send_at(bus, {1: TOLD, 6: [("stop", "enough")]})
        bus.subscribe(
            lambda event: seen["commands"].append([event.command, type(event).__name__, event.iter]),
            "command_applied",
            "command_refused",
            name="commands",
        )

    options = {
        "bus": bus,
        "hooks": [EMAHook(momentum=0.5)],
        "writers": [JSONLWriter()],
        "work_dir": folder / part,
    }
    TRAINED[host](folder / f"{part} of the host", net, None if part == "alone" else options)
    seen["weights"] = {name: value.tolist() for name, value in net.state_dict().items()}
    write(folder, part, dist.get_rank(), seen)


def write(folder: Path, part: str, rank: int, seen: dict[str, Any]) -> None:
    """Write what a rank saw of a training."""
    (folder / f"{part}.{rank}.json").write_text(json.dumps(seen))


def run_parts(host: str, folder: Path, parts: list[str]) -> None:
    """Run all parts in one process group: its start, and the host's import, take longer than a training."""
    for part in parts:
        run_part(host, folder, part)


def main() -> None:
    """Start the process group as the host does, and train."""
    host, folder, parts = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    if host == "ignite":
        import ignite.distributed as idist

        with idist.Parallel(backend="gloo") as parallel:
            parallel.run(lambda rank: run_parts(host, folder, parts))
        return
    if host == "mmengine":
        dist.init_process_group("gloo")
    run_parts(host, folder, parts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
