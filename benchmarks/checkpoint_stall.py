"""What does a checkpoint cost the training that goes on meanwhile?

    python -m benchmarks.checkpoint_stall --json benchmarks/results/checkpoint_stall.json

One model with momentum, 400 MB together, is trained by one trainer for each way to save; they take turns. A turn is
so many iterations, with a checkpoint after the first, and lasts until that is on the disk. Beside our CheckpointHook:
no checkpoint, `torch.save` with fsync on the training thread, a clone of all tensors that a thread writes, and
`torch.distributed.checkpoint.async_save`.

- blocked: what the training thread spends in the call and, before the optimizer's step, in waiting for the copy
- cost: the turn, until the last iteration ends, less the same turn without a checkpoint
- cost by halves: the first half of the turn, in which it is saved, less the second, and that less the same without a
  checkpoint. A machine's speed changes from turn to turn by more than a checkpoint costs; within one it does so less.
  `done`: in how many turns the checkpoint was on the disk when the second half began; only then this is all of its cost
- slowest: the slowest iteration of the turn over the median iteration without a checkpoint, the call included
- durable: from the call until the bytes are on the disk

The second part, on an idle machine, is the bandwidth of our saver, hash included, beside `dd conv=fsync` of as many
bytes; the third the memory of the training process and its saver over many saves.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.helpers.checkpoint_ways import WAYS, Ours, Synchronous, Way
from benchmarks.helpers.in_short import section
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop import Trainer
from eventloop.checkpoint import find_checkpoints, save_checkpoint
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.checkpoint.disk import DISK

GOAL_COLUMNS = ("goal", "wanted", "measured", "met")
WIDTH, DEPTH = 2048, 12
"""Twelve layers of 2048 x 2048 float32: 200 MB, and as much momentum."""
BY_HALVES = "the same by halves"
WARM_UP = 2
"""Turns until the saver's process is there and every buffer has been touched."""


@dataclass
class Turn:
    """What was measured of one turn, in seconds."""

    blocked: float
    iterations: list[float]
    durable: float
    done: bool
    """Whether it was on the disk at the middle."""

    @property
    def total(self) -> float:
        """Return the seconds of all iterations of the turn."""
        return sum(self.iterations)

    @property
    def slope(self) -> float:
        """Return by how many seconds the first half of the iterations took longer than the second."""
        half = len(self.iterations) // 2
        return sum(self.iterations[:half]) - sum(self.iterations[-half:])


