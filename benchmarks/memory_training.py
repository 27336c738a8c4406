"""Does memory stay flat over a long run with every default hook and a writer that cannot keep up?

A step that costs next to nothing, logged every 10 iterations and with an event for each iteration to a writer that
sleeps 1 ms for each; the resident size is read every tenth of the way.

    python -m benchmarks.memory_training [--iterations 1000000] [--json PATH] [--markdown PATH]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import nn

from benchmarks.helpers.in_short import section
from benchmarks.helpers.memory import resident_mib
from benchmarks.helpers.timing import command_line, environment, markdown_table, publish, yes_no
from eventloop import Trainer
from eventloop.events import AfterTrainIter, Event, ScalarsLogged
from eventloop.hooks import Hook, on
from eventloop.writers import JSONLWriter, Writer

LIMIT_MIB = 8.0


class SlowWriter(Writer):
    """Takes a millisecond for each event, of which a thousand times more arrive."""

    events = (AfterTrainIter, ScalarsLogged)
    queue = 1024
    overflow = "drop_oldest"  # the default, a file, would keep memory as flat and the disk busy

    def write(self, event: Event) -> None:
        """Be slow."""
        sleep(0.001)


class Watch(Hook):
    """Reads the resident size every tenth of the run."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[tuple[int, float, float]] = []
        self.began = perf_counter()

    @on(priority="LOWEST")
    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Look, at the tenths."""
        if (event.iter + 1) % self.every == 0:
            self.seen.append((event.iter + 1, resident_mib(), perf_counter() - self.began))


def train(iterations: int, directory: str) -> tuple[Watch, str]:
    """Run; returns what was seen, and the account of the slow writer."""
    model = nn.Linear(1, 1)
    watch = Watch(max(1, iterations // 10))
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        train_step=lambda trainer, batch: model(batch).sum(),
        train_loader=[torch.ones(1, 1)] * 1000,
        max_iters=iterations,
        hooks=[watch],
        writers=[SlowWriter(), JSONLWriter()],
        work_dir=directory,
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 100_000, "max_keep_ckpts": 1}},
    )
    trainer.train()
    slow = next(s for s in trainer.bus.stats() if s.name == "SlowWriter")
    trainer.close()
    return (
        watch,
        f"{slow.delivered:,} delivered, {slow.dropped:,} dropped, {slow.failed} failed, {slow.queued} left",
    )


def short(record: dict[str, Any]) -> str:
    """Return the section that opens the page, of the record that is kept."""
    (first, begun, _), (last, ended, _) = record["seen"][0], record["seen"][-1]
    growth = record["growth_mib"]
    goal = {
        "goal": "growth after the first tenth",
        "wanted": f"<= {LIMIT_MIB} MiB",
        "measured": f"{growth:+.1f} MiB",
        "met": yes_no(growth <= LIMIT_MIB),
    }
    return section(
        f"the resident memory of a training of {last:,} iterations with every default hook and a writer too slow for it.",
        [
            f"It goes from {begun:.1f} MiB after {first:,} iterations to {ended:.1f} MiB at the end: {growth:+.1f} MiB.",
            f"The slow writer's account: {record['account']}.",
        ],
        [goal],
        record["environment"],
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        watch, account = train(options.iterations, directory)
    growth = watch.seen[-1][1] - watch.seen[0][1]
    rows = [[f"{i:,}", f"{mib:.1f}", f"{seconds:.1f}"] for i, mib, seconds in watch.seen]
    about = environment("torch", "msgspec", "blinker", "anyio")
    lines = [
        f"# {__doc__.splitlines()[0] if __doc__ else ''}",
        f"`{command_line('benchmarks.memory_training')}`",
        ", ".join(f"{k} {v}" for k, v in about.items()),
        markdown_table(["iterations", "RSS MiB", "seconds"], rows),
        f"Slow writer: {account}. Growth after the first tenth {growth:+.1f} MiB, at most {LIMIT_MIB}: "
        + yes_no(growth <= LIMIT_MIB),
    ]
    record = {"environment": about, "seen": watch.seen, "growth_mib": growth, "account": account}
    publish("\n\n".join(lines), record, short, json=options.json, markdown=options.markdown)


if __name__ == "__main__":
    main()
