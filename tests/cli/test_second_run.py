"""The commands leave the directory of a live run alone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from eventloop import cli
from eventloop.ownership import read_owner
from tests.cli.saved_runs import checkpoints
from tests.ownership.trainings import Training, contents, training


def stopped(first: Training, run: Path) -> dict[str, str]:
    """Let a training own its directory and stand still; return the hashes of its files."""
    first.reach("holding")
    first.stand_still()
    return contents(run)


def test_a_live_run_is_not_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is listed and verified; pruning is refused with what to do, and is possible after its end."""
    run = tmp_path / "run"
    with training(run, holds=[12]) as first:
        before = stopped(first, run)
        for options in ([], ["--verify"], ["--json"]):
            assert checkpoints(run, *options) == 0
        capsys.readouterr()

        for options in (["--yes"], []):
            assert checkpoints(run, "--prune", "1", *options) == 2
            said = capsys.readouterr()
            assert said.out == ""
            assert f"{run} is in use: process {first.process.pid} on " in said.err
            assert (
                "prune once it has ended; a run keeps as many checkpoints as its CheckpointHook" in said.err
            )
        assert contents(run) == before
        first.send(signal.SIGKILL)
        first.process.wait()

    assert checkpoints(run, "--prune", "1", "--yes") == 0
    assert not (run / "iter_5").exists()
    assert read_owner(run) is None


def test_a_replay_does_not_write_into_a_live_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads the log of a live run, and writes into any other directory."""
    run = tmp_path / "run"
    with training(run, holds=[12]) as first:
        before = stopped(first, run)
        assert cli.main(["replay", str(run), "--to", "tensorboard", "--out", str(run)]) == 2
        said = capsys.readouterr().err
        assert f"{run} is in use: process {first.process.pid} on " in said
        assert "choose another folder (--out DIR, work_dir=)" in said
        assert contents(run) == before

        out = tmp_path / "out"
        assert cli.main(["replay", str(run), "--to", "jsonl", "--out", str(out)]) == 0
        assert [path.name for path in out.iterdir()] == ["metrics.jsonl"]
        assert cli.main(["replay", str(run), "--to", "console"]) == 0


def test_a_training_does_not_write_into_a_replay(tmp_path: Path) -> None:
    """A replay owns its directory while it writes there."""
    from eventloop import replay
    from eventloop.events import ScalarsLogged
    from eventloop.writers import JSONLWriter
    from tests.support.trainers import build_trainer

    run, out = tmp_path / "run", tmp_path / "out"
    with training(run, iters=5) as first:
        first.run()
    seen: list[str] = []

    class Looking(JSONLWriter):
        events = (ScalarsLogged,)

        def flush(self) -> None:
            super().flush()
            owner = read_owner(out)
            seen.append("" if owner is None else owner.state)

    replay(run, Looking(), work_dir=out)

    assert seen == ["replaying"]
    build_trainer(out, max_epochs=1).train()
