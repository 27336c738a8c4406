"""The port of simclr_original.py: two trainings, one after the other."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from eventloop import Trainer

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
train = TensorDataset(torch.tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.tensor(labels))


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Each digit twice, shifted and with noise."""

    def __len__(self) -> int:
        return len(train)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = train[index][0]
        return self.view(image), self.view(image)

    def view(self, image: Tensor) -> Tensor:
        """Shift an image by up to a pixel, and add noise."""
        across, down = torch.randint(-1, 2, (2,)).tolist()
        return image.roll((across, down), (-1, -2)) + 0.1 * torch.randn_like(image)


encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
projector = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))
model = nn.Sequential(encoder, projector)
head = nn.Linear(64, 10)


def nt_xent(trainer: Trainer, views: list[Tensor]) -> Tensor:
    """Return the loss that tells the two views of an image from all others of the batch."""
    z = F.normalize(torch.cat([model(view) for view in views]), dim=1)
    likeness = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(likeness, torch.arange(len(z)).roll(len(views[0])))


loader = DataLoader(TwoViews(), batch_size=128, shuffle=True, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * len(loader))
Trainer(
    model,
    optimizer=optimizer,
    schedulers=[schedule],
    train_step=nt_xent,
    train_loader=loader,
    max_epochs=4,
    work_dir="runs/simclr",
).train()

encoder.eval().requires_grad_(False)
Trainer(
    nn.Sequential(encoder, head),
    optimizer=torch.optim.Adam(head.parameters(), lr=1e-2),
    loss_fn=F.cross_entropy,
    train_loader=DataLoader(train, batch_size=128, shuffle=True),
    max_epochs=3,
    work_dir="runs/simclr_probe",
).train()

torch.save([model.state_dict(), head.state_dict()], sys.argv[1])
