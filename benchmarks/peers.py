"""What does the same training cost in eventloop, by hand and in the peers, next to a bare loop?

An MLP on scikit-learn's digits, SGD with momentum, one torch thread, a step of ~1 ms and one of ~20 ms (batch size
calibrated at the beginning). Every engine has a process of its own; all are there at the same time and one works, so
a turn is compared with the bare loop's turn of the same round. Weights at the beginning and batches are the same in
all, and so must be the loss after each turn. Everything is built anew several times (sessions): where a model lies in
memory makes it faster or slower by some percent. How much, the row of a second process with the same bare loop says.

- bare: forward, backward, step, and nothing around them.
- by hand: every 10 iterations loss and learning rate to SummaryWriter, as a JSON line and as a printed line;
  torch.save of model and optimizer each epoch.
- eventloop: the default hooks; ConsoleWriter, JSONLWriter and TensorBoardWriter, every 10 iterations; CheckpointHook
  each epoch, which alone here syncs to the disk and hashes.
- pytorch-ignite: its TensorboardLogger with loss and lr, a handler for the two kinds of lines, every 10 iterations;
  Checkpoint with DiskSaver each epoch.
- MMEngine: Runner with its default hooks, LoggerHook every 10 iterations to its console, log file, LocalVisBackend and
  TensorboardVisBackend; CheckpointHook each epoch.
- Lightning: self.log, log_every_n_steps=10 to TensorBoardLogger and a logger for the lines; ModelCheckpoint each epoch.
- transformers.Trainer: logging_steps=10 to TensorBoardCallback and a callback for the lines; save_strategy="epoch".

No progress bar anywhere; what goes to a console is thrown away. A step lasts from the beginning of one forward pass
to that of the next, so logs and checkpoints are in it; a whole run ends when what was left to the background is done.
The dispatch comparison announces one event to 10 handlers that do nothing, beside a plain loop over them in the same
process. A peer that cannot be had is named, with why.

    python -m benchmarks.peers --json peers.json --markdown peers.md --picture peers.svg
    python -m benchmarks.peers --from peers.json --picture peers.svg        # draw it again
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch

from benchmarks.helpers import peer_dispatch, peers_report
from benchmarks.helpers.digits_training import PEERS
from benchmarks.helpers.engine_process import BUS, BUS_READY, TWIN, Dispatch, Size, Task, Training
from benchmarks.helpers.engines_in_turns import Turn, Workers
from benchmarks.helpers.own_trainings import BARE, DISTRIBUTIONS, WHOLE, missing
from benchmarks.helpers.timing import command_line, environment, publish, version_of

HANDLERS = 10
REPETITIONS = 1000
"""Of the announcement, in a block of a dispatch turn."""
ENGINES = (BARE, BARE + TWIN, "by hand", WHOLE)
RATIOS = ("mean", "p50", "p99", "wall")


@dataclass(frozen=True)
class Aim:
    """A length of a step, and what to begin with to reach it."""

    seconds: float
    batch_size: int
    width: int
    epoch_length: int
    epochs: int
    """Of a turn."""
    goal: float
    """The whole run of the whole stack over the bare loop's."""


AIMS = {
    "1 ms": Aim(0.001, batch_size=64, width=256, epoch_length=400, epochs=2, goal=1.05),
    "20 ms": Aim(0.020, batch_size=128, width=1024, epoch_length=50, epochs=1, goal=1.01),
}


short = peers_report.short


def page_of(record: dict[str, Any]) -> str:
    """The whole page."""
    return peers_report.page_of((__doc__ or "").splitlines()[0], record)


# --- measuring ---------------------------------------------------------------------------------------------


def calibrate(aim: Aim, epoch_length: int) -> Size:
    """The batch size with which a bare step takes about as long as it should on this machine now."""
    batch_size = aim.batch_size
    for _ in range(3):
        seconds = bare_step(Size(batch_size, aim.width, epoch_length=30))
        batch_size = max(4, round(batch_size * aim.seconds / seconds / 4) * 4)
    return Size(batch_size, aim.width, epoch_length)


def bare_step(size: Size) -> float:
    """A few steps of the bare loop, the wait for their batches included, in seconds: the lower quartile."""
    job, times = size.job(), []
    began = perf_counter()
    for batch in job.loader:
        job.step(batch)
        now = perf_counter()
        times.append(now - began)
        began = now
    return statistics.quantiles(times[5:], n=4)[0]  # others on the machine make the median longer


