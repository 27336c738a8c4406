"""The job of `digits_overhead`, and the peers that do it: their own loops, hooks, loggers and checkpoints.

Every peer prints, writes TensorBoard and appends a JSON line, loss and learning rate, every 10 iterations, and saves
model and optimizer each epoch, keeping one or two, with what it has for that. What is off is what the others do not
do either: progress bars, gradient clipping, profilers.

Peers are imported by name at run time, so that one which is not installed can be reported as such.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from benchmarks.helpers.training_step import Steps

FOREVER = 1_000_000
IMAGES = 1437
"""Of scikit-learn's 1,797, those that are trained on."""
EVERY = 10
"""Iterations from one log to the next."""
Training = Callable[["Job", int, Path], Iterator[None]]
"""Trains so many epochs at each `next`; a second `next` before the following turn finishes what was left over."""


class Shuffled(Sampler[int]):
    """A sampler that draws the same order in a pass for every engine.

    It has its own generator, so it does not matter which random numbers an engine draws, nor whether
    an engine exhausts a pass or counts batches: `RandomSampler` draws once more at the end of a pass.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.count, generator=self.generator).tolist()


class Job(Steps):
    """The model, the data and the step that all engines share; the step notes when it is called.

    Args:
        batch_size: images in a batch.
        width: of the two hidden layers.
        epoch_length: batches of an epoch, for which the images are repeated; by default one pass over them.
    """

    def __init__(self, batch_size: int = 64, width: int = 256, epoch_length: int | None = None) -> None:
        torch.manual_seed(0)
        digits = load_digits()
        count = IMAGES if epoch_length is None else epoch_length * batch_size
        rows = torch.arange(count) % IMAGES
        images = torch.tensor(digits.data, dtype=torch.float32)[rows] / 16.0
        data = TensorDataset(images, torch.tensor(digits.target)[rows])
        self.loader = DataLoader(data, batch_size=batch_size, sampler=Shuffled(count))
        self.model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.began: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        """The forward pass, whose beginning is noted."""
        self.began.append(perf_counter())
        return super().loss(batch)

    @property
    def lr(self) -> float:
        """The learning rate."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr


