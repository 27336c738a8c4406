"""`eventloop demo`, as a user runs it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eventloop import Trainer, cli
from eventloop.checkpoint import save_checkpoint, verify_checkpoint
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.cli import demo as program
from eventloop.cli.demo import free_name, newest_run, prepare
from eventloop.writers import read_jsonl
from tests.cli.conftest import Finished, Start, demo
from tests.support.internals import substitute


@pytest.mark.slow
def test_demo_reaches_97_percent(finished: Finished) -> None:
    """The main job learns real digits to at least 97 % validation accuracy."""
    best = re.search(r"best accuracy\s+([\d.]+)%", finished.output)

    assert best is not None
    assert float(best.group(1)) >= 97.0


@pytest.mark.slow
def test_demo_names_a_best_checkpoint_that_exists(finished: Finished) -> None:
    """The summary names the checkpoint with the best weights, and it is whole."""
    named = re.search(r"best accuracy .* in (\S+)", finished.output)

    assert named is not None
    assert verify_checkpoint(finished.directory.parent.parent / named.group(1)).best == {
        "accuracy": "greater"
    }


@pytest.mark.slow
def test_demo_writes_checkpoints_jsonl_and_tensorboard(finished: Finished) -> None:
    """Everything the demo promises is in its directory."""
    directory = finished.directory

    assert (directory / "epoch_10" / PAYLOAD).is_file()
    assert any(line.get("accuracy", 0) > 0.97 for line in read_jsonl(directory / "metrics.jsonl"))
    assert [*directory.glob("tensorboard/events.out.tfevents.*")]


@pytest.mark.slow
def test_demo_summary_shows_costs_and_deliveries(finished: Finished) -> None:
    """The summary says what each handler cost and what each subscriber was given, and how to see the curves."""
    output = finished.output

    assert re.search(r"440 iterations of \S+ ms: data \S+, forward ", output)
    assert re.search(r"handler\s.*calls\s+µs/iteration\s+share\s", output)
    assert re.search(r"outside of the iterations\s.*calls\s+in all", output)
    assert re.search(r"\n\d+ built-in[^\n]* +\d", output)
    assert re.search(r"subscriber\s+runs on\s+delivered\s+dropped", output)
    assert re.search(r"TensorBoardWriter\s+thread\s+\d+\s+0\s+0\s+0", output)
    assert "tensorboard --logdir runs/demo" in output


@pytest.mark.slow
def test_demo_prints_plain_lines_when_the_output_is_no_terminal(finished: Finished) -> None:
    """Without a terminal there is a line per logging interval, with what the bar shows, and no escape code."""
    line = r"Epoch\(train\)  \[1\]\[10/44\]  lr: \S+  eta: \d:\d\d:\d\d +[\d.]+ it/s +loss: \d"

    assert re.search(line, finished.output)
    assert "\x1b" not in finished.output


@pytest.mark.slow
def test_demo_leaves_an_existing_run_alone(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run goes to the next free name and says so."""
    monkeypatch.chdir(finished.directory.parent.parent)
    before = (finished.directory / "metrics.jsonl").read_bytes()

    assert cli.main(["demo", "--epochs", "1"]) == 0

    assert "the new run goes to runs/demo-2" in capsys.readouterr().out
    assert Path("runs/demo-2/epoch_1", PAYLOAD).is_file()
    assert (finished.directory / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_resuming_a_complete_run_changes_nothing(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says that there is nothing left to train, and leaves the files alone."""
    monkeypatch.chdir(finished.directory.parent.parent)
    before = {path: path.stat().st_mtime_ns for path in finished.directory.glob("*/*")}

    assert cli.main(["demo", "--resume", "--work-dir", "runs/demo"]) == 0

    assert "runs/demo is complete: all 10 epochs are trained" in capsys.readouterr().out
    assert before
    assert {path: path.stat().st_mtime_ns for path in finished.directory.glob("*/*")} == before


def test_resume_finds_the_run_that_was_saved_last(tmp_path: Path) -> None:
    """Without --work-dir it is the newest of runs/demo, runs/demo-2, ..., not the first."""
    for number, name in enumerate(["demo", "demo-2", "demo-3"]):
        (tmp_path / name).mkdir()
        if name != "demo-3":
            checkpoint = tmp_path / name / "epoch_1"
            save_checkpoint({"state_dict": {}}, checkpoint)
            os.utime(checkpoint, (number, number))

    assert newest_run(tmp_path / "demo") == tmp_path / "demo-2"
    assert newest_run(tmp_path / "none") == tmp_path / "none"


def logged(directory: Path) -> list[tuple[str, int, float]]:
    """Tag, step and value of every scalar in metrics.jsonl, in the order of the file."""
    return [
        (f"{line['mode']}/{name}", line["step"], value)
        for line in read_jsonl(directory / "metrics.jsonl")
        if "event" not in line
        for name, value in line.items()
        if name not in ("mode", "step", "iter", "epoch")
    ]


@pytest.mark.slow
def test_tensorboard_shows_what_the_jsonl_has(finished: Finished) -> None:
    """Read with TensorBoard's own reader, every logged scalar is there: same name, step and value, and no other."""
    reader: Any = EventAccumulator(str(finished.directory / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    shown = [
        (tag, point.step, point.value) for tag in reader.Tags()["scalars"] for point in reader.Scalars(tag)
    ]
    expected = [(tag, step, torch.tensor(value).item()) for tag, step, value in logged(finished.directory)]

    assert {"train/loss", "train/lr", "train/time", "val/accuracy", "val/loss"} <= {
        tag for tag, _, _ in shown
    }
    assert sorted(shown) == sorted(expected)


def losses(work_dir: Path, *arguments: str) -> list[float]:
    """The losses that a short demo logs; it runs in this process."""
    assert cli.main(["demo", "--epochs", "1", "--work-dir", str(work_dir), *arguments]) == 0
    return [value for tag, _, value in logged(work_dir) if tag == "train/loss"]


@pytest.mark.slow
def test_seed_decides_the_run(tmp_path: Path) -> None:
    """The same seed repeats the run, another one changes it."""
    runs = [losses(tmp_path / str(i), "--seed", seed) for i, seed in enumerate(("1", "1", "2"))]

    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


@pytest.mark.slow
def test_a_device_that_is_asked_for_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--device cpu` trains there, whatever else the machine has."""
    assert losses(tmp_path / "run", "--device", "cpu")

    weights = torch.load(tmp_path / "run" / "epoch_1" / PAYLOAD, weights_only=True)["state_dict"]
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
    assert "best accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_resume_goes_on(start: Start, tmp_path: Path) -> None:
    """Ctrl-C ends at the iteration boundary with a checkpoint and the summary; --resume finishes the run."""
    process = start("--epochs", "6")
    assert process.stdout is not None
    assert any("[1][10/44]" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 130, errors
    assert (
        errors == "\nCtrl-C: stopping after this iteration, with a checkpoint. Ctrl-C again ends at once.\n"
    )
    assert "interrupted by Ctrl-C" in output
    assert "handler" in output

    resumed = demo("--epochs", "6", "--work-dir", "run", "--resume", cwd=tmp_path)

    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"resuming from run/(iter|epoch)_", resumed.stdout)
    steps = [
        line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if line.get("mode") == "val"
    ]
    assert steps == [44, 88, 132, 176, 220, 264]


def stopping(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    """From now on a demo is asked to stop by the last of these events in its first epoch."""

    def build(*arguments: Any, **options: Any) -> Trainer:
        trainer = real(*arguments, **options)
        trainer.bus.subscribe(
            lambda trainer, _: trainer.stop("for the test"), event, every=44 if "iter" in event else 1
        )
        return trainer

    real = program.build
    substitute(monkeypatch, "demo.build", build)


@pytest.mark.slow
def test_a_run_that_lacks_its_last_validation_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in its last iteration it says how to go on, in words that a shell takes; resumed it is validated, and then
    complete."""
    work_dir = tmp_path / "my run"
    with monkeypatch.context() as patched:
        stopping(patched, "after_train_iter")
        assert cli.main(["demo", "--epochs", "1", "--work-dir", str(work_dir)]) == 130
    said = capsys.readouterr().out
    assert f"for the test; continue with: eventloop demo --resume --work-dir '{work_dir}'\n" in said
    assert f"tensorboard --logdir '{work_dir}'\n" in said

    assert cli.main(["demo", "--resume", "--work-dir", str(work_dir)]) == 0

    assert "best accuracy" in capsys.readouterr().out
    assert [step for tag, step, _ in logged(work_dir) if tag == "val/accuracy"] == [44]

    assert cli.main(["demo", "--resume", "--work-dir", str(work_dir)]) == 0

    assert "is complete: all 1 epochs are trained" in capsys.readouterr().out


def test_a_run_that_saved_nothing_is_not_said_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped before its first iteration there is no checkpoint to resume from."""
    stopping(monkeypatch, "before_run")

    assert cli.main(["demo", "--epochs", "1", "--work-dir", str(tmp_path / "run")]) == 130

    assert "for the test; no checkpoint was saved\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", [".", "../here", "../here/sub/.."])
def test_the_next_free_name_of_a_directory_without_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`.` and `..` stand for directories that have one: the next free name is beside them."""
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")

    assert free_name(Path(name)).resolve() == tmp_path / "here-2"

    assert "(--resume continues it)" in capsys.readouterr().out


def test_so_small_a_net_has_one_thread_whatever_the_cpu_is_called(tmp_path: Path) -> None:
    """`--device cpu:0` is as fast as `cpu`."""
    torch.set_num_threads(2)
    prepare(tmp_path / "run", epochs=1, device="cpu:0", seed=None, resume=None).close()

    assert torch.get_num_threads() == 1


@pytest.mark.slow
def test_resuming_with_other_epochs_is_refused(
    finished: Finished, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The learning rate was planned for the epochs the run was begun with: another number is refused at once, and
    nothing else is said, since nothing was loaded."""
    arguments = ["demo", "--epochs", "11", "--resume", "--work-dir", str(finished.directory)]

    assert cli.main(arguments) == 2

    output, errors = capsys.readouterr()
    assert "resume it with --epochs 10, got --epochs 11" in errors
    assert (output, errors.count("\n"), caplog.text) == ("", 1, "")


@pytest.mark.slow
def test_resuming_needs_no_epochs_and_takes_no_seed(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    """The length is the run's own; a seed that is given is said to have no effect."""
    arguments = ["demo", "--resume", "epoch_10", "--seed", "3", "--work-dir", str(finished.directory)]

    assert cli.main(arguments) == 0

    lines = [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith("Checkpoint loaded")
    ]
    assert lines == [
        f"resuming from {finished.directory / 'epoch_10'}",
        "--seed 3 has no effect: the weights and the random state are those of the checkpoint",
        f"{finished.directory} is complete: all 10 epochs are trained",
    ]


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_it(start: Start, tmp_path: Path) -> None:
    """As in `eventloop demo | head -1`: no word of it, a shell's exit code of a broken pipe, and everything is saved."""
    process = start("--epochs", "3")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()

    assert (process.wait(60), errors) == (141, "")
    assert verify_checkpoint(tmp_path / "run" / "epoch_3").epoch == 3
    process.stdout = None