def unavailable(needs: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Which of them are not installed, and what they lack."""
    absent = {name: missing(distributions) for name, distributions in needs.items()}
    return {name: f"not installed: {', '.join(lacks)}" for name, lacks in absent.items() if lacks}


def in_sessions(
    tasks: Mapping[str, Task], absent: dict[str, str], *, sessions: int, rounds: int, warm_up: int
) -> tuple[dict[str, list[Turn]], dict[str, str]]:
    """Measure the tasks in several sessions; return the turns by name, and by name why some have none.

    A task that failed in one session is left out of the later ones.
    """
    taken: dict[str, list[Turn]] = {name: [] for name in tasks}
    failed = dict(absent)
    for _ in range(sessions):
        with Workers({name: task for name, task in tasks.items() if name not in failed}) as workers:
            session = workers.take_turns(rounds, warm_up)
        failed |= {name: f"failed: {reason}" for name, reason in workers.failed.items()}
        for name, turns in session.items():
            taken[name] += turns
    return {name: turns for name, turns in taken.items() if name not in failed}, failed


def train(aim: Aim, options: argparse.Namespace) -> dict[str, Any]:
    """The trainings with steps of one length.

    Raises:
        RuntimeError: the bare loop or eventloop failed.
    """
    size = calibrate(aim, options.epoch_length or aim.epoch_length)
    absent = unavailable({name: needs for name, (needs, _) in PEERS.items()})
    tasks = {name: Training(name, size, aim.epochs) for name in (*ENGINES, *PEERS)}
    turns, failed = in_sessions(
        tasks, absent, sessions=options.sessions, rounds=options.rounds, warm_up=options.warm_up
    )
    for needed in (BARE, WHOLE):
        if needed in failed:
            raise RuntimeError(f"{needed} {failed[needed]}: nothing can be compared with it")
    return {
        "goal": aim.goal,
        "size": msgspec.to_builtins(size),
        "parameters": sum(p.numel() for p in size.job().model.parameters()),
        "epochs": aim.epochs,
        "bare_step": statistics.median(turn["mean"] for turn in turns[BARE]),
        "compared": {name: compare(own, turns[BARE], turns[WHOLE]) for name, own in turns.items()},
        "failed": failed,
        "loss_difference": loss_difference(turns),
        "idle_cpu": max(turn["idle_cpu"] for own in turns.values() for turn in own),
        "turns": turns,
    }


def compare(own: list[Turn], bare: list[Turn], whole: list[Turn]) -> dict[str, Any]:
    """Compare the turns of an engine with those of the bare loop and of eventloop in the same rounds."""
    ratios = {key: quartiles([a[key] / b[key] for a, b in zip(own, bare, strict=True)]) for key in RATIOS}
    return {
        **ratios,
        "step": statistics.median(turn["mean"] for turn in own),
        "added": quartiles([a["mean"] - b["mean"] for a, b in zip(own, bare, strict=True)]),
        "left": statistics.median(turn["left"] for turn in own),
        "to_eventloop": quartiles([a["mean"] / b["mean"] for a, b in zip(own, whole, strict=True)]),
    }


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def loss_difference(turns: dict[str, list[Turn]]) -> float:
    """How far any engine's loss was from the bare loop's, after any turn."""
    return max(
        abs(turn["loss"] - bare["loss"])
        for own in turns.values()
        for turn, bare in zip(own, turns[BARE], strict=True)
    )


def dispatch(options: argparse.Namespace) -> dict[str, Any]:
    """One event to handlers that do nothing, by every system."""
    absent = unavailable({label: (distribution,) for label, (distribution, _) in peer_dispatch.PEERS.items()})
    tasks = {
        label: Dispatch(label, HANDLERS, options.repetitions)
        for label in (BUS, BUS_READY, *peer_dispatch.PEERS)
    }
    turns, failed = in_sessions(
        tasks, absent, sessions=1, rounds=options.sessions * options.rounds, warm_up=options.warm_up
    )
    if BUS in failed:
        raise RuntimeError(f"{BUS} {failed[BUS]}: nothing can be compared with it")
    compared = {
        label: {
            "ratio": quartiles([turn["ratio"] for turn in own]),
            "ns": quartiles([turn["own"] for turn in own]),
            "plain_ns": statistics.median(turn["plain"] for turn in own),
            "to_eventloop": quartiles(
                [a["ratio"] / b["ratio"] for a, b in zip(own, turns[BUS], strict=True)]
            ),
        }
        for label, own in turns.items()
    }
    return {"handlers": HANDLERS, "compared": compared, "failed": failed, "turns": turns}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as it is kept."""
    torch.set_num_threads(1)
    distributions = dict.fromkeys([*DISTRIBUTIONS, *(needs for needs, _ in peer_dispatch.PEERS.values())])
    return {
        "command": command_line("benchmarks.peers"),
        "environment": environment(*distributions),
        "options": {key: getattr(options, key) for key in ("sessions", "rounds", "warm_up")},
        "sizes": {name: train(AIMS[name], options) for name in options.steps},
        "dispatch": dispatch(options),
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", nargs="+", choices=AIMS, default=[*AIMS], help="lengths of a step")
    parser.add_argument("--sessions", type=int, default=5, help="times everything is built anew")
    parser.add_argument("--rounds", type=int, default=8, help="of a session")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds of a session to leave out")
    parser.add_argument("--epoch-length", type=int, help="iterations from one checkpoint to the next")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, help="in a block of a dispatch turn")
    parser.add_argument("--quick", action="store_true", help="one session of three short rounds: a trial")
    parser.add_argument("--from", dest="kept", type=Path, help="report on a JSON file, and measure nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--picture", type=Path, help=".svg or .png")
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.rounds, options.warm_up, options.repetitions = 1, 3, 1, 300
        options.epoch_length = options.epoch_length or 20
    if options.picture is not None and version_of("matplotlib") == "not installed":
        parser.error("--picture needs matplotlib: pip install -c constraints.txt -e '.[bench]'")
    return options


def main() -> None:
    """Measure, or read what was; print, keep, draw."""
    options = arguments()
    record = measure(options) if options.kept is None else msgspec.json.decode(options.kept.read_bytes())
    publish(page_of(record), record, short, json=options.json, markdown=options.markdown)
    if options.picture is not None:
        peers_report.draw(record, options.picture)


if __name__ == "__main__":
    main()
