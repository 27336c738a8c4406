"""Reverse sequences of digits with a GRU encoder and decoder, with less and less teacher forcing."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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

step = 0
for epoch in range(3):
    for source, target in loader:
        loss = F.cross_entropy(model(source, target, forcing=0.98**step), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    print(epoch, loss.item())

torch.save(model.state_dict(), sys.argv[1])
