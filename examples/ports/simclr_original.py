"""Learn features of digits from two noisy views of each (SimCLR), then a linear classifier on the frozen features."""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

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


def nt_xent(one: Tensor, two: Tensor) -> Tensor:
    """Return the loss that tells the two views of an image from all others of the batch."""
    z = F.normalize(torch.cat([model(one), model(two)]), dim=1)
    likeness = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(likeness, torch.arange(len(z)).roll(len(one)))


loader = DataLoader(TwoViews(), batch_size=128, shuffle=True, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * len(loader))
for _ in range(4):
    for one, two in loader:
        loss = nt_xent(one, two)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(loss.item())

encoder.eval().requires_grad_(False)
probe_optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
for _ in range(3):
    for image, label in DataLoader(train, batch_size=128, shuffle=True):
        loss = F.cross_entropy(head(encoder(image)), label)
        probe_optimizer.zero_grad()
        loss.backward()
        probe_optimizer.step()
    print(loss.item())

torch.save([model.state_dict(), head.state_dict()], sys.argv[1])
