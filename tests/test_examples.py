"""The examples run, and the quick starts among them are as short as examples/README.md says."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from importlib.util import find_spec
from pathlib import Path

import pytest

from eventloop.checkpoint import find_checkpoints
from eventloop.writers import read_jsonl
from tests import forked

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": forked.ROOT}


def run(script: str, where: Path, *arguments: str) -> str:
    """Run an example in a folder, and return what it printed."""
    ran = forked.run([EXAMPLES / script, *arguments], cwd=where, env=ENVIRONMENT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def validations(folder: Path) -> int:
    """Count the validations in the metrics file of a run."""
    return sum(line.get("mode") == "val" for line in read_jsonl(folder / "metrics.jsonl"))


@pytest.mark.slow
def test_hand_written_loop_learns_the_line(tmp_path: Path) -> None:
    """The hand-written loop trains, prints from both kinds of handlers, and logs."""
    printed = run("hand_written_loop.py", tmp_path, str(tmp_path))

    assert "learnt y = 3.0 x + 0.5" in printed
    assert "iteration 8: loss" in printed
    assert "epoch 5: validation loss" in printed
    assert (tmp_path / "metrics.jsonl").read_text().count('"mode":"val"') == 5


@pytest.mark.slow
def test_steered_by_a_program_repeats_bitwise(tmp_path: Path) -> None:
    """The program's commands are in the run's record, and the record repeats the run, weights and end, to the bit."""
    import torch

    printed = run("steered_by_a_program.py", tmp_path, "steered")
    record = (tmp_path / "steered" / "commands.jsonl").read_text(encoding="utf-8").splitlines()
    again = run("steered_by_a_program.py", tmp_path, "again", "steered/commands.jsonl")

    commands = [json.loads(line) for line in record]
    assert [(each["command"], each["source"]) for each in commands] == [("set", "tune")] * 2 + [
        ("stop", "tune")
    ]
    end = f"stopped after {commands[-1]['iter']} iterations: no longer falls"
    assert printed.splitlines()[-1] == again.splitlines()[-1] == end
    name = f"iter_{commands[-1]['iter']}"
    steered, repeated = (torch.load(tmp_path / run / name / "state.pth") for run in ("steered", "again"))
    assert steered["optimizer"]["param_groups"][0]["lr"] == 0.05 / 4
    assert all(
        torch.equal(steered["state_dict"][key], repeated["state_dict"][key]) for key in ("weight", "bias")
    )


@pytest.mark.slow
def test_planted_spike_is_survived_by_the_hook_alone(tmp_path: Path) -> None:
    """With the hook the broken batches are skipped and the digits are learnt; without it the weights are lost."""
    survived, lost = (run("planted_spike.py", tmp_path, str(tmp_path / hook), hook) for hook in ("yes", "no"))

    assert "Rolled back to" in survived
    assert [int(re.findall(r"(\d+)% right", printed)[0]) > 80 for printed in (survived, lost)] == [
        True,
        False,
    ]


@pytest.mark.slow
def test_sidecar_evaluator_validates_every_epoch(tmp_path: Path) -> None:
    """The child process validates each checkpoint, and the best one is marked."""
    printed = run("sidecar_evaluator.py", tmp_path, str(tmp_path / "rings"))

    assert re.findall(r"^epoch (\d+): accuracy 0\.\d+, known in epoch \d+$", printed, re.MULTILINE) == [
        str(epoch) for epoch in range(1, validations(tmp_path / "rings") + 1)
    ]
    assert len([*(tmp_path / "rings").glob("best_accuracy_epoch_*/manifest.json")]) == 1


# --- the sweeps --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed")
def test_optuna_prunes_the_worse_rates(tmp_path: Path) -> None:
    """Trials with worse rates are pruned, and each trial, pruned or not, has all its files."""
    printed = run("optuna_sweep.py", tmp_path, str(tmp_path), "0")

    trials = re.findall(r"^lr +([\d.]+)  (\w+) +epochs (\d)$", printed, re.MULTILINE)
    assert len(trials) == 10
    pruned = {float(rate) for rate, state, _ in trials if state == "PRUNED"}
    complete = {float(rate) for rate, state, _ in trials if state == "COMPLETE"}
    assert pruned
    assert len(pruned) + len(complete) == 10
    assert max(complete) > max(pruned)
    for number, (_, _, epochs) in enumerate(trials):
        folder = tmp_path / f"trial_{number}"
        assert validations(folder) == int(epochs)
        assert [path.name for path in find_checkpoints(folder)] == [f"epoch_{epochs}"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'")
def test_ray_stops_the_worse_rates(tmp_path: Path) -> None:
    """Trials with worse rates are stopped, and all that was reported of any trial is in its files."""
    ran = subprocess.run(
        [sys.executable, EXAMPLES / "ray_tune_sweep.py", str(tmp_path)],
        cwd=tmp_path,
        env={**ENVIRONMENT, "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

    trials = re.findall(r"^lr +([\d.]+)  epochs (\d)", ran.stdout, re.MULTILINE)
    assert [int(epochs) for _, epochs in trials] == [6, 2, 2]
    for rate, epochs in trials:
        (folder,) = tmp_path.glob(f"*/*lr={float(rate):.4f}*/run")
        assert validations(folder) == int(epochs)
        # Ray may end the process before the checkpoint of the epoch before is removed
        assert f"epoch_{epochs}" in {path.name for path in find_checkpoints(folder)}


# --- the quick starts --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_first_autoencoder(tmp_path: Path) -> None:
    """It trains, with the losses in a file, and checkpoints."""
    run("first_autoencoder.py", tmp_path)

    (folder,) = (tmp_path / "runs").iterdir()
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if line.get("mode") == "val"]
    assert len(lines) == 10
    assert lines[-1]["loss"] < lines[0]["loss"] / 1.5
    assert find_checkpoints(folder)


@pytest.mark.slow
def test_first_convnet(tmp_path: Path) -> None:
    """It learns digits, and prints the loss and the accuracy of a test."""
    printed = run("first_convnet.py", tmp_path)

    accuracy = re.search(r"'accuracy': ([\d.]+)", printed)
    assert accuracy is not None, printed
    assert float(accuracy[1]) > 0.5  # it is 0.1 without learning
    assert (tmp_path / "final_model.pth").exists()


TINY_MODEL = """
from pathlib import Path
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