def build(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def turns(way: Way, batch: tuple[torch.Tensor, torch.Tensor], iterations: int) -> Generator[Turn]:
    """Train for ever, a turn at each `next`; the first iteration of a turn ends with a checkpoint."""
    default: dict[str, Any] = dict.fromkeys(("preemption", "garbage_collection", "logger"))
    if not (hooks := way.hooks()):
        default["checkpoint"] = None
    trainer = Trainer(
        way.model,
        optimizer=way.optimizer,
        max_iters=10**9,
        hooks=hooks,
        default_hooks=default,
        writers=[],
        work_dir=way.directory / "run",
    )
    way.attach(trainer)
    taken: list[float] = []
    done = False
    way.due, began = True, perf_counter()
    for _ in trainer.epochs():
        last = perf_counter()
        for inputs, target in trainer.batches(repeat(batch)):
            now = perf_counter()
            if trainer.iter:
                taken.append(now - last)
            if len(taken) == iterations // 2:
                done = way.done()
            if len(taken) == iterations:
                way.wait()
                yield Turn(way.blocked, taken, perf_counter() - began - taken[0], done)
                taken, way.blocked, way.due = [], 0.0, True
                began = now = perf_counter()
            last = now
            trainer.outputs = {"loss": F.mse_loss(way.model(inputs), target)}


def take_turns(options: argparse.Namespace, directory: Path) -> dict[str, list[Turn]]:
    """Every way in every round, each round beginning with another one."""
    model, optimizer = build(options.width, DEPTH)
    batch = (torch.randn(options.batch, options.width), torch.randn(options.batch, options.width))
    ways = [way(model, optimizer, directory / str(n)) for n, way in enumerate(WAYS.values())]
    running = {way.name: turns(way, batch, options.iterations) for way in ways}
    taken: dict[str, list[Turn]] = defaultdict(list)
    for turn in range(-WARM_UP, options.rounds):
        names = [*running][turn % len(running) :] + [*running][: turn % len(running)]
        for name in names:
            one = next(running[name])
            if turn >= 0:
                taken[name].append(one)
            print(f"{turn:3} {name:20} {one.total:6.2f} s, blocked {one.blocked:.4f} s", flush=True)
    for way in ways:
        running[way.name].close()
        way.close()
    return taken


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def figures(taken: dict[str, list[Turn]]) -> dict[str, dict[str, float]]:
    """By way: seconds, and ratios within a round; medians over the rounds."""
    plain, sync = taken[Way.name], taken[Synchronous.name]
    costs = {
        name: [a.total - b.total for a, b in zip(turns, plain, strict=True)] for name, turns in taken.items()
    }
    halves = {
        name: [a.slope - b.slope for a, b in zip(turns, plain, strict=True)] for name, turns in taken.items()
    }
    steps = [median(turn.iterations) for turn in plain]
    sync_cost = median(turn.blocked for turn in sync)
    return {
        name: {
            "blocked": median(turn.blocked for turn in turns),
            "blocked / sync": median(a.blocked / b.blocked for a, b in zip(turns, sync, strict=True)),
            "cost": median(costs[name]),
            "cost / sync": median(costs[name]) / sync_cost,
            "halves": median(halves[name]),
            "halves / sync": median(halves[name]) / sync_cost,
            "done": sum(turn.done for turn in turns) / len(turns),
            "slowest / step": median(max(t.iterations) / step for t, step in zip(turns, steps, strict=True)),
            "durable": median(turn.durable for turn in turns),
        }
        for name, turns in taken.items()
    }


def bandwidth(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Bytes a second of `dd`, and of a save as the saver's process makes it, taking turns."""
    state = {"state_dict": {"w": torch.randn(options.width * options.width * DEPTH * 2)}}
    size = state["state_dict"]["w"].nbytes
    taken: dict[str, list[float]] = defaultdict(list)
    command = ["dd", "if=/dev/zero", f"of={directory / 'dd'}", "bs=4M", f"count={size >> 22}", "conv=fsync"]
    ways: list[tuple[str, Path, Callable[[], object]]] = [
        (
            "dd conv=fsync",
            directory / "dd",
            partial(subprocess.run, command, check=True, capture_output=True),
        ),
        ("eventloop", directory / "c", partial(save_checkpoint, state, directory / "c")),
    ]
    for turn in range(options.rounds + 1):
        for name, path, write in ways[:: (-1) ** turn]:  # each is the first in every other turn
            began = perf_counter()
            write()
            ended = perf_counter()
            DISK.remove(path)
            if turn:
                taken[name].append(size / (ended - began))
    ratio = median(a / b for a, b in zip(taken["eventloop"], taken["dd conv=fsync"], strict=True))
    return {**{name: median(values) for name, values in taken.items()}, "ratio": ratio}


def memory(options: argparse.Namespace) -> dict[str, float]:
    """Return the figures of `look_at_memory`, measured in a new process.

    The memory of this one shows what was measured before.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.checkpoint_stall",
        "--look-at-memory",
        "--saves",
        str(options.saves),
    ]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = msgspec.json.decode(told.splitlines()[-1])
    return figures


def look_at_memory(saves: int, directory: Path) -> dict[str, float]:
    """Save a smaller model many times; return two figures of memory, as parts of a checkpoint's bytes.

    The first is the memory that states are copied to. The second is how much the training process has
    grown from the second quarter of the saves, when everything is warm, to the last.
    """
    model, optimizer = build(1024, DEPTH)
    inputs = torch.randn(1, 1024)
    running = turns(Ours(model, optimizer, directory), (inputs, inputs), 2)
    seen = []
    for _ in range(saves):
        next(running)
        seen.append(resident())
    copies = mapped_for_copies()
    size = find_checkpoints(directory / "run")[-1].joinpath(PAYLOAD).stat().st_size
    running.close()
    quarter = len(seen) // 4
    grown = statistics.median(seen[-quarter:]) - statistics.median(seen[quarter : 2 * quarter])
    return {"copies / state": copies / size, "growth": grown / size}


def resident() -> int:
    """Bytes of this process that lie in memory, those shared with the saver among them."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def mapped_for_copies() -> int:
    """Bytes of the buffers that are shared with the saver."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines if "eventloop snapshot" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def goals(record: dict[str, Any]) -> list[list[str]]:
    """The goals beside what was measured."""
    ours, disk, held = record["ways"][Ours.name], record["bandwidth"], record["memory"]
    rows = [
        ("training thread blocked / torch.save + fsync", 0.02, ours["blocked / sync"]),
        ("cost to the whole run / torch.save + fsync", 0.10, ours["cost / sync"]),
        (BY_HALVES, 0.10, ours["halves / sync"]),
        ("slowest iteration / median", 2.0, ours["slowest / step"]),
        ("memory for copies / state", 1.0, held["copies / state"]),
        ("memory grown over the saves / state", 0.05, held["growth"]),
    ]
    table = [
        [what, f"<= {goal}", f"{value:.3f}", yes_no(round(value, 3) <= goal)] for what, goal, value in rows
    ]
    for row in table:
        if row[0] == BY_HALVES and ours["done"] < 1:  # a save that is in both halves cancels out
            row[3] = f"not known: done in {ours['done']:.0%} of the turns"
    ratio = disk["ratio"]
    return [*table, ["bandwidth / dd conv=fsync", ">= 0.8", f"{ratio:.2f}", yes_no(ratio >= 0.8)]]


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    ours, sync = record["ways"][Ours.name], record["ways"][Synchronous.name]
    others = (name for name in record["ways"] if name not in (Way.name, Ours.name, Synchronous.name))
    beside = ", ".join(f"{name} {record['ways'][name]['blocked'] * 1e3:.0f} ms" for name in others)
    threads = record["environment"]["torch threads"]
    return section(
        f"a training with one checkpoint in each turn; torch has {threads} thread{'' if threads == '1' else 's'}.",
        [
            (
                f"A checkpoint of eventloop blocks the training thread for {ours['blocked'] * 1e3:.1f} ms "
                f"({ours['blocked / sync']:.1%} of torch.save and fsync, {sync['blocked'] * 1e3:.0f} ms; {beside})."
            ),
            f"The whole run pays {ours['cost'] * 1e3:.0f} ms for it; torch.save and fsync cost it {sync['cost'] * 1e3:.0f} ms.",
            f"The slowest iteration is {ours['slowest / step']:.2f} of the median one ({sync['slowest / step']:.2f}).",
        ],
        [dict(zip(GOAL_COLUMNS, row, strict=True)) for row in goals(record)],
        record["environment"],
    )


def report(record: dict[str, Any]) -> str:
    """The whole page."""
    rows = [
        [
            name,
            f"{f['blocked'] * 1e3:.1f} ms",
            f"{f['blocked / sync']:.1%}",
            f"{f['cost'] * 1e3:.0f} ms",
            f"{f['cost / sync']:.0%}",
            f"{f['halves'] * 1e3:.0f} ms",
            f"{f['halves / sync']:.0%}",
            f"{f['done']:.0%}",
            f"{f['slowest / step']:.2f}",
            f"{f['durable']:.2f} s",
        ]
        for name, f in record["ways"].items()
    ]
    headers = [
        "way",
        "blocked",
        "/ sync",
        "cost",
        "/ sync",
        "by halves",
        "/ sync",
        "done",
        "slowest / step",
        "durable after",
    ]
    disk, held = record["bandwidth"], record["memory"]
    rates = [[name, f"{value / 2**20:.0f} MB/s"] for name, value in disk.items() if name != "ratio"]
    return "\n\n".join(
        [
            f"# {(__doc__ or '').splitlines()[0]}\n\n    {command_line('benchmarks.checkpoint_stall')}",
            "\n".join(f"- {name}: {value}" for name, value in record["environment"].items()),
            "## Goals\n\n" + markdown_table(GOAL_COLUMNS, goals(record)),
            "## While it trains\n\n" + markdown_table(headers, rows),
            "## Alone\n\n" + markdown_table(["writing", "bandwidth"], rates),
            f"Memory after many saves: {held['copies / state']:.2f} of the state, "
            + f"grown by {held['growth']:.3f} of it from their second quarter to the last.",
        ]
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=14, help="of a turn")
    parser.add_argument("--width", type=int, default=2048, help="of the twelve layers")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; on two CPUs, 2 leaves none to the saver"
    )
    parser.add_argument("--saves", type=int, default=200, help="where memory is looked at")
    parser.add_argument("--look-at-memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help="on the disk to write to; by default a temporary one")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--markdown", type=Path, help="where to keep the printed report")
    return parser.parse_args()


def main() -> None:
    """Time, print, keep."""
    options = arguments()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        if options.look_at_memory:
            print(msgspec.json.encode(look_at_memory(options.saves, directory)).decode())
            return
        taken = take_turns(options, directory)
        record = {
            "environment": {**environment("torch", "msgspec"), "torch threads": str(options.threads)},
            "ways": figures(taken),
            "bandwidth": bandwidth(options, directory),
            "memory": memory(options),
        }
    publish(report(record), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
