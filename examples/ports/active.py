"""The port of active_original.py: a loop of its own, whose data set grows before each epoch but the first."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from eventloop import Trainer

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
train = TensorDataset(torch.tensor(images).float().div(16), torch.tensor(labels))
labelled = torch.randperm(len(train))[:64].tolist()
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def least_certain(logits: Tensor, count: int = 32) -> list[int]:
    """Return the images with the highest entropy among those without a label."""
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    entropy[labelled] = -1
    return entropy.topk(count).indices.tolist()


def set_labelled(samples: list[int]) -> None:
    """Take the labelled images of a checkpoint."""
    labelled[:] = samples


trainer = Trainer(model, optimizer=optimizer, max_epochs=12, work_dir="runs/active")
trainer.remember("labelled", lambda: list(labelled), set_labelled)
for epoch in trainer.epochs():
    while len(labelled) < 64 + 32 * epoch:
        labelled += least_certain(trainer.predict(DataLoader(train, batch_size=256)))
    for image, label in trainer.batches(DataLoader(Subset(train, labelled), batch_size=32, shuffle=True)):
        trainer.outputs = {"loss": F.cross_entropy(model(image), label)}

torch.save([model.state_dict(), torch.tensor(labelled)], sys.argv[1])
