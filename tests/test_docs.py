"""Run the Python blocks of every page under docs/, and check what docs/checkpoints.md says of its files."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from eventloop.checkpoint.listing import Stock
from eventloop.costs.records import PHASES, RunCosts
from tests import forked

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE_FROM_CODE = {"events.md", "api", "dev"}
BLOCK = re.compile(r"^(<!-- not run: .+? -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def program_of(page: Path) -> str:
    """Return a page's Python blocks as one program, without those that are marked `<!-- not run: why -->`."""
    return programs_in(page.read_text(encoding="utf-8"))


def programs_in(text: str) -> str:
    """Return the Python blocks of a text as one program, without those that are marked so."""
    return "\n".join(code for not_run, code in BLOCK.findall(text) if not not_run)


def run(program: str, where: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, and require that it succeeds."""
    ran = forked.run(["-c", program], cwd=where, env={**os.environ, "PYTHONPATH": forked.ROOT})
    assert ran.returncode == 0, ran.stderr
    return ran


CHECKPOINTS, ORDER, RECIPES = DOCS / "checkpoints.md", DOCS / "concepts" / "bus.md", DOCS / "recipes.md"
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if page.relative_to(DOCS).parts[0] not in MADE_FROM_CODE
    and page not in (CHECKPOINTS, ORDER, RECIPES)
    and program_of(page)
]
FOLDERS = sorted({page.parent for page in PAGES})
IN_TURN = """
import os, pathlib
for name, program in {programs!r}:
    where = pathlib.Path(name).absolute()
    where.mkdir(parents=True)
    os.chdir(where)
    exec(compile(program, name, "exec"), {{"__name__": "__main__"}})
    os.chdir(where.parent)
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=[str(folder.relative_to(DOCS)) for folder in FOLDERS])
def test_blocks_run(folder: Path, tmp_path: Path) -> None:
    """The blocks of a page run one after the other, as one program, in a directory of its own. One process runs the
    pages of a folder, which saves the imports."""
    programs = [(page.name, program_of(page)) for page in PAGES if page.parent == folder]
    run(IN_TURN.format(programs=programs), tmp_path)


@pytest.mark.slow
def test_the_printed_order_is_the_program_s(tmp_path: Path) -> None:
    """docs/concepts/bus.md shows the rows that its own program prints for an iteration."""
    (block,) = re.findall(r"```text\n(event .*?)```", ORDER.read_text(encoding="utf-8"), re.DOTALL)
    ran = run(program_of(ORDER), tmp_path)
    printed = re.search(r"^after_train_iter .*?(?=^\w)", ran.stdout, re.DOTALL | re.MULTILINE)

    assert printed is not None, ran.stdout
    assert [line.split() for line in block.splitlines()[1:]] == [
        line.split() for line in printed[0].splitlines()
    ]


