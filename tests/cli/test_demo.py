"""`eventloop demo`, as a user runs it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eventloop.writers.jsonl import read_jsonl


def demo(*arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eventloop", "demo", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory and the output of one whole demo."""
    cwd = tmp_path_factory.mktemp("demo")
    ran = demo(cwd=cwd)
    assert ran.returncode == 0, ran.stderr
    return cwd / "runs" / "demo", ran.stdout


def test_demo_reaches_97_percent(finished: tuple[Path, str]) -> None:
    """The main job learns real digits to at least 97 % validation accuracy."""
    best = re.search(r"best accuracy\s+([\d.]+)%", finished[1])

    assert best is not None
    assert float(best.group(1)) >= 97.0


def test_demo_names_a_best_checkpoint_that_exists(finished: tuple[Path, str]) -> None:
    """The summary names the file with the best weights, and it is there."""
    named = re.search(r"best accuracy .* in (\S+)", finished[1])

    assert named is not None
    assert (finished[0].parent.parent / named.group(1)).is_file()


def test_demo_writes_checkpoints_jsonl_and_tensorboard(finished: tuple[Path, str]) -> None:
    """Everything the demo promises is in its directory."""
    directory = finished[0]

    assert (directory / "epoch_10.pth").is_file()
    assert any(line.get("accuracy", 0) > 0.97 for line in read_jsonl(directory / "metrics.jsonl"))
    assert [*directory.glob("tensorboard/events.out.tfevents.*")]


def test_demo_summary_shows_costs_and_deliveries(finished: tuple[Path, str]) -> None:
    """The summary says what each handler cost and what each subscriber was given, and how to see the curves."""
    output = finished[1]

    assert re.search(r"handler\s+event\s+calls\s+µs/iteration\s+% of it", output)
    assert re.search(r"OptimizerHook.after_train_iter\s+after_train_iter\s+440\s", output)
    assert re.search(r"subscriber\s+runs on\s+delivered\s+dropped", output)
    assert re.search(r"TensorBoardWriter\s+thread\s+\d+\s+0\s+0\s+0", output)
    assert "tensorboard --logdir runs/demo" in output


def test_demo_prints_plain_lines_when_the_output_is_no_terminal(finished: tuple[Path, str]) -> None:
    """Without a terminal there is a line per logging interval, and no escape code."""
    assert re.search(r"Epoch\(train\)\s+\[1\]\[10/44\].*lr:.*eta:.*loss:", finished[1])
    assert "\x1b" not in finished[1]


def test_demo_leaves_an_existing_run_alone(finished: tuple[Path, str]) -> None:
    """A second run goes to the next free name and says so."""
    cwd = finished[0].parent.parent
    before = (finished[0] / "metrics.jsonl").read_bytes()

    ran = demo("--epochs", "1", cwd=cwd)

    assert ran.returncode == 0, ran.stderr
    assert "this one goes to runs/demo-2" in ran.stdout
    assert (cwd / "runs" / "demo-2" / "epoch_1.pth").is_file()
    assert (finished[0] / "metrics.jsonl").read_bytes() == before


def test_ctrl_c_stops_cleanly_and_resume_goes_on(tmp_path: Path) -> None:
    """Ctrl-C ends at the iteration boundary with a checkpoint and the summary; --resume finishes the run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "eventloop", "demo", "--epochs", "4", "--work-dir", "run"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    seen = next(line for line in lines if "[1][10/44]" in line)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)

    assert seen
    assert process.returncode == 130, errors
    assert "interrupted by Ctrl-C" in output
    assert "handler" in output

    resumed = demo("--epochs", "4", "--work-dir", "run", "--resume", cwd=tmp_path)

    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from run/iter_" in resumed.stdout
    steps = [
        line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if line.get("mode") == "val"
    ]
    assert steps == [44, 88, 132, 176]


def test_resuming_with_other_epochs_is_refused(finished: tuple[Path, str]) -> None:
    """The learning rate was planned for the epochs the run was begun with: another number is refused at once."""
    ran = demo("--epochs", "11", "--resume", cwd=finished[0].parent.parent)

    assert ran.returncode == 2
    assert "resume it with --epochs 10, got --epochs 11" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cdua"], "device 'cdua' cannot be used here: did you mean 'cuda'?"),
        (["--resume"], "holds no readable checkpoint to resume from"),
        (["--resume", "nowhere.pth"], "no checkpoint at nowhere.pth"),
        (["--work-dir", "/proc/run"], "work_dir '/proc/run' cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    """What cannot be done is said in one line, without a traceback."""
    ran = demo("--epochs", "1", *arguments, cwd=tmp_path)

    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


def test_epochs_below_one_are_refused(tmp_path: Path) -> None:
    """--epochs 0 is refused by the command line."""
    ran = demo("--epochs", "0", cwd=tmp_path)

    assert ran.returncode == 2
    assert "must be at least 1, got 0" in ran.stderr


def test_help_needs_no_torch(tmp_path: Path) -> None:
    """`eventloop --help` answers at once: it imports no torch."""
    probe = "import sys; from eventloop.cli import _parser; _parser(); print('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert ran.stdout.strip() == "False"
