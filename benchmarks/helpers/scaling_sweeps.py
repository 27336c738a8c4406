"""Measure the four sweeps of `scaling` as `Series`, in microseconds where no other unit is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from inspect import signature
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.helpers.dispatch import dispatch_cases
from benchmarks.helpers.memory import resident_mib
from benchmarks.helpers.straight_lines import Series
from benchmarks.helpers.timing import measure, pinned
from eventloop import Trainer
from eventloop.costs.sampling import WINDOW
from eventloop.events import AfterTrainIter
from eventloop.hooks import EMAHook, Hook, on
from eventloop.writers import JSONLWriter

FOREVER = 1_000_000
SMALL, TENSORS = 1000, 10
"""The parameters of the model whose step is short, and the number of tensors the others are in."""
BATCH = torch.ones(1)


class Model(nn.Module):
    """So many parameters, of which each is read once forward and written once backward: memory, hardly arithmetic."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        tensors = 1 if parameters == SMALL else TENSORS
        self.weights = nn.ParameterList(torch.zeros(parameters // tensors) for _ in range(tensors))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The sum of all parameters."""
        return torch.stack([weight.sum() for weight in self.weights]).sum() * inputs.sum()


class Loop:
    """A trainer in a loop of its own, stopped after each turn; or a bare loop, without one."""

    def __init__(
        self,
        parameters: int,
        length: int,
        directory: Path | None,
        *,
        writers: int = 1,
        ema: bool = False,
    ) -> None:
        self.model = Model(parameters)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.loader = [BATCH] * length
        self.python = 0.0
        self.trainer = None if directory is None else self._trainer(directory, writers, ema)
        self._epochs = None if self.trainer is None else self.trainer.epochs()

    def _trainer(self, directory: Path, writers: int, ema: bool) -> Trainer:
        destinations = [JSONLWriter(filename=f"metrics_{index}.jsonl") for index in range(writers)]
        for index, writer in enumerate(destinations):
            writer.name = f"JSONLWriter {index}"
        directory.mkdir()
        return Trainer(
            self.model,
            optimizer=self.optimizer,
            max_epochs=FOREVER,
            hooks=[EMAHook()] if ema else [],
            writers=destinations,
            work_dir=directory,
            default_hooks={"checkpoint": None},
        )

    def turn(self) -> float:
        """Train an epoch; the seconds it took."""
        began = perf_counter()
        if self.trainer is None or self._epochs is None:
            return self._bare_turn()
        for _ in islice(self._epochs, 1):
            for batch in self.trainer.batches(self.loader):
                self.trainer.outputs = {"loss": self.model(batch)}
        return perf_counter() - began

    def _bare_turn(self) -> float:
        """An epoch of the bare loop; after each step some Python that has nothing to do with it is timed by itself."""
        steps = 0.0
        for batch in self.loader:
            began = perf_counter()
            loss = self.model(batch)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            ended = perf_counter()
            signature(Loop.__init__)
            steps += ended - began
            self.python += perf_counter() - ended
        return steps

    def flush(self) -> float:
        """Wait until the background has written everything; the seconds that took."""
        assert self.trainer is not None
        began = perf_counter()
        self.trainer.bus.flush()
        return perf_counter() - began

    def own_seconds(self) -> float:
        """What the hooks besides the optimizer's, and the loop itself, have taken so far, by the trainer's own clock."""
        assert self.trainer is not None
        phases = self.trainer.clock.phases
        return phases.hooks + phases.unaccounted

    def close(self) -> None:
        """End the run."""
        if self.trainer is not None and self._epochs is not None:
            self._epochs.close()  # type: ignore[attr-defined]
            self.trainer.close()


# --- handlers ----------------------------------------------------------------------------------------------


def handlers(counts: tuple[int, ...], rounds: int, number: int) -> list[Series]:
    """One event, built and emitted, to handlers that do nothing; and a plain loop over them."""
    emitted = Series("bus.emit, event built too", "ns", "handler")
    plain = Series("a plain loop over them", "ns", "handler")
    cases = [case for n in counts for case in dispatch_cases(n, number)]
    with pinned():
        taken = measure(cases, rounds=rounds)
    for n in counts:
        emitted.samples[n] = [seconds * 1e9 for seconds in taken[f"bus.emit {n}"].seconds]
        plain.samples[n] = [seconds * 1e9 for seconds in taken[f"plain {n}"].seconds]
    return [emitted, plain]


# --- writers -----------------------------------------------------------------------------------------------


def writers(counts: tuple[int, ...], rounds: int, length: int, directory: Path) -> list[Series]:
    """An iteration of a small model that logs every 10, to so many JSON line writers on threads of their own."""
    thread = Series("the training thread", "µs", "writer")
    written = Series("until everything is written", "µs", "writer")
    own = Series("default hooks and the loop, of it", "µs", "writer")
    with ExitStack() as stack:
        loops = {n: Loop(SMALL, length, directory / f"writers_{n}", writers=n) for n in counts}
        for loop in loops.values():
            stack.callback(loop.close)
        for n in in_rounds([*loops], rounds, lambda n: (loops[n].turn(), loops[n].flush())):
            before, seconds = loops[n].own_seconds(), loops[n].turn()
            thread.add(n, seconds / length * 1e6)
            own.add(n, (loops[n].own_seconds() - before) / length * 1e6)
            written.add(n, (seconds + loops[n].flush()) / length * 1e6)
    return [thread, written, own]


def in_rounds(keys: list[int], rounds: int, warm_up: Callable[[int], object]) -> Iterator[int]:
    """Yield each key once a round, after `warm_up` was called for all; each round begins with another key."""
    for key in keys:
        warm_up(key)
    for number in range(rounds):
        begin = number % len(keys)
        yield from keys[begin:] + keys[:begin]


# --- parameters --------------------------------------------------------------------------------------------


class Trio(NamedTuple):
    """The same model bare, with the default hooks, and with an average besides."""

    length: int
    bare: Loop
    hooks: Loop
    ema: Loop

    def warm_up(self) -> None:
        """Go on until the bus has decided which events it clocks."""
        for _ in range(WINDOW // self.length + 2):
            self.hooks.turn()
            self.ema.turn()
        self.turn()

    def turn(self) -> tuple[float, ...]:
        """Microseconds an iteration: the bare step, what the average takes, what the default hooks take, the whole
        with them less the bare step, and the Python beside it."""
        python, bare = self.bare.python, self.bare.turn()
        python = self.bare.python - python
        own, whole = self.hooks.own_seconds(), self.hooks.turn()
        own = self.hooks.own_seconds() - own
        with_ema = self.ema.own_seconds()
        self.ema.turn()
        with_ema = self.ema.own_seconds() - with_ema
        for loop in (self.hooks, self.ema):
            loop.flush()
        return tuple(s / self.length * 1e6 for s in (bare, with_ema - own, own, whole - bare, python))


def parameters(counts: tuple[int, ...], rounds: int, directory: Path) -> list[Series]:
    """An iteration of models of several sizes: see `Trio.turn`."""
    per = "million"
    all_series = [
        Series("the bare step", "µs", per, relative=True, each=1e6),
        Series("EMAHook", "µs", per, relative=True, each=1e6),
        Series("default hooks and the loop", "µs", per, relative=True, each=1e6),
        Series("the whole less the bare step", "µs", per, each=1e6),  # of two long times; may be negative
        Series("other Python, after a bare step", "µs", per, relative=True, each=1e6),
    ]
    with ExitStack() as stack:
        trios = {count: trio(count, directory, stack) for count in counts}
        for count in in_rounds([*trios], rounds, lambda count: trios[count].warm_up()):
            for series, micros in zip(all_series, trios[count].turn(), strict=True):
                series.add(count, micros)
    return all_series


def trio(count: int, directory: Path, stack: ExitStack) -> Trio:
    """Return the three loops for a model of `count` parameters.

    A turn has the iterations between two logs, or as many as take some 0.2 s.
    """
    length = 10 * max(1, min(30, int(0.02 / (1e-4 + 2e-9 * count))))
    loops = [
        Loop(count, length, None),
        Loop(count, length, directory / f"hooks_{count}"),
        Loop(count, length, directory / f"ema_{count}", ema=True),
    ]
    for loop in loops:
        stack.callback(loop.close)
    return Trio(length, *loops)


# --- iterations --------------------------------------------------------------------------------------------


class Watch(Hook):
    """Reads the clock and the resident size when so many iterations are done."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self.at = frozenset(at)
        self.seen: list[tuple[int, float, float]] = []
        self.began = 0.0

    @on(priority="LOWEST")
    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Look, where it is time to; the clock starts after the first iteration, which sets things up."""
        if not self.began:
            self.began = perf_counter()
        if event.iter + 1 in self.at:
            self.seen.append((event.iter + 1, perf_counter() - self.began, resident_mib()))


def iterations(at: tuple[int, ...], directory: Path) -> list[Series]:
    """One run with the default hooks, a writer and a checkpoint every 1000 iterations; looked at on its way."""
    watch, model = Watch(at), Model(SMALL)
    directory.mkdir()
    checkpoint: dict[str, Any] = {"interval": at[0], "by_epoch": False, "max_keep_ckpts": 2}
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        train_loader=[BATCH] * 1000,
        train_step=lambda trainer, batch: model(batch),
        max_iters=at[-1],
        hooks=[watch],
        writers=[JSONLWriter()],
        work_dir=directory,
        default_hooks={"checkpoint": checkpoint},
    )
    trainer.train()
    trainer.close()
    per = "million"
    pace = Series("an iteration, since the last point", "µs", per, relative=True, each=1e6)
    total = Series("since the beginning", "s", per, relative=True, each=1e6)
    memory = Series("resident memory", "MiB", per, relative=True, each=1e6)
    before = (0, 0.0)
    for count, seconds, mib in watch.seen:
        pace.add(count, (seconds - before[1]) / (count - before[0]) * 1e6)
        total.add(count, seconds)
        memory.add(count, mib)
        before = count, seconds
    return [pace, total, memory]
