"""What the rows of `hook_cost` share: trainers that are built once, losses ready for backward, timed loops."""

from __future__ import annotations

import io
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.helpers.timing import Case, statement
from eventloop import Trainer
from eventloop.events import AfterTrainIter
from eventloop.metrics import EventStorage
from eventloop.metrics.media import MediaPacket
from eventloop.metrics.packet import Packet
from eventloop.metrics.rows import RunLimits

OURS, BY_HAND, BACKGROUND = "ours", "by hand", "background"
INTERVAL = 10
"""Iterations from one log to the next."""
HISTORY = 1_000
"""Values each history has where its length is not the question; MMEngine's cost depends on it."""
EVENTS = tuple(
    AfterTrainIter(iter=index, batch_idx=index, max_iters=100_000, max_epochs=100)
    for index in range(INTERVAL)
)

FOREVER = 10**9
_NUMBERS = itertools.count()
"""Of the directories; MMEngine shares what has the same name, in other rows too."""
AFTER_ITER = "hook.after_train_iter(trainer, event)"


class Heads(nn.Module):
    """Two small linear layers side by side, so that what surrounds their arithmetic shows. No layer's gradient needs
    the weights of another: losses can be kept ready while the optimizer changes the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The sum of the heads."""
        total: torch.Tensor = sum(head(inputs) for head in self.heads)
        return total


