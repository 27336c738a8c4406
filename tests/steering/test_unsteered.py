"""An unsteered training runs no code of the living run on the training thread."""

from __future__ import annotations

import json
from pathlib import Path

from tests import forked

SCRIPT = """
import json, os, sys
import torch
from eventloop import Trainer
from eventloop.commands.client import post
from eventloop.writers import JSONLWriter

FOLDERS = "steering", "commands", "watching", "ownership"
model = torch.nn.Linear(2, 1)
data = [(torch.ones(4, 2), torch.ones(4, 1))] * 100
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss_fn=torch.nn.functional.mse_loss,
    train_loader=data, max_epochs=100_000, work_dir=sys.argv[1], writers=[JSONLWriter()],
)
steered = sys.argv[2] == "steered"
called, applied = set(), []

def record(frame, what, _):
    if what == "call" and frame.f_code.co_name != "stopping":  # a property of the trainer
        called.add(os.path.basename(os.path.dirname(frame.f_code.co_filename)))
        if os.path.basename(frame.f_code.co_filename) == "heartbeat.py":
            called.add("heartbeat")

@trainer.bus.on("after_train_iter", priority=0)
def look(trainer, event):
    if event.iter == 20:
        if steered:
            post(sys.argv[1], "note", "hello")
        sys.setprofile(record)
    elif event.iter == 70 and not steered or applied:
        sys.setprofile(None)
        trainer.stop("seen")

@trainer.bus.on("command_applied")
def note(trainer, event):
    applied.append(event.command)

trainer.train()
print(json.dumps([sorted(called & {*FOLDERS, "heartbeat"}), "training" in called]))
"""
"""Prints which of these packages the training thread called during some iterations, in mid-epoch."""


def packages_of(where: Path, how: str) -> list[object]:
    """Return the packages of the living run that the training thread called, and whether it trained."""
    ran = forked.run(["-c", SCRIPT, str(where), how])
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout.splitlines()[-1]))


def test_iterations_without_a_command_call_nothing(tmp_path: Path) -> None:
    """No function of heartbeat, commands, steering, watching or ownership is called by the training thread."""
    assert packages_of(tmp_path / "run", "unsteered") == [[], True]


def test_a_command_is_seen_by_the_same_count(tmp_path: Path) -> None:
    """With a command from outside the same iterations call the package that applies it."""
    packages, trained = packages_of(tmp_path / "run", "steered")

    assert trained
    assert isinstance(packages, list)
    assert "steering" in packages
