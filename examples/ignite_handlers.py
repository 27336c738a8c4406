"""Use handlers of pytorch-ignite in this engine's trainer.

pip install 'torch-eventloop[demo,ignite]' && python examples/ignite_handlers.py
"""

from __future__ import annotations

import tempfile

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import EarlyStopping, PiecewiseLinear
from ignite.metrics import RunningAverage
from torch.utils.data import DataLoader

from eventloop import Trainer
from eventloop.bridges.foreign import Foreign
from eventloop.bridges.ignite.foreign import evaluates
from eventloop.cli.demo import load_digits
from eventloop.writers import JSONLWriter


def main(work_dir: str) -> None:
    """Train with ignite's warm-up of the learning rate, until its EarlyStopping sees no better accuracy twice."""
    torch.manual_seed(0)
    digits, held_out = load_digits()
    loader = DataLoader(digits, batch_size=32, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    engine = Engine(lambda engine, batch: None)  # it is never run, and has the handlers
    rates = [(0, 0.01), (len(loader), 0.5), (20 * len(loader), 0.0)]
    engine.add_event_handler(Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", rates))
    RunningAverage(output_transform=lambda loss: loss).attach(engine, "loss")

    def show(engine: Engine) -> None:
        rate, loss = optimizer.param_groups[0]["lr"], engine.state.metrics["loss"]
        print(f"epoch {engine.state.epoch}: lr {rate:.3f}, running average of the loss {loss:.3f}")

    engine.add_event_handler(Events.EPOCH_COMPLETED, show)
    evaluator = evaluates(Engine(lambda engine, batch: None))
    evaluator.add_event_handler(
        Events.COMPLETED, EarlyStopping(2, lambda e: e.state.metrics["accuracy"], engine)
    )

    trainer = Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=loader,
        val_loader=DataLoader(held_out, batch_size=360),
        max_epochs=20,
        work_dir=work_dir,
        writers=[JSONLWriter()],
        hooks=[Foreign(engine), Foreign(evaluator, name="evaluator")],
    )
    print(trainer.bus)
    trainer.train()
    print(trainer.epoch, trainer.stop_reason)


if __name__ == "__main__":
    main(tempfile.mkdtemp(prefix="ignite_handlers"))
