"""Fine-tune a text classifier: the job of the quickstart of Transformers (examples/README.md).

    pip install 'torch-eventloop[transformers]' && python examples/first_text_classifier.py

The model is downloaded, unless the current folder has a folder of its name.
"""

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from eventloop import Trainer

model = AutoModelForSequenceClassification.from_pretrained("distilbert/distilbert-base-uncased")
tokenizer = AutoTokenizer.from_pretrained("distilbert/distilbert-base-uncased")
reviews = [("a moving film", 1), ("a superb cast", 1), ("a dull script", 0), ("a clumsy plot", 0)] * 16


def collate(rows: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    texts, labels = zip(*rows, strict=True)
    return {**tokenizer([*texts], padding=True, return_tensors="pt"), "labels": torch.tensor(labels)}


loader = DataLoader(reviews, batch_size=8, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
trainer = Trainer(
    model,
    optimizer=optimizer,
    schedulers=torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=2 * len(loader)),
    train_step=lambda trainer, batch: trainer.model(**batch).loss,
    train_loader=loader,
    max_epochs=2,
    device="auto",
)
trainer.train()
model.save_pretrained("distilbert-reviews")
tokenizer.save_pretrained("distilbert-reviews")
