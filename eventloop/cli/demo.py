"""Implement `eventloop demo`, which trains a small CNN on 1,797 real handwritten digits.

`build` is a complete example of a trainer: it validates, keeps the best checkpoints, and writes to the
console, JSONL and TensorBoard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop.checkpoint import find_checkpoints
from eventloop.checkpoint.directory import scan
from eventloop.cli.output_file import print_stderr
from eventloop.eventlog.jsonl import FILE_NAME
from eventloop.events import AfterLoadCheckpoint
from eventloop.hooks import CheckpointHook
from eventloop.interrupt import graceful_interrupt
from eventloop.training.trainer import Trainer
from eventloop.util.suggest import suggest
from eventloop.util.terminal import OutputError, print_line
from eventloop.writers import ConsoleWriter, JSONLWriter, TensorBoardWriter
from eventloop.writers.jsonl import read_jsonl

VALIDATION = 360
"""The number of digits for the validation."""
WORK_DIR = Path("runs/demo")
EPOCHS = 10
SEED = 0
BROKEN_PIPE = 141
"""The exit code that a shell reports for a process ended by SIGPIPE."""
HINT = "\nCtrl-C: stopping after this iteration, with a checkpoint. Ctrl-C again ends at once."
SPLIT_SEED = 0
"""The seed of the split into training and validation, fixed so that accuracies of runs can be compared."""


class DigitsCNN(nn.Sequential):
    """Classify digits by two convolutions with BatchNorm: images (N, 1, 8, 8) in 0..1 to scores (N, 10)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 16, 10),
        )


def check_seed(seed: int) -> None:
    """Check that torch's generators accept a seed."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(
            f"--seed must be from -2**63 to 2**64 - 1, the range of torch's generators, got {seed}"
        )


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's digits, split into 1,437 for training and 360 for validation."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ImportError(
            "the demo needs the data of scikit-learn: pip install 'torch-eventloop[demo]'"
        ) from error
    digits: Any = load()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    target = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(SPLIT_SEED))
    val, train = order[:VALIDATION], order[VALIDATION:]
    return TensorDataset(images[train], target[train]), TensorDataset(images[val], target[val])


def build(work_dir: Path, *, epochs: int, device: str, seed: int) -> Trainer:
    """Return the trainer of the demo."""
    check_seed(seed)
    torch.manual_seed(seed)
    train, val = load_digits()
    train_loader = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = DigitsCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-3, total_steps=epochs * len(train_loader) + 1
    )
    return Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=train_loader,
        val_loader=DataLoader(val, batch_size=180),
        schedulers=[scheduler],
        max_epochs=epochs,
        hooks=[CheckpointHook(interval=1, max_keep_ckpts=3, save_best="accuracy")],
        writers=[ConsoleWriter(), JSONLWriter(), TensorBoardWriter()],
        work_dir=work_dir,
        device=device,
    )


def prepare(
    work_dir: Path | None, *, epochs: int | None, device: str, seed: int | None, resume: str | None
) -> Trainer:
    """Check the user's input, and return the demo's trainer, ready to train.

    Args:
        work_dir: the directory of the run; None for a new one under runs/, or to resume the newest run.
        epochs: the number of epochs; None for the number of the resumed run, or else `EPOCHS`.
        device: "auto" or a device of torch.
        seed: the seed; None for `SEED`.
        resume: the argument of `Trainer.resume`; None for a new run.

    Raises:
        ImportError, OSError, ValueError, RuntimeError: the input is bad; the message names it.
    """
    device = choose_device(device)
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)  # two threads are slower for so small a model, above all on a busy machine
    if resume is None:
        work_dir = free_name(work_dir or WORK_DIR)
    elif work_dir is None:
        work_dir = newest_run(WORK_DIR)
    with removing_empty_directories(work_dir):
        trainer = build(
            work_dir,
            epochs=epochs or epochs_of(work_dir) or EPOCHS,
            device=device,
            seed=SEED if seed is None else seed,
        )
        if resume is not None:
            with trainer.bus.subscribe(check_epochs, AfterLoadCheckpoint):
                print_line(f"resuming from {trainer.resume(resume, changed='keep')}")
            if seed is not None:
                print_line(
                    f"--seed {seed} has no effect: the weights and the random state are those of the "
                    "checkpoint"
                )
    return trainer


@contextmanager
def removing_empty_directories(path: Path) -> Iterator[None]:
    """Remove the empty directories that the block has created on a path, if the block fails."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in missing:  # the innermost first
                folder.rmdir()
        raise