class Layers(nn.Sequential):
    """Fifty linear layers: 100 tensors, 1,044,000 parameters; what is averaged."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(144, 144) for _ in range(50)))


class Job:
    """A model, its optimizer, and losses whose graphs wait for backward."""

    def __init__(self) -> None:
        self.model = Heads()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self._batch = torch.rand(4, 8), torch.randint(4, (4,))
        self.losses: list[torch.Tensor] = []
        self.outputs: list[dict[str, torch.Tensor]] = []

    def make(self, count: int) -> None:
        """Make so many losses, in place of those there were; the same as what `train_step` returns in `outputs`."""
        inputs, target = self._batch
        self.losses[:] = [F.cross_entropy(self.model(inputs), target) for _ in range(count)]
        self.outputs[:] = [{"loss": loss} for loss in self.losses]


class Bench:
    """The tools of a row: it makes trainers, losses and cases, and releases them after the row.

    Args:
        directory: for the files of trainers.
        stack: closes what was made.
        number: iterations in a block of the cheapest rows; dearer ones have a part of it.
    """

    def __init__(self, directory: Path, stack: ExitStack, number: int) -> None:
        self.directory, self.stack, self.number = directory, stack, number
        self.partner: Any = None
        """The second rank, in a row that has one: a `hook_ranks.Partner`."""

    def own_directory(self) -> Path:
        """Return a new directory; its name can also serve as a unique name."""
        path = self.directory / f"hook_cost_{next(_NUMBERS)}"
        path.mkdir()
        return path

    def trainer(self, model: nn.Module | None = None, **options: Any) -> Trainer:
        """A trainer of 100 epochs of 1000 batches, in the middle of an iteration."""
        trainer = Trainer(
            Heads() if model is None else model,
            train_step=lambda trainer, batch: batch,
            train_loader=loader(),
            work_dir=self.own_directory(),
            **{"max_epochs": 100, "writers": [], **options},
        )
        self.stack.callback(trainer.close)
        trainer.iter = trainer.metrics.iter = 7
        return trainer

    def losses(self, count: int) -> Job:
        """A job with so many losses ready."""
        job = Job()
        job.make(count)
        return job

    def iterations(
        self,
        label: str,
        body: str,
        names: Mapping[str, Any],
        *,
        part: int = 1,
        head: str = "for _ in ten",
        end: str | None = None,
        after: Callable[[], object] | None = None,
    ) -> Case:
        """Ten iterations of `body`, and `end` after each ten, in a compiled loop; the time is that of one iteration.

        Args:
            head: of the inner loop, which goes over `ten` numbers or as many `events`.
            part: the block has `number / part` iterations.
        """
        source = _inside(head, body) + (f"\n        {end}" if end else "")
        intervals = max(self.number // part // INTERVAL, 1)
        bound = {"ten": range(INTERVAL), "events": EVENTS, **names}
        return replace(statement(label, source, intervals, bound, after), number=intervals * INTERVAL)

    def over(
        self,
        label: str,
        head: str,
        body: str,
        count: int,
        names: Mapping[str, Any],
        after: Callable[[], object],
    ) -> Case:
        """Return a case that runs `body` once for each of `count` things.

        A block uses the things up; `after`, which is not timed, makes new ones.
        """
        return replace(statement(label, _inside(head, body), 1, names, after), number=count)

    def hook_and_collect(self, names: Mapping[str, Any], storage: EventStorage, part: int = 2) -> Case:
        """Return our case of a hook that puts numbers, which are collected every ten iterations.

        Args:
            names: the `hook` and its `trainer`.
            storage: the storage that the hook puts into.
        """
        own = Collected(storage)
        return self.iterations(
            OURS,
            AFTER_ITER,
            {**names, **own.names},
            part=part,
            head="for event in events",
            end=Collected.SOURCE,
            after=own.settle,
        )

    def background(
        self, put: Callable[[], object], storage: EventStorage, part: int = 2, *, media: bool = False
    ) -> Case:
        """Return the case of the work that the background has with the values of each iteration.

        It reads the values, enters them into the histories and makes the events; with `media` it makes
        those of images.

        Args:
            put: puts the values of one iteration.
        """
        intervals = max(self.number // part // INTERVAL, 1)
        packets: list[Packet | MediaPacket] = []

        def fill() -> None:
            packets.clear()
            for _ in range(intervals):
                for _ in range(INTERVAL):
                    put()
                packets.append(storage.collect_media() if media else storage.collect(RunLimits()))

        fill()
        case = self.over(
            BACKGROUND, "for packet in packets", "packet.events()", 1, {"packets": packets}, fill
        )
        return replace(case, number=intervals * INTERVAL)


def _inside(head: str, body: str) -> str:
    """Return the source of a loop over `body`, indented for the place of the statement in `statement`."""
    return "\n            ".join([f"{head}:", *body.splitlines()])


class Collected:
    """The packets of a block: `collect` is timed, as the LoggerHook calls it; what the background does is not.

    Args:
        forget: whether the histories begin anew with each block.
    """

    def __init__(self, storage: EventStorage, *, forget: bool = False) -> None:
        self._storage, self._forget = storage, forget
        self._packets: list[Packet] = []
        self._place = RunLimits(100_000, 100)
        self.names = {"keep": self._packets.append, "collect": storage.collect, "place": self._place}
        """The variables of `SOURCE`."""

    SOURCE = "keep(collect(place))"

    def collect(self) -> None:
        """Collect what was put since the last packet; called outside of the timed part."""
        self._packets.append(self._storage.collect(self._place))

    def settle(self) -> None:
        """Do the background's part of all packets: make their events, and forget them."""
        for packet in self._packets:
            packet.events()
        self._packets.clear()
        if self._forget:
            self._storage._readings.histories.clear()


def remember(
    storage: EventStorage, names: Iterable[str], length: int, *, smoothing_hint: bool = True
) -> None:
    """Give the histories so many values."""
    for first in range(0, length, HISTORY):
        for name in names:
            for _ in range(min(HISTORY, length - first)):
                storage.put_scalar(name, 0.5, smoothing_hint)
        storage.collect()
        storage.read_collected()


def loader() -> DataLoader[Any]:
    """1000 batches for each of two ranks, with a sampler that wants to know the epoch; nobody reads them."""
    data = TensorDataset(torch.zeros(4000, 1))
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))


class Peer(NamedTuple):
    """A peer of a row: the row, the peer's label, the distribution it needs, and what makes its case."""

    row: str
    label: str
    distribution: str
    make: Callable[[Bench, str], Case]


@contextmanager
def quiet() -> Iterator[None]:
    """Set-up without greetings; a logger that is made inside goes on writing to where nobody looks."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextmanager
def no_stderr() -> Iterator[None]:
    """What libraries write to the process's standard error is lost."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
