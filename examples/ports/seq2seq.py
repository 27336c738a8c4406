"""The port of seq2seq_original.py: the share of teacher forcing follows the trainer's counter."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer

torch.manual_seed(0)
START = 10
sources = torch.randint(10, (1024, 6))
loader = DataLoader(TensorDataset(sources, sources.flip(1)), batch_size=32, shuffle=True)


class Seq2Seq(nn.Module):
    """Read a sequence, and write another, symbol by symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.encoder, self.decoder = nn.GRU(16, 64, batch_first=True), nn.GRUCell(16, 64)
        self.output = nn.Linear(64, 10)

    def forward(self, source: Tensor, target: Tensor, forcing: float) -> Tensor:
        """Return the logits; `forcing` is the probability that the decoder is shown the right symbol."""
        hidden = self.encoder(self.embedding(source))[1][0]
        symbol, logits = torch.full((len(source),), START), []
        for right in target.T:
            hidden = self.decoder(self.embedding(symbol), hidden)
            logits.append(self.output(hidden))
            symbol = torch.where(torch.rand(len(source)) < forcing, right, logits[-1].argmax(1))
        return torch.stack(logits, 2)


model = Seq2Seq()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def train_step(trainer: Trainer, batch: list[Tensor]) -> Tensor:
    """Return the loss of a batch."""
    source, target = batch
    return F.cross_entropy(model(source, target, forcing=0.98**trainer.iter), target)


Trainer(
    model,
    optimizer=optimizer,
    train_step=train_step,
    train_loader=loader,
    max_epochs=3,
    work_dir="runs/seq2seq",
    default_hooks={"optimizer": {"grad_clip": {"max_norm": 1.0}}},
).train()
torch.save(model.state_dict(), sys.argv[1])
