"""Train an autoencoder on handwritten digits: the job of Lightning's first example (examples/README.md).

pip install 'torch-eventloop[demo]' && python examples/first_autoencoder.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from eventloop import Trainer
from eventloop.writers import JSONLWriter

images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
train, val = random_split(TensorDataset(images, images), [1437, 360])  # an image is its own target

encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 3))
decoder = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 64))
model = nn.Sequential(encoder, decoder)

trainer = Trainer(
    model,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    loss_fn=nn.functional.mse_loss,
    train_loader=DataLoader(train, batch_size=32, shuffle=True),
    val_loader=DataLoader(val, batch_size=360),
    max_epochs=10,
    writers=[JSONLWriter()],
    device="auto",
)
trainer.train()
