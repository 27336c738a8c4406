"""Two ranks that Lightning starts from one process, without running the script again: `spawned_script.py STRATEGY FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from eventloop import Bus
from eventloop.bridges.lightning import EventLoopCallback
from eventloop.events import AfterTrainIter
from eventloop.hooks import EMAHook, Hook
from eventloop.writers import JSONLWriter
from tests.bridges.ranks_script import Net, samples


class Module(LightningModule):  # type: ignore[misc]
    """The model, with its loss; at the end of the fit each rank writes what its handlers saw."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.net, self.seen = Net(fails=False), seen

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Validate nothing."""

    def on_fit_end(self) -> None:
        """Write."""
        Path(sys.argv[2], f"seen{self.global_rank}.txt").write_text(" ".join(sorted(self.seen)))


class Stops(Hook):
    """Rank 1 stops in its second iteration; each rank writes how its run ended to a file of its own."""

    def after_train_iter(self, trainer: Any, event: Any) -> None:
        """Stop."""
        if trainer.rank == 1 and event.iter == 1:
            trainer.stop("why")

    def after_run(self, trainer: Any, event: Any) -> None:
        """Write."""
        with Path(sys.argv[2], f"rank{trainer.rank}.txt").open("a") as file:
            file.write(f"{trainer.iter} {event.reason}\n")


def subscribe(bus: Bus) -> list[str]:
    """Subscribe a handler that runs at once and two that do not; return the list of what they see."""
    seen: list[str] = []
    bus.subscribe(lambda event: seen.append(f"now{event.iter}"), "after_train_iter")
    bus.subscribe(lambda event: seen.append(f"thread{event.iter}"), "after_train_iter", offload="thread")

    @bus.on("after_train_iter")
    async def inspect(event: AfterTrainIter) -> None:
        seen.append(f"task{event.iter}")

    return seen


if __name__ == "__main__":
    strategy, folder = sys.argv[1], Path(sys.argv[2])
    bridge = EventLoopCallback(hooks=[EMAHook(), Stops()], writers=[JSONLWriter()], work_dir=folder / "run")
    seen = subscribe(bridge.bus) if strategy == "ddp_fork" else []  # refused by a bridge that is pickled
    trainer = Trainer(
        max_epochs=2,
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        callbacks=[bridge],
    )
    trainer.fit(Module(seen), DataLoader(samples(), 2))
    assert not seen
    trainer.validate(Module([]), DataLoader(samples(), 2))
