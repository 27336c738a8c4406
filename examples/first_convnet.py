"""Classify handwritten digits with a convnet: the job of Keras's first example (examples/README.md).

pip install 'torch-eventloop[demo]' && python examples/first_convnet.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from eventloop import Trainer
from eventloop.hooks import CheckpointHook, EarlyStoppingHook

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = TensorDataset(images, torch.tensor(digits.target))
train, val, test = random_split(data, [0.7, 0.15, 0.15])
print(f"images: {tuple(images.shape)}, {len(train)} to train on, {len(val)} to validate, {len(test)} to test")

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.5),
    nn.Linear(64, 10),
)
print(model)

trainer = Trainer(
    model,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    loss_fn=nn.functional.cross_entropy,
    train_loader=DataLoader(train, batch_size=32, shuffle=True),
    val_loader=DataLoader(val, batch_size=128),
    test_loader=DataLoader(test, batch_size=128),
    max_epochs=20,
    hooks=[CheckpointHook(interval=1), EarlyStoppingHook("loss", patience=2)],
)
trainer.train()
print(trainer.test())  # the loss and the accuracy

torch.save(model.state_dict(), "final_model.pth")
model.load_state_dict(torch.load("final_model.pth"))
with torch.inference_mode():
    predictions = model.eval()(images).softmax(1)
