"""Train a small classifier by hand or with a trainer, and print the processor time of each part of the process.

    python -m benchmarks.helpers.short_run_ways WAY ITERATIONS DIRECTORY

`short_run` starts it as a process for each run. What a way needs is imported within it, so that the other pays nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ORIGINAL, PORT, WITHOUT_WRITERS = "original", "port", "port without writers"
WAYS = (ORIGINAL, PORT, WITHOUT_WRITERS)
PARTS = ("imports", "construction", "training")
EVERY, BATCH, VALIDATION = 10, 64, 10
"""Iterations from one log to the next, samples of a batch, and batches of the validation at the end."""


def make_parts(iterations: int) -> tuple[Any, Any, nn.Module, Any]:
    """Return the training's batches, those of the validation, the model and its optimizer."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, target = torch.randn(iterations * BATCH, 64), torch.randint(0, 10, (iterations * BATCH,))
    last = slice(-VALIDATION * BATCH, None)
    train = DataLoader(TensorDataset(inputs, target), BATCH, shuffle=True)
    val = DataLoader(TensorDataset(inputs[last], target[last]), BATCH)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return train, val, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(iterations: int, directory: str) -> Iterator[None]:
    """Do one part at each `next`: import, construct, train with a JSON line every ten iterations and validate."""
    import torch.nn.functional as F

    yield
    train, val, model, optimizer = make_parts(iterations)
    yield
    with open(Path(directory, "log.jsonl"), "w", encoding="utf-8") as log:
        model.train()
        for i, (inputs, target) in enumerate(train):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            if (i + 1) % EVERY == 0:
                log.write(json.dumps({"step": i + 1, "loss": loss.item()}) + "\n")
        log.write(json.dumps(validate(model, val)) + "\n")
    yield


def validate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return the mean loss and the accuracy."""
    import torch
    import torch.nn.functional as F

    model.eval()
    loss = correct = count = 0.0
    with torch.no_grad():
        for inputs, target in batches:
            outputs = model(inputs)
            loss += F.cross_entropy(outputs, target).item() * len(target)
            correct += (outputs.argmax(1) == target).sum().item()
            count += len(target)
    return {"loss": loss / count, "accuracy": correct / count}


def ported(iterations: int, directory: str, *, writes: bool) -> Iterator[None]:
    """Do one part at each `next`, with a trainer and its default hooks but that of checkpoints."""
    import torch.nn.functional as F

    from eventloop import Trainer
    from eventloop.writers import JSONLWriter

    yield
    train, val, model, optimizer = make_parts(iterations)
    trainer = Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=train,
        val_loader=val,
        max_epochs=1,
        default_hooks={"checkpoint": None},
        writers=[JSONLWriter()] if writes else [],
        work_dir=directory,
    )
    yield
    trainer.train()
    yield


def main() -> None:
    """Run the way of the command line, and print the seconds of its parts as JSON."""
    way, iterations, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if way == ORIGINAL:
        parts = by_hand(iterations, directory)
    else:
        parts = ported(iterations, directory, writes=way == PORT)
    seconds, before = {}, process_time()
    for part, _ in zip(PARTS, parts, strict=True):
        seconds[part] = process_time() - before
        before += seconds[part]
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