folder = Path("distilbert/distilbert-base-uncased")
folder.mkdir(parents=True)
words = "[PAD] [UNK] [CLS] [SEP] [MASK] a moving superb dull clumsy film cast script plot".split()
(folder / "vocab.txt").write_text("\\n".join(words))
BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
sizes = dict(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(folder)
"""
"""Makes a model of random weights under the name that the example loads."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_first_text_classifier(tmp_path: Path) -> None:
    """It fine-tunes the model of a folder, and saves it with its tokenizer where Transformers finds both."""
    made = forked.run(["-c", TINY_MODEL], cwd=tmp_path, env=ENVIRONMENT)
    assert made.returncode == 0, made.stderr

    run("first_text_classifier.py", tmp_path)

    saved = {path.name for path in (tmp_path / "distilbert-reviews").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= saved
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in find_checkpoints(folder)} == {"epoch_1", "epoch_2"}


ROW = re.compile(r"\| (\d+) \| (\d+) \| \[(first_\w+\.py)\]\(\3\) \| (\d+) \| (\d+) \|$", re.MULTILINE)
ROWS = ROW.findall((EXAMPLES / "README.md").read_text(encoding="utf-8"))
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count(source: str) -> tuple[int, int]:
    """Count the lines that have code, and the lines of the statements as `ast.unparse` writes them."""
    tree = ast.parse(source)
    docs = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]
    docstrings: set[int] = set()
    for node in docs:
        if ast.get_docstring(node) is not None:
            text = node.body.pop(0)
            docstrings |= {*range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    statements = [line for line in ast.unparse(tree).splitlines() if line.strip()]
    return len(lines - docstrings), len(statements)


def test_counting() -> None:
    """Blank lines, comments and docstrings have no code; a statement may be spread over lines."""
    source = '"""Say\nhello."""\n\nimport os  # used\n\n# now\nprint(\n    os.name,\n)\nif os:\n    pass\nelse:\n    pass\n'

    assert count(source) == (8, 6)


@pytest.mark.parametrize(("lines", "statements", "script", "own_lines", "own_statements"), ROWS)
def test_quick_starts_are_no_longer_than_the_originals(
    lines: str, statements: str, script: str, own_lines: str, own_statements: str
) -> None:
    """The table has the counts of the scripts, which are not above those of the other engines."""
    counted = count((EXAMPLES / script).read_text(encoding="utf-8"))

    assert counted == (int(own_lines), int(own_statements))
    assert counted[0] <= int(lines)
    assert counted[1] <= int(statements)


def test_each_quick_start_has_its_row() -> None:
    """No quick start is left out of the table."""
    assert sorted(row[2] for row in ROWS) == sorted(path.name for path in EXAMPLES.glob("first_*.py"))


def test_each_example_is_listed() -> None:
    """The page of the examples names each script."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")

    assert [path.name for path in EXAMPLES.glob("*.py") if f"]({path.name})" not in page] == []
