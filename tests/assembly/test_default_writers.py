"""`Trainer(writers=None)`: progress where a person watches, and nothing elsewhere."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventloop import Trainer, cli
from tests.forked import ROOT, Forked
from tests.support.internals import substitute

MakeTrainer = Callable[..., Trainer]

TRAINING = """
import torch
from eventloop import Trainer

model = torch.nn.Linear(1, 1)
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.nn.functional.mse_loss,
    train_loader=[(torch.ones(2, 1), torch.ones(2, 1))] * 4, max_epochs=1, work_dir="run",
    default_hooks={"checkpoint": None},
)
trainer.train()
print("what the program prints")
"""


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def kinds(trainer: Trainer) -> list[str]:
    return [type(writer).__name__ for writer in trainer.writers]


def on_a_terminal(folder: Path, term: str) -> tuple[str, str]:
    """What a training without `writers` writes to standard output, a pipe, and to standard error, a wide terminal."""
    keyboard, screen = os.openpty()
    process = Forked(
        ["-c", TRAINING],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=screen,
        env={"PATH": "", "PYTHONPATH": ROOT, "TERM": term, "COLUMNS": "160"},
    )
    os.close(screen)
    shown = b""
    try:
        while data := os.read(keyboard, 65536):
            shown += data
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(keyboard)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    return printed, shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("term", "shown"), [("xterm", "epoch 1/1 \x1b[36m━"), ("dumb", "Epoch(train) [1][4/4]  lr: 1.0000e-01")]
)
def test_a_terminal_shows_progress(tmp_path: Path, term: str, shown: str) -> None:
    """On standard error: standard output has what the program prints."""
    printed, seen = on_a_terminal(tmp_path, term)

    assert shown in seen
    assert seen.endswith("Run ended at iteration 4: completed\r\n")
    assert printed == "what the program prints\n"


CLOSED = io.StringIO()
CLOSED.close()


@pytest.mark.parametrize("stream", [None, CLOSED, io.StringIO(), SimpleNamespace(write=print)])
def test_nothing_else_shows_progress(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    """Neither a file or pipe, nor a closed stream, nor the None of a program without a console; nor an IPython in a
    terminal, which has no kernel."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=SimpleNamespace))

    with redirect_stderr(stream):
        assert kinds(make_trainer()) == []


def test_without_rich_a_terminal_gets_lines(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar is an extra, and nothing complains where it is not installed."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "eventloop.writers.progress", raising=False)
    monkeypatch.delattr("eventloop.writers.progress", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with redirect_stderr(Terminal()) as screen:
        make_trainer().train()

    assert screen.getvalue().startswith("Epoch(train) [")
    assert "\x1b" not in screen.getvalue()


def test_a_notebook_shows_progress(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a bar below the cell, and lines on standard output: standard error is red there."""
    shell, shown = SimpleNamespace(kernel=object()), list[str]()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    substitute(
        monkeypatch, "notebook._publish", lambda data, display_id, update: shown.append(data["text/plain"])
    )
    make_trainer().train()

    said = capsys.readouterr()
    assert shown[-1].startswith("epoch 2/2 ")
    assert said.out.endswith("Run ended at iteration 6: completed\n")
    assert "Run ended" not in said.err


@pytest.mark.parametrize(("rank", "expected"), [(0, ["ConsoleWriter"]), (1, [])])
def test_the_first_rank_alone_shows_progress(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[str]
) -> None:
    """Of two, each with a terminal."""
    substitute(monkeypatch, "data_ranks.rank_and_world_size", lambda: (rank, 2))

    with redirect_stderr(Terminal()):
        assert kinds(make_trainer()) == expected


@pytest.mark.parametrize(("config", "shown"), [({}, True), ({"writers": []}, False)])
def test_the_plan_shows_the_default(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    shown: bool,
) -> None:
    """Where the run would have it; `writers=[]` shows nothing on a terminal either."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"train_cfg": {"max_epochs": 1}, **config}))
    with redirect_stderr(Terminal()):
        assert cli.main(["plan", str(path)]) == 0

    assert ("ConsoleWriter" in capsys.readouterr().out) is shown
