"""The core knows no hook, no writer and none of their libraries."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import eventloop

BANNED = ("eventloop.hooks", "eventloop.writers", "tensorboard", "rich", "visdom", "sklearn")
ROOT = Path(eventloop.__file__).parent
MAY_NAME_THEM = {"cli", "bridges", "registry.py", "hooks", "writers"}
CORE = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in MAY_NAME_THEM)

LOADED = """
import sys, {module}
print(*(m for m in sys.modules if m.startswith({banned})))
"""

TRAINING = """
import sys, torch
from eventloop import Trainer
from eventloop.writers import JSONLWriter

batches = [(torch.ones(2, 1), torch.ones(2, 1))] * 3
model = torch.nn.Linear(1, 1)
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.nn.functional.mse_loss,
    train_loader=batches, val_loader=batches, max_epochs=1, work_dir="run", writers=[JSONLWriter()],
    default_hooks={"checkpoint": None},
)
trainer.train()
print(*(name for name in sys.modules if name.startswith(("eventloop", "anyio"))))
"""
NOT_USED = (
    "anyio",  # for coroutine subscribers
    "eventloop.background.runners.task_runner",
    "eventloop.checkpoint.directory",
    "eventloop.checkpoint.store",
    "eventloop.commands.client",
    "eventloop.evaluation.prediction",
    "eventloop.eventlog.reader",
    "eventloop.hooks.checkpoint",
    "eventloop.metrics.reduce",
    "eventloop.metrics.statistics",
    "eventloop.optim.schedulers",
    "eventloop.processes.child",
    "eventloop.resume.restoring",
    "eventloop.steering.builtin",
    "eventloop.steering.rollback",
    "eventloop.tuning",
    "eventloop.writers.console",
)
MOST_MODULES = 250
"""The largest number of modules of eventloop that a short run imports; 1 ms of processor time for two."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("eventloop", (*BANNED, "torch", "numpy")),
        ("eventloop.bus", (*BANNED, "torch", "numpy")),
        ("eventloop.training.trainer", BANNED),
    ],
)
def test_core_loads_no_hook_writer_or_plotting_library(
    python: Run, module: str, banned: tuple[str, ...]
) -> None:
    """Importing the engine loads nothing that it is merely used with; a bus serves any program: neither torch nor numpy."""
    ran = python(LOADED.format(module=module, banned=banned))

    assert (ran.stdout.split(), ran.stderr) == ([], "")


def test_a_run_imports_what_it_uses(python: Run) -> None:
    """A run without checkpoints, commands, schedules and coroutines imports neither their modules nor their libraries."""
    ran = python(TRAINING)
    loaded = ran.stdout.split()

    assert (ran.returncode, [name for name in NOT_USED if name in loaded]) == (0, []), ran.stderr
    assert 100 < len(loaded) <= MOST_MODULES


def test_no_core_file_names_a_hook_or_writer() -> None:
    """No import statement of a core file, at its top or inside a function, names what lies above it."""
    named = {path: [*imported(ast.parse(path.read_text(encoding="utf-8")))] for path in CORE}

    assert len(CORE) > 100
    assert [(path, name) for path, found in named.items() for name in found if name.startswith(BANNED)] == []


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module an import statement names, with the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
