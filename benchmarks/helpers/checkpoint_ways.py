"""Ways to save the state of a training, for `checkpoint_stall`: eventloop's, and those in common use.

Each is told at the end of an iteration to save, and is waited for. What the training thread spends on it is counted
in `blocked`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save

from eventloop import Trainer
from eventloop.checkpoint.disk import DISK
from eventloop.events import AfterTrainIter
from eventloop.hooks import CheckpointHook


class Way:
    """The base class of the ways to save, and the way that saves nothing."""

    name = "no checkpoint"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        self.model, self.optimizer, self.directory = model, optimizer, directory
        self.blocked = 0.0
        self.due = False
        self.number = 0
        directory.mkdir(parents=True, exist_ok=True)

    def hooks(self) -> list[Any]:
        """Return the hooks of eventloop that this way needs."""
        return []

    def attach(self, trainer: Trainer) -> None:
        """Subscribe to the iterations of the trainer, to save at the end of one that is due."""
        trainer.bus.subscribe(self._save_if_due, AfterTrainIter, priority=90)

    def _save_if_due(self, event: AfterTrainIter) -> None:
        if self.due:
            self.due = False
            with self.counted():
                self.save()

    def save(self) -> None:
        """Save the state as it is now."""

    def wait(self) -> None:
        """Wait until the last save is on the disk."""

    def done(self) -> bool:
        """Return whether the last save is on the disk."""
        return True

    def close(self) -> None:
        """End what the way needs for saving; called after the last save."""

    def state(self) -> dict[str, Any]:
        """Return the state that the ways other than eventloop's save: model and optimizer."""
        return {"state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def path(self) -> Path:
        """Return a new path, and remove the save before the last, so that the disk does not fill."""
        self.number += 1
        DISK.remove(self.directory / f"{self.number - 2}.pth")
        return self.directory / f"{self.number}.pth"

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the time of the block to `blocked`, the time that the training thread spends on saving."""
        began = perf_counter()
        try:
            yield
        finally:
            self.blocked += perf_counter() - began


class Synchronous(Way):
    """`torch.save`, flush, fsync, on the training thread."""

    name = "torch.save + fsync"

    def save(self) -> None:
        """Write it now."""
        write(self.state(), self.path())


class CloneAndThread(Way):
    """Every tensor cloned, and written by a thread: Lightning's AsyncCheckpointIO."""

    name = "clone + thread"
    _thread: threading.Thread | None = None

    def save(self) -> None:
        """Clone, and hand over."""
        self._thread = threading.Thread(target=write, args=(clone(self.state()), self.path()))
        self._thread.start()

    def wait(self) -> None:
        """Join the thread."""
        if self._thread is not None:
            self._thread.join()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._thread is None or not self._thread.is_alive()


class AsyncSave(Way):
    """`torch.distributed.checkpoint.async_save`, one rank."""

    name = "dcp.async_save"
    _future: Any = None

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
        super().__init__(model, optimizer, directory)
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=0, world_size=1)

    def save(self) -> None:
        """Stage, and hand over."""
        writer = FileSystemWriter(self.path(), sync_files=True)
        self._future = async_save(self.state(), storage_writer=writer)

    def wait(self) -> None:
        """Wait for its future."""
        if self._future is not None:
            self._future.result()

    def done(self) -> bool:
        """Whether its future is there."""
        return self._future is None or bool(self._future.done())

    def close(self) -> None:
        """Destroy the process group that `async_save` needs."""
        dist.destroy_process_group()


class Ours(Way):
    """CheckpointHook, as it is by default."""

    name = "eventloop"

    def hooks(self) -> list[Any]:
        """The hook, told when to save."""
        self.hook = _OnDemand(self)
        return [self.hook]

    def attach(self, trainer: Trainer) -> None:
        """Count also the time for which the optimizer's step waits for the copy."""
        self._trainer, join = trainer, trainer.copying.join

        def counted_join() -> None:
            if self.saving:  # called from the hook, it is counted there
                join()
            else:
                with self.counted():
                    join()

        self.saving = False
        trainer.copying.join = counted_join  # type: ignore[method-assign]

    def wait(self) -> None:
        """Wait until it is on the disk."""
        self.hook.saves.finish(self._trainer)

    def done(self) -> bool:
        """Whether the saver has answered."""
        saver = self.hook.saves.saver
        return saver is None or not saver.busy


class _OnDemand(CheckpointHook):
    """Saves at the end of the iteration in which it is told to, and counts what that takes."""

    def __init__(self, way: Ours) -> None:
        super().__init__(by_epoch=False, max_keep_ckpts=1, save_last=False)
        self._way = way

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Save when told to."""
        self._way.saving = True
        with self._way.counted():
            super().after_train_iter(trainer, event)
            if self._way.due:
                self._way.due = False
                self._save(trainer, f"iter_{trainer.iter + 1}", within="iter")
        self._way.saving = False


WAYS: dict[str, type[Way]] = {way.name: way for way in (Way, Synchronous, CloneAndThread, AsyncSave, Ours)}


def write(state: dict[str, Any], path: Path) -> None:
    """torch.save to a new file, on the disk when it returns."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def clone(value: Any) -> Any:
    """A nested state with copies of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    return value
