"""A training by Lightning that knows nothing of eventloop; prints a hash of the weights."""

import argparse
import hashlib
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--strategy", default="auto")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watcher(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if options.fail:
            raise ArithmeticError("the script's own error")


def main() -> None:
    pl.seed_everything(0)
    loader = DataLoader(
        TensorDataset(torch.randn(32, 4), torch.randint(3, (32,))), batch_size=8, shuffle=True
    )
    module = Module()
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        devices=options.devices,
        strategy=options.strategy,
        callbacks=[Watcher()],
        enable_progress_bar=False,
        log_every_n_steps=1,
    )
    trainer.fit(module, loader, loader)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    if trainer.is_global_zero:
        print(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
