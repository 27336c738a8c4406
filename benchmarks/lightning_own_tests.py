"""Lightning's own tests, without and with the bridge in every trainer.

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning /tmp/pl_tests
    python -m benchmarks.lightning_own_tests /tmp/pl_tests [--files callbacks/test_timer.py ...]

Lightning loads the entry points of the group `lightning.pytorch.callbacks_factory` into every `Trainer`. One
run of each test file has such an entry point, which makes an `EventLoopCallback` with a logger, costs and a
JSONL writer; the other has none. The table lists the tests that passed; a test that passes without the bridge
and not with it is named, and the exit status is 1. The checkout should be of the installed version.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

RESULT = Path(__file__).parent / "results" / "lightning_own_tests.md"
ROOT = Path(__file__).resolve().parent.parent

FILES = (
    "callbacks/test_callbacks.py",
    "callbacks/test_callback_hook_outputs.py",
    "callbacks/test_early_stopping.py",
    "callbacks/test_finetuning_callback.py",
    "callbacks/test_lambda_function.py",
    "callbacks/test_lr_monitor.py",
    "callbacks/test_timer.py",
    "callbacks/test_weight_averaging.py",
    "checkpointing/test_model_checkpoint.py",
    "checkpointing/test_trainer_checkpoint.py",
    "loops/test_evaluation_loop.py",
    "loops/test_loops.py",
    "loops/test_training_epoch_loop.py",
    "loops/test_training_loop.py",
    "models/test_hooks.py",
    "models/test_restore.py",
    "profilers/test_profiler.py",
    "trainer/flags",
    "trainer/logging_",
    "trainer/test_dataloaders.py",
    "trainer/test_trainer.py",
    "tuner/test_lr_finder.py",
    "tuner/test_scale_batch_size.py",
)
"""The files that are run by default, in `tests/tests_pytorch`."""
FACTORY = '''
import tempfile

from eventloop.bridges.lightning import EventLoopCallback
from eventloop.writers import JSONLWriter


class EntryPoint(EventLoopCallback):
    """A bridge that gives way to a later one.

    Lightning puts the callbacks of entry points into the list of the program, which may make another trainer
    with that list.
    """

    @property
    def state_key(self):
        return f"EventLoopCallback{id(self)}"

    def setup(self, trainer, pl_module, stage):
        bridges = [each for each in trainer.callbacks if isinstance(each, EventLoopCallback)]
        if bridges[-1] is self:
            super().setup(trainer, pl_module, stage)
        else:
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]


def callbacks():
    return EntryPoint(writers=[JSONLWriter()], work_dir=tempfile.mkdtemp())
'''
ENTRY_POINT = "[lightning.pytorch.callbacks_factory]\neventloop = eventloop_in_lightning:callbacks\n"
METADATA = "Metadata-Version: 2.1\nName: eventloop-in-lightning\nVersion: 0\n"

MARKERS = "markers=cloud: of Lightning\nflaky: of a plugin that is not needed"
"""Marks of Lightning's tests, which it has for plugins."""

Outcomes = dict[str, str]
"""What became of each test: passed, skipped, failed or error."""


def install(directory: Path) -> None:
    """Write a distribution whose entry point makes a bridge for every trainer."""
    (directory / "eventloop_in_lightning.py").write_text(FACTORY)
    info = directory / "eventloop_in_lightning-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINT)


def run(tests: Path, name: str, *, factory: Path | None, seconds: float) -> Outcomes:
    """Run one file of Lightning's tests in a process of its own, and return the outcomes."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        path = [str(tests.parent), *([str(factory), str(ROOT)] if factory is not None else [])]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TMPDIR": scratch}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p",
                   "no:randomly", "-o", MARKERS, f"--junitxml={report}", "--basetemp", f"{scratch}/tests", name]  # fmt: skip
        try:
            subprocess.run(command, cwd=tests, env=environ, timeout=seconds, check=False, capture_output=True)
        except subprocess.TimeoutExpired:
            return {f"{name}: no end within {seconds:.0f} s": "error"}
        if not report.is_file():
            return {f"{name}: no report": "error"}
        return dict(outcome(case) for case in ElementTree.parse(report).getroot().iter("testcase"))


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """Return a test's name and outcome, from its element of pytest's report."""
    name = f"{case.get('classname')}::{case.get('name')}"
    found = next((part.tag for part in case if part.tag in ("failure", "error", "skipped")), "passed")
    return name, "failed" if found == "failure" else found


def lost(without: Outcomes, bridged: Outcomes) -> list[str]:
    """Return the tests that pass without the bridge, and not with it."""
    return [name for name, found in without.items() if found == "passed" and bridged.get(name) != "passed"]


def row(name: str, without: Outcomes, bridged: Outcomes) -> str:
    """Return a line of the table."""
    counts = [Counter(each.values()) for each in (without, bridged)]
    cells = [
        f"{c['passed']} passed, {c['failed'] + c['error']} failed, {c['skipped']} skipped" for c in counts
    ]
    return f"| `{name}` | {cells[0]} | {cells[1]} | {len(lost(without, bridged))} |"


def main() -> int:
    """Run the files, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning at the installed version's tag")
    parser.add_argument("--files", nargs="+", default=list(FILES), help="paths in tests/tests_pytorch")
    parser.add_argument("--seconds", type=float, default=1800, help="limit for each file")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    tests = (arguments.checkout / "tests" / "tests_pytorch").resolve()
    if not tests.is_dir():
        parser.error(f"expected a checkout of Lightning with tests/tests_pytorch, got {arguments.checkout}")
    lines, named, totals = [], [], [Counter[str](), Counter[str]()]
    with tempfile.TemporaryDirectory() as directory:
        install(Path(directory))
        for name in arguments.files:
            without = run(tests, name, factory=None, seconds=arguments.seconds)
            bridged = run(tests, name, factory=Path(directory), seconds=arguments.seconds)
            lines.append(row(name, without, bridged))
            named += lost(without, bridged)
            totals[0].update(without.values())
            totals[1].update(bridged.values())
            print(lines[-1], *(f"    lost: {each}" for each in lost(without, bridged)), sep="\n", flush=True)
    text = report(lines, named, totals)
    print(text)
    if arguments.save:
        RESULT.write_text(text)
    return 1 if named else 0


def report(lines: list[str], named: list[str], totals: list[Counter[str]]) -> str:
    """Return the page of the results."""
    without, bridged = totals
    all_named = "".join(f"- `{name}`\n" for name in named) or "None.\n"
    return (
        "# Lightning's own tests, without and with the bridge in every trainer\n\n"
        f"Lightning {version('lightning')}, its tests of the nearest tag, torch {version('torch')}. Made by "
        "`python -m benchmarks.lightning_own_tests CHECKOUT --save`.\n\n"
        f"{without['passed']} tests pass without the bridge, {bridged['passed']} with it.\n\n"
        "| file | without | with the bridge | passed only without |\n|---|---|---|---|\n"
        + "\n".join(lines)
        + f"\n\n## Tests that pass only without the bridge\n\n{all_named}"
    )


if __name__ == "__main__":
    sys.exit(main())
