"""Train a classifier. Put your data into `load_data`, and your model into `build_model`.

    python train.py                       # Ctrl-C stops it with a checkpoint
    python train.py --resume              # continues where it stopped, even in the middle of an epoch
    tensorboard --logdir runs/start
    eventloop report runs/start           # shows the time of each part

It needs: pip install torchmetrics tensorboard rich.
"""

from __future__ import annotations

import argparse
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from eventloop import Trainer, seed_everything
from eventloop.hooks import AmpOptimizerHook, CheckpointHook, EarlyStoppingHook, EMAHook
from eventloop.writers import ConsoleWriter, JSONLWriter, TensorBoardWriter

CLASSES = 2


def load_data(samples: int) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return images of 8x8 pixels with one bright row (class 0) or column (class 1), and their classes."""
    images, target = torch.rand(samples, 1, 8, 8), torch.randint(CLASSES, (samples,))
    for image, kind, at in zip(images[:, 0], target, torch.randint(8, (samples,)), strict=True):
        (image if kind == 0 else image.T)[at] += 0.5
    return TensorDataset(images, target)


def build_model() -> nn.Module:
    """Return the model: images (N, 1, 8, 8) to scores (N, CLASSES)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def build_trainer(epochs: int, work_dir: str) -> Trainer:
    """Return a trainer with AdamW, a warm-up, cosine decay, clipping, bfloat16, and averaged weights."""
    train = DataLoader(load_data(8192), batch_size=32, shuffle=True, drop_last=True)
    val = DataLoader(load_data(1024), batch_size=64)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    steps = epochs * len(train)  # iterations: the trainer steps the schedule after each one
    warmup = steps // 10
    schedule = SequentialLR(
        optimizer,
        schedulers=[
            LinearLR(optimizer, start_factor=0.1, total_iters=warmup),
            CosineAnnealingLR(optimizer, T_max=steps - warmup),
        ],
        milestones=[warmup],
    )
    return Trainer(
        model,
        optimizer=optimizer,
        schedulers=[schedule],
        loss_fn=F.cross_entropy,
        train_loader=train,
        val_loader=val,
        evaluator={"accuracy": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)},
        max_epochs=epochs,
        work_dir=work_dir,
        device="auto",
        hooks=[
            AmpOptimizerHook(dtype="bfloat16", grad_clip={"max_norm": 1.0}),
            EMAHook(momentum=0.05),
            CheckpointHook(interval=1, max_keep_ckpts=2, save_best="accuracy"),
            EarlyStoppingHook(monitor="accuracy", patience=5),
        ],
        writers=[ConsoleWriter(), JSONLWriter(), TensorBoardWriter()],
    )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train a classifier.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--work-dir", default="runs/start")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    seed_everything(options.seed)
    trainer = build_trainer(options.epochs, options.work_dir)
    if options.resume:
        with suppress(FileNotFoundError):  # there is no checkpoint at the first start
            trainer.resume("auto", changed="apply")  # settings that were edited since then apply
    try:
        trainer.train()
    except KeyboardInterrupt:  # Ctrl-C, after a checkpoint
        print(trainer.where_to_resume)
    print(trainer.summary())


if __name__ == "__main__":
    main()
