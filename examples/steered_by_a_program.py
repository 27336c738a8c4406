"""Let a program steer a training that it watches: python examples/steered_by_a_program.py [DIRECTORY]

The program `tune` reads `eventloop watch DIRECTORY --json`, halves the learning rate when the loss no longer falls, and at
last stops the run. A rule decides here, where a language model may (arXiv 2510.02297). The same run again, to the bit:

    python examples/steered_by_a_program.py runs/again runs/steered/commands.jsonl
"""

import json
import subprocess
import sys
from contextlib import ExitStack, suppress

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Trainer
from eventloop.commands import NoAnswerError, NoRunError, send
from eventloop.hooks import CheckpointHook
from eventloop.writers import JSONLWriter


def tune(work_dir: str, looks: int = 2, halvings: int = 2) -> None:
    """Halve the rate when the loss has not fallen for some looks; after some halvings stop the run."""
    look, least, since = [sys.executable, "-m", "eventloop", "watch", work_dir, "--json"], float("inf"), 0
    with subprocess.Popen(look, stdout=subprocess.PIPE, text=True) as watch:
        for line in watch.stdout or ():
            loss = json.loads(line)["latest"].get("val/loss", float("inf"))
            least, since = (loss, 0) if loss < least else (least, since + 1)
            if since >= looks:
                name, values = ("set", {"lr*": 0.5}) if halvings else ("stop", {"reason": "no longer falls"})
                halvings, since = halvings - 1, 0
                with suppress(NoRunError, NoAnswerError):  # the run may have ended meanwhile
                    answer = send(work_dir, name, arguments=values, source="tune")
                    print(f"loss {loss:.4f}: {name} after {answer.iteration}", answer.reason or answer.result)


def main(work_dir: str = "runs/steered", commands: str | None = None) -> None:
    """Train on noisy points until the program stops the run, or as the commands of an earlier run say."""
    torch.manual_seed(0)
    x = torch.randn(4096, 32)
    data = TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(4096, 1))
    model = torch.nn.Linear(32, 1)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss_fn=F.mse_loss,
        max_epochs=10_000,
        train_loader=DataLoader(data, batch_size=16, shuffle=True),
        val_loader=DataLoader(data, batch_size=4096),
        work_dir=work_dir,
        commands=commands,
        hooks=[CheckpointHook(max_keep_ckpts=2)],
        writers=[JSONLWriter()],
    )
    with ExitStack() as programs:
        if commands is None:  # any program that sees the directory may do this
            tuner = [sys.executable, __file__, "tune", work_dir]
            trainer.bus.subscribe(lambda _: programs.enter_context(subprocess.Popen(tuner)), "before_train")
        trainer.train()
    print(f"stopped after {trainer.iter} iterations: {trainer.stop_reason}")


if __name__ == "__main__":
    tune(sys.argv[2]) if sys.argv[1:2] == ["tune"] else main(*sys.argv[1:])
