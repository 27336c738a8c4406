"""Two ranks that each engine, the host, trains its own way with DistributedDataParallel, with and without a bridge."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.forked import ROOT
from tests.support.told import answers

pytestmark = pytest.mark.slow

HOSTS = ("lightning", "transformers", "ignite", "mmengine")
DEADLINE = 120.0
"""Seconds against hangs; a host takes about 15, and most of them for its import."""
PARTS = ("alone", "bridged", "stop", "stop in a validation", "told", "error")
"""The trainings of a process group, by the names that `ranks_script.py` has for them; the error ends it."""


class Ranks(NamedTuple):
    """What two ranks of a host saw, and how their processes ended."""

    host: str
    folder: Path
    codes: list[int]
    errors: str

    def saw(self, part: str) -> list[dict[str, Any]]:
        """What each rank saw of a training."""
        files = [self.folder / f"{part}.{rank}.json" for rank in range(2)]
        assert all(file.exists() for file in files), self.errors[-4000:]
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module", params=HOSTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """All trainings of a host."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: pip install 'torch-eventloop[{request.param}]'")
    folder = tmp_path_factory.mktemp(request.param)
    codes = run_ranks(request.param, folder)
    return Ranks(request.param, folder, codes, (folder / "errors.txt").read_text())


def environment() -> dict[str, str]:
    """The environment of a process that trains on the CPU."""
    return {**os.environ, "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def run_ranks(host: str, folder: Path) -> list[int]:
    """Start the ranks, as torchrun would; Lightning starts rank 1 itself. Return their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    by_rank: list[dict[str, str]] = [
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        for rank in ("0", "1")
    ]
    script = Path(__file__).with_name("ranks_script.py")
    with (folder / "errors.txt").open("wb") as errors:
        started = [
            subprocess.Popen(
                [sys.executable, script, host, folder, *PARTS],
                cwd=folder,
                env=environment() | own,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            for own in ([{}] if host == "lightning" else by_rank)
        ]
        try:
            return [process.wait(DEADLINE) for process in started]
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_weights_are_those_without_the_bridge(ranks: Ranks) -> None:
    """On both ranks the weights of a training with the bridge are bitwise those without it."""
    weights = [each["weights"] for part in ("alone", "bridged") for each in ranks.saw(part)]

    assert weights == [weights[0]] * 4


def test_ranks_know_themselves(ranks: Ranks) -> None:
    """Each rank has the events of a whole training, and handlers on it find its number."""
    both = ranks.saw("bridged")

    assert [(saw["rank"], saw["world_size"], saw["iters"]) for saw in both] == [(0, 2, 8), (1, 2, 8)]
    one, other = (Counter(saw["events"]) for saw in both)
    assert (one["AfterTrainIter"], one["AfterTrainEpoch"], one["AfterVal"]) == (8, 2, 2)
    saving = {"BeforeSaveCheckpoint"} if ranks.host in ("transformers", "mmengine") else set()
    assert {*(one - other), *(other - one)} == saving


def test_rank_0_writes(ranks: Ranks) -> None:
    """Rank 0 alone writes the metrics, each once; each rank writes its costs."""
    folder = ranks.folder / "bridged"

    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert names == ["costs.json", "costs.rank1.json", "heartbeat.json", "metrics.jsonl", "run.json"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if "event" in line] == ["before_run", "run_info", "after_run"]
    logged = [(line["mode"], line["step"], sorted(line)) for line in lines if "event" not in line]
    assert [line for line in logged if logged.count(line) > 1] == []
    assert [(mode, step) for mode, step, _ in logged if mode == "val"] == [("val", 4), ("val", 8)]


@pytest.mark.parametrize("part", ["stop", "stop in a validation"])
def test_a_stop_of_one_rank_ends_both(ranks: Ranks, part: str) -> None:
    """A handler on rank 1 stops both ranks: after the next iteration, or where the validation ends.

    MMEngine finishes the epoch.
    """
    iters = 3 if part == "stop" and ranks.host != "mmengine" else 4
    both = ranks.saw(part)

    assert [(saw["iters"], saw["reason"]) for saw in both] == [
        (iters, "rank 1 asked to stop: why"),
        (iters, "why"),
    ]
    assert both[0]["weights"] == both[1]["weights"]


def test_commands_are_applied_on_both_ranks(ranks: Ranks) -> None:
    """Rank 0's commands are applied after the same iteration on both ranks, which stay equal; a pause is refused.

    An ignite engine has neither a handler that saves nor an evaluator that has run by then. MMEngine finishes the
    epoch after a stop.
    """
    one, other = ranks.saw("told")
    by_name = {each.command: each for each in answers(ranks.folder / "told")}

    assert one["commands"] == other["commands"]
    assert one["weights"] == other["weights"]
    refused = {"pause"} | ({"checkpoint", "validate"} if ranks.host == "ignite" else set())
    assert {name for name, each in by_name.items() if each.outcome == "refused"} == refused
    assert "trains on 2 ranks" in by_name["pause"].reason
    assert [name for name, *_ in one["commands"]] == [
        "note",
        "set",
        "checkpoint",
        "validate",
        "pause",
        "stop",
    ]
    assert len({at for _, _, at in one["commands"][:4]}) == 1
    assert [saw["stop_reason"] for saw in (one, other)] == ["enough", "enough"]
    if ranks.host != "ignite":
        assert Path(by_name["checkpoint"].result["path"]).exists()


def test_an_error_of_one_rank_ends_both(ranks: Ranks) -> None:
    """The ranks end by the host's errors: rank 1 by its own, rank 0 by the lost connection to it."""
    one, other = ranks.saw("error")

    assert 0 not in ranks.codes
    assert "ValueError: rank 1 got a bad batch" in ranks.errors
    assert other["error"] == "ValueError: rank 1 got a bad batch"
    assert [one["reason"], other["reason"]] == ["error", "error"]
    assert one["error"].startswith("RuntimeError")


def run_spawned(strategy: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train by Lightning on two ranks that are processes of one program."""
    pytest.importorskip(
        "lightning", reason="lightning is not installed: pip install 'torch-eventloop[lightning]'"
    )
    return subprocess.run(
        [sys.executable, Path(__file__).with_name("spawned_script.py"), strategy, folder],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=DEADLINE,
        check=False,
        env=environment(),
    )


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_ranks_that_lightning_makes_of_one_program(strategy: str, tmp_path: Path) -> None:
    """Each rank of a fit and of a validation has a copy of the bridge; a stop of rank 1 ends both."""
    ran = run_spawned(strategy, tmp_path)

    assert ran.returncode == 0, ran.stderr
    ends = [(tmp_path / f"rank{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert ends == [["3 rank 1 asked to stop: why", "0 completed"], ["3 why", "0 completed"]]
    names = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_file())
    assert names == ["costs.json", "costs.rank1.json", "heartbeat.json", "metrics.jsonl", "run.json"]
    handled = "" if strategy == "ddp_spawn" else "now0 now1 now2 task0 task1 task2 thread0 thread1 thread2"
    assert [(tmp_path / f"seen{rank}.txt").read_text() for rank in range(2)] == [handled] * 2
