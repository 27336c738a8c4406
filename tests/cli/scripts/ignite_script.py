"""A training by ignite that knows nothing of eventloop; prints a hash of the weights."""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import EarlyStopping
from ignite.metrics import Loss

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--fail", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
data = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)
evaluator = create_supervised_evaluator(model, metrics={"nll": Loss(F.cross_entropy)})
evaluator.add_event_handler(
    Events.COMPLETED, EarlyStopping(50, lambda engine: -engine.state.metrics["nll"], trainer)
)


@trainer.on(Events.EPOCH_COMPLETED)
def validate() -> None:
    evaluator.run(data[:2])
    if options.fail:
        raise ArithmeticError("the script's own error")


evaluator.run(data[:1])
trainer.run(data, max_epochs=options.epochs)
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print(hashlib.sha256(weights).hexdigest())
