"""Two ranks that Lightning starts from one process, without running the script again: `spawned_script.py STRATEGY FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from eventloop.bridges.lightning import EventLoopCallback
from eventloop.hooks import EMAHook, Hook
from eventloop.writers import JSONLWriter
from tests.bridges.ranks_script import Net, samples


class Module(LightningModule):  # type: ignore[misc]
    """The model, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(fails=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stops(Hook):
    """Rank 1 stops in its second iteration; each rank writes how its run ended to a file of its own."""

    def after_train_iter(self, trainer: Any, event: Any) -> None:
        """Stop."""
        if trainer.rank == 1 and event.iter == 1:
            trainer.stop("why")

    def after_run(self, trainer: Any, event: Any) -> None:
        """Write."""
        Path(sys.argv[2], f"rank{trainer.rank}.txt").write_text(f"{trainer.iter} {event.reason}")


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    bridge = EventLoopCallback(hooks=[EMAHook(), Stops()], writers=[JSONLWriter()], work_dir=folder / "run")
    Trainer(
        max_epochs=2, strategy=sys.argv[1], accelerator="cpu", devices=2, logger=False, default_root_dir=folder,
        enable_progress_bar=False, callbacks=[bridge],
    ).fit(Module(), DataLoader(samples(), 2))  # fmt: skip