SAVED = "load_checkpoint(trainer.work_dir / 'epoch_{}')['state_dict']['0.weight']"
AFTER = {
    "Set the learning rate by hand": "trainer.optimizer.param_groups[0]['lr'] == 0.1 * 0.97**47",
    "Use a schedule of your own": "schedule.last_epoch == 48",
    "Use the scheduler of another library": "optimizer.param_groups[0]['lr'] == 1e-3 / 3",
    "Layer-wise learning rates: parameter groups": "{p for g in optimizer.param_groups for p in g['params']} == {*model.parameters()}"
    " and trainer.metrics.latest()['lr'] < 2e-5",
    "Label smoothing": "trainer.loss_fn(torch.tensor([[100.0, 0.0]]), torch.tensor([0])) > 4",
    "Stochastic weight averaging (SWA)": "swa.state_dict()['steps'] == 32 and not average[1].running_mean.equal(trainer.model[1].running_mean)",
    "ReduceLROnPlateau": "plateau.last_epoch == 3",
    "Log the norm of the gradients": "{'grad_norm', 'norms/0.weight'} <= {*trainer.metrics.latest()}",
    "Truncated backpropagation through time": "trainer.model.hidden.any() and not trainer.model.hidden.requires_grad",
    "Freeze layers, and unfreeze them at an epoch": f"{SAVED.format(1)}.equal({SAVED.format(2)}) "
    f"and not {SAVED.format(2)}.equal({SAVED.format(3)})",
    "Freeze BatchNorm": "not model[1].running_mean.any() and (model[1].weight == 1).all()",
    "Load the best weights for inference": "path.name.startswith('best_accuracy_epoch_')",
    "Validate within an epoch, every so many iterations": "trainer.bus.latest('after_val_epoch').iter == 48",
    "Validate as `if step % 500 == 0` does": "trainer.bus.latest('after_val_epoch').iter == 40",
    "The mean over an epoch: AverageMeter": "trainer.iter == 48 and trainer.metrics.history('loss').avg(16) < 0.7",
    "An average with a formula of its own": "ema.state_dict()['steps'] == 48 and not average[0].weight.equal(trainer.model[0].weight)",
    "Validate the raw weights and the EMA weights, both": "{'accuracy', 'ema/accuracy'} <= {*trainer.bus.latest('after_val_epoch').metrics}",
    "Log the accuracy of the training": "'accuracy' in trainer.metrics.latest()",
    "Save predictions to a file": "torch.load('predictions.pt').equal(trainer.predict(val))",
    "Confusion matrix in TensorBoard": "b'confusion' in b''.join(p.read_bytes() for p in trainer.work_dir.rglob('*tfevents*'))",
    "Early stopping": "trainer.stop_reason.startswith('early stopping') and trainer.epoch < 20",
    "Resume after a crash": "(trainer.work_dir / 'epoch_3').is_dir()",
    "Stop when the loss is NaN": "trainer.iter == 16",
    "Record the options and hyperparameters of a run": "'\"seed\": 7' in (trainer.work_dir / 'run.json').read_text()",
    "Save a checkpoint by hand, in a handler": "any(path.name.startswith('iter_') for path in trainer.work_dir.iterdir())",
    "`every=100`, and `i % 100 == 0`": "(fired, counted) == ([9, 19, 29, 39], [0, 10, 20, 30, 40])",
    "L-BFGS, and other optimizers with a closure": "trainer.iter == 10 and closure() < 0.01",
    "A loss with parameters of its own": "model['criterion'].log_variance != 0 and trainer.iter == 48",
    "Begin an average with the initial weights": "ema.state_dict()['steps'] == 1 + trainer.iter == 49",
    "Keep state of your own in checkpoints": "trainer.iter == 2 + 4 + 6 and len({*known['labelled']}) == 96"
    " and len(load_checkpoint(trainer.work_dir / 'epoch_2')['remembered']['known']['labelled']) == 64",
    "Overfit one batch": "trainer.bus.latest('after_val_epoch').metrics['accuracy'] == 1.0 and trainer.iter == 30",
}
"""What is true after the program of a recipe, by its heading."""


def recipes() -> tuple[str, list[tuple[str, str]]]:
    """Return the begin of the page of recipes, and the heading and text of each recipe."""
    begin, *rest = re.split(r"^###? (.+)\n", RECIPES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return begin, [*zip(rest[::2], rest[1::2], strict=True)]


def test_a_recipe_has_at_most_ten_lines() -> None:
    """The code of a recipe, of all its blocks together, has at most ten lines that are not blank."""
    counts = {
        heading: sum(bool(line.strip()) for _, code in BLOCK.findall(text) for line in code.splitlines())
        for heading, text in recipes()[1]
    }
    assert len(counts) > 40
    assert {heading: count for heading, count in counts.items() if count > 10} == {}


@pytest.mark.slow
def test_the_recipes_do_what_they_say(tmp_path: Path) -> None:
    """Each recipe runs after those before it, and has done what its heading names."""
    begin, sections = recipes()
    program = "from eventloop.checkpoint import load_checkpoint\n" + programs_in(begin)
    assert {*AFTER} <= {heading for heading, _ in sections}
    for heading, text in sections:
        program += f"{programs_in(text)}\nassert {AFTER.get(heading, 'True')}, {heading!r}\n"

    run(program, tmp_path)


@pytest.mark.slow
def test_what_the_page_of_checkpoints_says(tmp_path: Path) -> None:
    """It prints the change of the rate with both values, and the epochs of the longer run; the newest three and the best
    are kept; its table has each key of a file, and that of an average."""
    import torch

    lines = run(program_of(CHECKPOINTS), tmp_path).stdout.splitlines()
    assert "  lr: 0.1 in the checkpoint, 0.05 in this trainer" in lines
    assert "6" in lines
    assert lines[-1] == "None"  # nobody owns the directory any more

    directory = tmp_path / "runs" / "kept"
    names = [saved.name for saved in Stock(directory).inventory().checkpoints if not saved.abandoned]
    assert {"epoch_4", "epoch_5", "epoch_6"} <= set(names)
    assert [name for name in names if name.startswith("best_accuracy_epoch_")]

    text = CHECKPOINTS.read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)[:5])))
    state = torch.load(directory / "epoch_6" / "state.pth", weights_only=True)
    assert named == {*state, "ema_state_dict", "remembered"}


def test_every_field_of_the_costs_is_listed() -> None:
    """The page about measuring names each field of the record that `trainer.costs()` returns."""
    page = (DOCS / "measuring.md").read_text()

    assert [name for name in (*RunCosts.__struct_fields__, *PHASES) if f"`{name}`" not in page] == []
