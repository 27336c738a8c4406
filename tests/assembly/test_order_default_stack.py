"""The default stack runs in the printed order, whatever the hash seed."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from eventloop import Trainer
from eventloop.costs.spans import SpanRecorder
from eventloop.hooks import CheckpointHook, EMAHook
from eventloop.writers import JSONLWriter

SEEDS = ("1", "2")


def ran_and_planned() -> dict[str, dict[str, list[str]]]:
    """A training with the default hooks and two more: by event, who ran in which order, and who was planned to."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    batch = (torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    trainer = Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy,
        train_loader=[batch] * 2, val_loader=[batch], max_epochs=1, work_dir="run",
        hooks=[EMAHook(), CheckpointHook(interval=1)], writers=[JSONLWriter()],
    )  # fmt: skip
    recorder = SpanRecorder()
    with trainer.bus.record(recorder) as recording:
        trainer.train()
    recording.wait(10.0)
    ran: dict[str, list[str]] = defaultdict(list)
    for span in recorder.spans:
        if span.kind == "handler" and span.name not in ran[span.event]:
            ran[span.event].append(span.name)
    return {
        event: {
            "ran": names,
            "planned": [row.name for row in trainer.bus.plan(event) if row.runs_on == "sync"],
        }
        for event, names in sorted(ran.items())
    }


PROGRAM = """
import json
from tests.assembly.test_order_default_stack import ran_and_planned
print(json.dumps({"orders": ran_and_planned(), "hash": hash("eventloop")}))
"""


@pytest.mark.slow
def test_default_stack_runs_in_the_printed_order_with_every_hash_seed(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Who ran is who was planned, less those whose filter held them back, in that order under each seed."""
    outcomes = [json.loads(python(PROGRAM, PYTHONHASHSEED=seed).stdout) for seed in SEEDS]

    first = outcomes[0]["orders"]
    assert len({outcome["hash"] for outcome in outcomes}) == len(SEEDS)
    assert all(outcome["orders"] == first for outcome in outcomes)
    assert len(first["after_train_iter"]["ran"]) > 6
    for order in first.values():
        assert order["ran"] == [name for name in order["planned"] if name in order["ran"]]
