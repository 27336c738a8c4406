"""The schedules of the founding documents come out in their order, on a bus that never loads torch."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DAILY_SCHEDULE = """\
开始启动我的一天
before_breakfirst:吃早饭之前看新闻30分钟
before_breakfirst:吃早饭之前跑步30分钟
after_breakfirst:吃早饭后工作3个小时
after_lunch:吃完午饭午休60分钟
after_lunch:吃完午饭工作3个小时
before_dinner:吃晚饭之前跑步60分钟
after_dinner:晚饭之后工作60分钟
after_finish_work: 去睡觉了！！！
---睡觉---
"""

LAZY_PERSON = """\
Tom get up at:1598599060.0
Tom : The program ---day day up--- is funny!!!
Tom : The meat is nice!!!
Tom go to sleep at:1598599069.0
Jerry get up at:1598599069.0
Jerry : The program ---happy family--- is boring!!!
Jerry : The hamburger is not so bad!!!
Jerry go to sleep at:1598599078.0
"""

RUN_AND_LOOK = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
print("torch" in sys.modules, file=sys.stderr)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "PYTHONHASHSEED": "random"}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )


@pytest.mark.parametrize(
    ("example", "expected"), [("daily_schedule.py", DAILY_SCHEDULE), ("lazy_person.py", LAZY_PERSON)]
)
class TestSchedule:
    def test_runs_without_torch(self, example: str, expected: str) -> None:
        """It prints the document's lines in their order."""
        shown = run("-c", RUN_AND_LOOK, str(ROOT / "examples" / example))

        assert (shown.stdout, shown.stderr) == (expected, "False\n")


def test_a_lazy_person_without_subscribers_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    lazy_person = runpy.run_path(str(ROOT / "examples" / "lazy_person.py"))

    lazy_person["LazyPerson"]("Spike", lazy_person["Clock"](0.0)).enjoy_a_lazy_day()

    assert capsys.readouterr().out.splitlines() == [
        "Spike get up at:0.0",
        "no tv to watch",
        "nothing to eat at dinner",
        "Spike go to sleep at:9.0",
    ]
