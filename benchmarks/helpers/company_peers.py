"""The peers of `company`, pytorch-ignite and Lightning, with their own loops, loggers and checkpoints.

They sync nothing to the disk, so what is quoted as durable is there after a kill of the process, not after a power cut.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.helpers.company_engines import Lines, Train, timed
from benchmarks.helpers.company_job import EVERY, Job, Notes


def prepare_ignite() -> Train:
    """TensorboardLogger, a handler for the lines, Checkpoint with DiskSaver at the interval and for the best."""
    engines, handlers = import_module("ignite.engine"), import_module("ignite.handlers")
    import_module("torch.utils.tensorboard")

    def train(job: Job, notes: Notes, directory: Path, rank: int) -> None:
        training, every = job.training, engines.Events.ITERATION_COMPLETED
        engine = engines.Engine(lambda engine, batch: job.step(batch))
        lines = Lines(job, notes, directory) if rank == 0 else None
        saved = {"model": job.model, "optimizer": job.optimizer}

        def log(engine: Any) -> None:
            notes.emit(engine.state.iteration)
            if lines is not None:
                lines.write(engine.state.iteration, job.values(engine.state.output))

        def checkpoint(folder: str, **options: Any) -> Callable[..., Any]:
            disk = handlers.DiskSaver(str(directory / folder), require_empty=False)
            return timed(notes, handlers.Checkpoint(saved, disk, **options).__call__)

        score = {"best": 0.0}
        best = checkpoint("best", n_saved=1, score_function=lambda engine: score["best"])

        def validate(engine: Any) -> None:
            score["best"] = job.validate()
            best(engine)

        engine.add_event_handler(every(every=EVERY), log)
        engine.add_event_handler(every(every=training.save_each), checkpoint("last", n_saved=2))
        engine.add_event_handler(every(every=training.val_each), validate)
        engine.run(job.loader, max_epochs=1)
        if lines is not None:
            lines.close()

    return train


def prepare_lightning() -> Train:
    """`self.log`, TensorBoardLogger, a Logger of our own for the lines, two ModelCheckpoints."""
    lightning = import_module("lightning.pytorch")
    loggers = import_module("lightning.pytorch.loggers")
    checkpoint = import_module("lightning.pytorch.callbacks").ModelCheckpoint
    import_module("torch.utils.tensorboard")
    warnings.simplefilter("ignore")  # hints about workers and log intervals
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class LinesLogger(loggers.Logger):  # type: ignore[misc, name-defined]
        name, version = "lines", "0"

        def __init__(self, lines: Lines) -> None:
            super().__init__()
            self._lines = lines

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "loss" in metrics:
                self._lines.write_line((step or 0) + 1, metrics)

        def finalize(self, status: str) -> None:
            self._lines.close()

    def train(job: Job, notes: Notes, directory: Path, rank: int) -> None:
        training = job.training
        written = [loggers.TensorBoardLogger(str(directory), name="", version="")]
        if rank == 0:
            written.append(LinesLogger(Lines(job, notes, directory, board=False)))
        best = checkpoint(str(directory), filename="best-{step}", monitor="score", mode="max", save_top_k=1)
        last = checkpoint(
            str(directory), filename="{step}", every_n_train_steps=training.save_each, save_top_k=1
        )
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=training.iterations,
            val_check_interval=training.val_each,
            logger=written,
            log_every_n_steps=EVERY,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[last, best],
            **_ranks(),
        )
        trainer.save_checkpoint = timed(notes, trainer.save_checkpoint)
        trainer.fit(module_of(lightning, job, notes), job.loader, job.val_loader)

    return train


def _ranks() -> dict[str, Any]:
    """The options that let Lightning use the process group that is there."""
    if not torch.distributed.is_initialized():
        return {}
    return {"strategy": "ddp", "devices": torch.distributed.get_world_size()}


def module_of(lightning: Any, job: Job, notes: Notes) -> Any:
    """The job as a LightningModule."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = job.loss(batch)
            self.log_dict(job.values(loss.detach()) | {"loss": loss})
            if (step := self.trainer.global_step + 1) % EVERY == 0:
                notes.emit(step)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", job.validate())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

    return Module()


PEERS: dict[str, tuple[tuple[str, ...], Callable[[], Train]]] = {
    "pytorch-ignite": (("pytorch-ignite",), prepare_ignite),
    "Lightning": (("lightning",), prepare_lightning),
}
"""Label: the distributions it needs, and how it is prepared."""