class Lines:
    """What is logged by hand: a line on the console and one in a file, one JSON object each."""

    def __init__(self, directory: Path) -> None:
        self._console = io.StringIO()
        self._file = open(directory / "metrics.jsonl", "w")  # noqa: SIM115

    def write(self, iteration: int, loss: float, lr: float) -> None:
        """Write both."""
        print(f"iteration {iteration} loss {loss:.4f} lr {lr}", file=self._console)
        self._file.write(json.dumps({"step": iteration, "loss": loss, "lr": lr}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Turns:
    """Pauses an engine that owns its loop: it runs in a greenlet, which hands back where an epoch begins.

    turns = Turns(15, lambda: engine.train())      # engine's hook for the beginning of an epoch: turns.epoch_begins
    turns.go_on()                                  # trains 15 epochs, and goes on from there the next time

    A greenlet is no thread: the engine runs on the main thread, as the others do, and the switch takes microseconds.
    """

    def __init__(self, epochs: int, train: Callable[[], object]) -> None:
        self._epochs, self._begun = epochs, 0
        self._engine = import_module("greenlet").greenlet(train)

    def epoch_begins(self) -> None:
        """Hand back, when a turn's epochs are done."""
        if self._begun > 0 and self._begun % self._epochs == 0:
            self._engine.parent.switch()
        self._begun += 1

    def go_on(self) -> None:
        """Run the next turn.

        Raises:
            RuntimeError: the engine ended its training by itself.
        """
        self._engine.parent = import_module("greenlet").getcurrent()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hints about workers and log intervals
            self._engine.switch()
        if self._engine.dead:
            raise RuntimeError("the engine ended its training before the benchmark did")

    def close(self) -> None:
        """Unwind the engine."""
        if self._engine:
            self._engine.throw()


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Set-up without greetings: what goes to stdout, and what these loggers say below an error, is not seen."""
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def in_turns(turns: Turns, finish: Callable[[], object], lines: Lines | None = None) -> Iterator[None]:
    """Yield after each turn of an engine, and again after `finish` has written what the turn left.

    `finish` waits for TensorBoard's thread.
    """
    try:
        while True:
            turns.go_on()
            yield
            finish()
            yield
    finally:
        turns.close()
        if lines is not None:
            lines.close()


def ignite(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """pytorch-ignite with handlers; one call of `run` a turn, which goes on where the last one ended."""
    engines, handlers = import_module("ignite.engine"), import_module("ignite.handlers")
    engine = engines.Engine(lambda engine, batch: job.step(batch).item())
    lines, events = Lines(directory), engines.Events
    every = events.ITERATION_COMPLETED(every=EVERY)
    engine.add_event_handler(every, lambda e: lines.write(e.state.iteration, e.state.output, job.lr))
    disk = handlers.DiskSaver(str(directory), require_empty=False)
    saved = {"model": job.model, "optimizer": job.optimizer}
    engine.add_event_handler(events.EPOCH_COMPLETED, handlers.Checkpoint(saved, disk, n_saved=2))
    logger = handlers.TensorboardLogger(log_dir=str(directory))
    logger.attach_output_handler(engine, every, tag="train", output_transform=lambda loss: {"loss": loss})
    logger.attach_opt_params_handler(engine, every, optimizer=job.optimizer)
    try:
        while True:
            engine.run(job.loader, max_epochs=engine.state.epoch + epochs)
            yield
            logger.writer.flush()
            yield
    finally:
        logger.close()
        lines.close()


def mmengine(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """MMEngine's Runner: its six default hooks, its console and log file, LocalVisBackend, TensorboardVisBackend."""
    runners, models, hooks = (import_module(f"mmengine.{name}") for name in ("runner", "model", "hooks"))

    class Model(models.BaseModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, *batch: torch.Tensor, mode: str) -> dict[str, torch.Tensor]:
            return {"loss": job.loss(batch)}

    class Pause(hooks.Hook):  # type: ignore[misc, name-defined]
        def before_train_epoch(self, runner: Any) -> None:
            turns.epoch_begins()

    backends = [{"type": "LocalVisBackend"}, {"type": "TensorboardVisBackend"}]
    with quiet():
        runner = runners.Runner(
            Model(),
            str(directory),
            train_dataloader=job.loader,
            optim_wrapper=import_module("mmengine.optim").OptimWrapper(job.optimizer),
            train_cfg={"by_epoch": True, "max_epochs": FOREVER},
            default_hooks={
                "logger": {"type": "LoggerHook", "interval": EVERY},
                "checkpoint": {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 2},
            },
            custom_hooks=[Pause()],
            visualizer={"type": "Visualizer", "vis_backends": backends},
            default_scope="mmengine",
            experiment_name=directory.parent.name,  # loggers and visualizers are shared under this name
        )
    turns = Turns(epochs, runner.train)
    board = runner.visualizer.get_backend("TensorboardVisBackend")
    return in_turns(turns, lambda: board.experiment.flush())


def lightning(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """Lightning: `self.log`, TensorBoardLogger, a Logger of our own for the lines, ModelCheckpoint."""
    lightning = import_module("lightning.pytorch")
    loggers = import_module("lightning.pytorch.loggers")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = job.loss(batch)
            self.log("loss", loss)
            if self.trainer.global_step % EVERY == EVERY - 1:
                self.log("lr", job.lr)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

    class LinesLogger(loggers.Logger):  # type: ignore[misc, name-defined]
        name, version = "lines", "0"

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            lines.write(step or 0, metrics["loss"], metrics["lr"])

    class Pause(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            turns.epoch_begins()

    checkpoint = import_module("lightning.pytorch.callbacks").ModelCheckpoint
    lines, board = Lines(directory), loggers.TensorBoardLogger(str(directory), name="", version="")
    with quiet("lightning.pytorch", "lightning.fabric"):
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=FOREVER,
            logger=[board, LinesLogger()],
            log_every_n_steps=EVERY,
            callbacks=[Pause(), checkpoint(str(directory), save_top_k=1)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    turns = Turns(epochs, lambda: trainer.fit(Module(), job.loader))
    return in_turns(turns, lambda: board.experiment.flush(), lines)


def transformers(job: Job, epochs: int, directory: Path) -> Iterator[None]:
    """transformers.Trainer: its TensorBoardCallback, a callback for the lines, its checkpoints, the same loader."""
    transformers = import_module("transformers")
    integrations = import_module("transformers.integrations")

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return job.loader

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return job.loss(inputs)

    class LinesAndPause(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            lines.write(state.global_step, logs["loss"], logs["learning_rate"])

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.epoch_begins()

    lines = Lines(directory)
    board = import_module("torch.utils.tensorboard").SummaryWriter(str(directory))
    constant = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 1.0)
    with quiet("transformers", "accelerate"):
        trainer = Trainer(
            model=job.model,
            args=transformers.TrainingArguments(
                str(directory),
                per_device_train_batch_size=job.loader.batch_size,
                num_train_epochs=FOREVER,
                logging_steps=EVERY,
                save_strategy="epoch",
                save_total_limit=2,
                max_grad_norm=0.0,
                use_cpu=True,
                disable_tqdm=True,
                report_to="none",
            ),
            train_dataset=job.loader.dataset,
            optimizers=(job.optimizer, constant),
            callbacks=[integrations.TensorBoardCallback(board), LinesAndPause()],
        )
    trainer.remove_callback(transformers.PrinterCallback)
    turns = Turns(epochs, trainer.train)
    return in_turns(turns, board.flush, lines)


PEERS: dict[str, tuple[tuple[str, ...], Training]] = {
    "pytorch-ignite": (("pytorch-ignite",), ignite),
    "MMEngine": (("mmengine", "greenlet"), mmengine),
    "Lightning": (("lightning", "greenlet"), lightning),
    "transformers.Trainer": (("transformers", "accelerate", "greenlet"), transformers),
}
"""Label: the distributions it needs, and its training."""