def run(trainer: Trainer) -> int:
    """Train, save and print the summary; return the exit code.

    The code is 0 if the run is complete, 130 after a stop by Ctrl-C, 128 plus the signal's number after
    another signal, 2 if the output cannot be written, and 141 if its reader has closed it.

    Raises:
        KeyboardInterrupt: a second Ctrl-C.
    """
    if trainer.epoch >= (trainer.max_epochs or 0) and validated(trainer):
        print_line(f"{trainer.work_dir} is complete: all {trainer.max_epochs} epochs are trained")
        trainer.close()
        return 0
    with graceful_interrupt(trainer, hint=HINT):
        try:
            trainer.train()
            code = 130 if trainer.stop_reason is not None else 0
        except SystemExit as ended:  # a job scheduler's signal; the summary is still to be printed
            code = int(ended.code or 0)
        trainer.close()
    try:
        was_printed = print_line(f"\n{closing_lines(trainer)}")
    except OutputError as error:
        print_stderr(str(error))
        return code or 2  # a job scheduler expects the code of its signal first
    consoles = [writer for writer in trainer.writers if isinstance(writer, ConsoleWriter)]
    pipe_is_broken = not was_printed or any(console.nobody_reads for console in consoles)
    return code or (BROKEN_PIPE if pipe_is_broken else 0)


def validated(trainer: Trainer) -> bool:
    """Return whether `metrics.jsonl` has a validation of the last epoch, which a Ctrl-C may have prevented.

    The checkpoint does not record it, because it is saved before the validation of its epoch.
    """
    metrics = trainer.work_dir / FILE_NAME
    rows = read_jsonl(metrics) if metrics.exists() else ()
    return any(row.get("mode") == "val" and row["epoch"] == trainer.epoch for row in rows)


def newest_run(path: Path) -> Path:
    """Return the directory with the newest checkpoint among `path`, `path-2` and so on, else `path`."""
    last_saved = {
        run: max(checkpoint.stat().st_mtime_ns for checkpoint in checkpoints)
        for run in [path, *path.parent.glob(f"{path.name}-*")]
        if (checkpoints := find_checkpoints(run))
    }
    return max(last_saved, key=lambda run: last_saved[run], default=path)


def epochs_of(work_dir: Path) -> int | None:
    """Return the number of epochs of the run in a directory, from its newest checkpoint; None without one."""
    checkpoints = scan(work_dir)
    return next((checkpoints.manifests[path].max_epochs for path in checkpoints.newest_first()), None)


def check_epochs(trainer: Trainer, event: AfterLoadCheckpoint) -> None:
    """Refuse to resume with another number of epochs than that of the learning rate schedule.

    It is called before the state of the checkpoint is loaded.

    Raises:
        ValueError: the numbers differ.
    """
    saved, epochs = (trainer.checkpoint or {}).get("meta", {}).get("max_epochs"), trainer.max_epochs
    if saved is not None and saved != epochs:
        raise ValueError(
            f"the run of {event.path} was begun with --epochs {saved}, and its learning rate schedule ends "
            f"there: resume it with --epochs {saved}, got --epochs {epochs}"
        )


def closing_lines(trainer: Trainer) -> str:
    """Return the summary, the best score, and the commands that continue the run and show its curves."""
    lines = [trainer.summary(), ""]
    hook = next(hook for hook in trainer.hooks if isinstance(hook, CheckpointHook))
    if hook.best.score is not None:
        lines.append(f"best accuracy  {hook.best.score:.2%}, in {hook.directory / hook.best.name}")
    work_dir = quote(str(trainer.work_dir))  # quoted for a shell
    if trainer.stop_reason is not None:
        command = f"continue with: eventloop demo --resume --work-dir {work_dir}"
        saved = bool(find_checkpoints(trainer.work_dir))
        lines.append(
            f"stopped        {trainer.stop_reason}; {command if saved else 'no checkpoint was saved'}"
        )
    lines.append(f"curves         tensorboard --logdir {work_dir}")
    return "\n".join(lines)


def choose_device(device: str) -> str:
    """Check that a device can be used, and return it; "auto" becomes "cuda" or, without a GPU, "cpu".

    Raises:
        ValueError: the device cannot be used here.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    known = ["auto", "cpu", "cuda"]
    try:
        torch.zeros(1, device=device).item()  # raises for "meta", too
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        near = suggest(device, known) if device not in known else ""
        raise ValueError(f"device {device!r} cannot be used here{near} ({reason})") from error
    return device


def free_name(path: Path) -> Path:
    """Return `path` if no directory with files is there; else print and return a free `path-2`, `path-3`, ...

    A path to a file is returned unchanged; the trainer refuses it.
    """
    if not path.is_dir() or not any(path.iterdir()):
        return path
    named = path.resolve() if path.name in ("", "..") else path  # "." and ".." have no name to add to
    if not named.name:
        raise ValueError(
            f"--work-dir must be a directory for one run, got {path}: name a new directory in it"
        )
    number = 2
    while (candidate := named.with_name(f"{named.name}-{number}")).exists():
        number += 1
    print_line(
        f"{path} already holds a run, which stays as it is: the new run goes to {candidate} "
        "(--resume continues it)"
    )
    return candidate
