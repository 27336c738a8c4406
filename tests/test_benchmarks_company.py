"""Check that `benchmarks/company.py` measures each row, ends what it started, and judges its goals by the worst row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from benchmarks.helpers import company_report
from benchmarks.helpers.company_job import TRAININGS

ROOT = Path(__file__).parents[1]
KEEPS_BUSY = """
import os, signal, sys
from benchmarks.helpers.company_runs import busy
with busy(2):
    os.kill(os.getpid(), int(sys.argv[1])) if sys.argv[1] != "0" else 1 / 0
    signal.pause()
"""


def processes_with(mark: str) -> list[str]:
    """The processes of this machine that have a variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:  # it has ended, or is another user's
            continue
    return found


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within a minute."""
    until = time.monotonic() + 60
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.slow
@pytest.mark.parametrize("ends_by", [signal.SIGKILL, 0, signal.SIGINT, signal.SIGTERM])
def test_busy_processes_end_with_the_benchmark(ends_by: int) -> None:
    """However it ends: by an error, by Ctrl-C, by a signal or killed."""
    mark = f"COMPANY_TEST={uuid.uuid4()}"
    name, value = mark.split("=")

    ran = subprocess.run(
        [sys.executable, "-c", KEEPS_BUSY, str(int(ends_by))],
        cwd=ROOT,
        capture_output=True,
        check=False,
        env={**os.environ, name: value},
    )

    assert ran.returncode != 0
    assert eventually(lambda: processes_with(mark) == [])


@pytest.mark.slow
@pytest.mark.parametrize("company", ["busy1", "ranks"])
def test_a_row_is_measured(tmp_path: Path, company: str) -> None:
    """All engines that are always there train alike, save and log as often, and are compared."""
    kept = tmp_path / "company.json"

    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.company",
            "--short",
            "--training",
            "small_checkpoints",
            "--company",
            company,
            "--json",
            str(kept),
            "--directory",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    cell = msgspec.json.decode(kept.read_bytes())["cells"]["small_checkpoints"][company]
    training = TRAININGS["small_checkpoints"].shortened(4)
    saves = training.iterations // training.save_each + training.iterations // training.val_each
    assert cell["failed"] == {}
    assert cell["loss_difference"] < 1e-4
    assert {name: own["saves"] for name, own in cell["engines"].items()} == {
        "bare": 0,
        "by hand": saves,
        "eventloop": saves,
    }
    assert {"whole / by hand", "end / by hand", "durable / by hand", "p99 / bare"} <= cell["engines"][
        "eventloop"
    ].keys()
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def cell(figures: dict[str, float] | None, why: str = "") -> dict[str, Any]:
    """A row in which eventloop has these figures, or failed."""
    engines, failed = ({}, {"eventloop": why}) if figures is None else ({"eventloop": figures}, {})
    return {"engines": engines, "failed": failed, "loss_difference": 0.0, "runs": {}}


def judged(cells: Any, what: str, before: Any = None) -> dict[str, str]:
    """A goal, by how its text begins."""
    return next(goal for goal in company_report.goals(cells, before) if goal["goal"].startswith(what))


def test_a_goal_is_judged_by_the_worst_row_that_it_speaks_of() -> None:
    cells = {
        "peers": {"alone": cell({"whole / by hand": 9.0}), "busy1": cell({"whole / by hand": 1.1})},
        "slow_writers": {"busy2": cell({"whole / by hand": 1.4})},
    }

    assert judged(cells, "whole run in company") == {
        "goal": "whole run in company, to by hand",
        "wanted": "<= 1.3x",
        "measured": "1.4x (slow_writers, busy2)",
        "met": "NO",
    }
    del cells["slow_writers"]
    assert judged(cells, "whole run in company")["met"] == "yes"


def test_a_row_that_failed_misses_its_goals() -> None:
    cells = {"peers": {"busy1": cell({"end / by hand": 1.0}), "busy2": cell(None, "killed after 120 s")}}

    found = judged(cells, "last step to exit")

    assert (found["met"], found["measured"]) == ("NO", "failed (peers, busy2: killed after 120 s)")


def test_a_goal_without_a_row_is_not_decided() -> None:
    cells = {"peers": {"alone": cell({"whole / by hand": 1.0})}}

    assert judged(cells, "small best")["met"] == "no such row was measured"
    assert judged(cells, "whole run alone")["met"] == "needs --before"


@pytest.mark.parametrize(("now", "met"), [(1.0, "yes"), (1.2, "NO")])
def test_runs_alone_are_compared_with_those_of_an_earlier_commit(now: float, met: str) -> None:
    cells, before = ({"peers": {"alone": cell({"whole / by hand": figure})}} for figure in (now, 1.0))

    assert judged(cells, "whole run alone", before)["met"] == met
