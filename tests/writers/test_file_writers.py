"""What every writer of scalars to a file keeps: each value at its step, after a flush, a kill, an exit and a resume, and
errors that name the file."""

from __future__ import annotations

import logging
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from eventloop import Trainer, read_events
from eventloop.events import AfterRun, AfterTrainIter, ScalarsLogged
from eventloop.events.run import Run
from eventloop.hooks import CheckpointHook, Hook, LoggerHook
from eventloop.writers import (
    CSVWriter,
    EventLogWriter,
    JSONLWriter,
    TensorBoardWriter,
    Writer,
    read_jsonl,
)
from tests.no_threads import AT_EXIT
from tests.writers.conftest import FLOATS, Account, Attach, emit, tensorboard, train, write
from tests.writers.csv_rows import rows

Values = dict[tuple[str, int, str], float]
"""By mode, step and name."""


def in_csv(work_dir: Path) -> Values:
    values: Values = {}
    for row in rows(work_dir / "metrics.csv"):
        mode, step = row.pop("mode"), int(row.pop("step"))
        found = {name: float(value) for name, value in row.items() if value and name not in ("iter", "epoch")}
        assert not {(mode, step, name) for name in found} & {*values}
        values |= {(mode, step, name): value for name, value in found.items()}
    return values


def in_jsonl(work_dir: Path) -> Values:
    values: Values = {}
    for row in read_jsonl(work_dir / "metrics.jsonl"):
        if "event" not in row:
            place: Any = row.pop("mode"), row.pop("step")
            values |= {(*place, name): row[name] for name in row if name not in ("iter", "epoch")}
    return values


def in_tensorboard(work_dir: Path) -> Values:
    reader = tensorboard(work_dir / "tensorboard")
    values: Values = {}
    for tag in reader.Tags()["scalars"]:
        mode, name = tag.split("/", 1)
        values |= {(mode, point.step, name): point.value for point in reader.Scalars(tag)}
    return values


def in_event_log(work_dir: Path) -> Values:
    reader = read_events(work_dir)
    events = [record.event for record in reader if isinstance(record.event, ScalarsLogged)]
    assert (reader.torn, reader.damaged) == (None, 0)
    return {
        (event.mode, event.step, name): value for event in events for name, value in event.scalars.items()
    }


READERS: list[tuple[Callable[[], Writer], Callable[[Path], Values]]] = [
    (JSONLWriter, in_jsonl),
    (CSVWriter, in_csv),
    (TensorBoardWriter, in_tensorboard),
    (EventLogWriter, in_event_log),
]
each_writer = pytest.mark.parametrize(
    ("make", "read"), READERS, ids=["jsonl", "csv", "tensorboard", "event log"]
)

# --- values ------------------------------------------------------------------------------------------------


@each_writer
@FLOATS
def test_every_float_survives(
    attach: Attach, tmp_path: Path, make: Callable[[], Writer], read: Callable[[Path], Values], value: float
) -> None:
    """The value that is read is bit for bit the one written, in float32 for TensorBoard; numpy's scalars are
    numbers too."""
    handwritten: dict[str, Any] = {"half": np.float32(0.5), "three": np.int64(3)}
    write(attach(make()), *train(1, loss=value), ScalarsLogged(step=2, scalars=handwritten))

    with np.errstate(over="ignore"):
        kept = float(np.float32(value)) if make is TensorBoardWriter else value
    found = read(tmp_path)
    assert struct.pack("d", found.pop(("train", 1, "loss"))) == struct.pack("d", kept)
    assert found == {("train", 2, "half"): 0.5, ("train", 2, "three"): 3.0}


@pytest.mark.parametrize(("make", "read"), READERS[:2], ids=["jsonl", "csv"])
def test_reserved_names_are_not_lost(
    attach: Attach, tmp_path: Path, make: Callable[[], Writer], read: Callable[[Path], Values]
) -> None:
    """Metrics called like the keys of a line, or like each other's replacement, all get a key of their own."""
    names = ["step", "iter", "epoch", "mode", "scalars/step", "scalars/scalars/step"]

    write(attach(make()), ScalarsLogged(step=7, scalars={name: float(i) for i, name in enumerate(names)}))

    assert read(tmp_path) == {("train", 7, f"scalars/{name}"): float(i) for i, name in enumerate(names)}


@each_writer
def test_flush_makes_values_visible(
    attach: Attach, tmp_path: Path, make: Callable[[], Writer], read: Callable[[Path], Values]
) -> None:
    """After bus.flush another reader finds everything, while the writer is still open."""
    emit(attach(make()), *train(1, 2))

    assert read(tmp_path) == {("train", 1, "loss"): 0.25, ("train", 2, "loss"): 0.5}


# --- kills and exits ---------------------------------------------------------------------------------------

PROGRAM = """
import logging, os, signal
from eventloop.bus import Bus
from eventloop.events import ScalarsLogged
from eventloop.events.run import Run
from eventloop.writers import *
logging.basicConfig(level=logging.WARNING)
bus = Bus(drain_timeout=60.0)
for writer in JSONLWriter(), CSVWriter(), EventLogWriter(fsync_seconds=0.001), TensorBoardWriter():
    writer.attach(bus, lambda: Run(work_dir="."))
for step in range(1, 101):
    bus.emit(ScalarsLogged(step=step, iter=step - 1, scalars={f"m{step % 7}": step / 4}))
"""
WRITTEN: Values = {("train", step, f"m{step % 7}"): step / 4 for step in range(1, 101)}


def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    """SIGKILL right after a flush loses nothing, whatever new columns did: the writers keep no buffer."""
    program = PROGRAM + "bus.flush(); os.kill(os.getpid(), signal.SIGKILL)"

    killed = subprocess.run([sys.executable, "-c", program], check=False, cwd=tmp_path)

    assert killed.returncode == -signal.SIGKILL
    for _, read in READERS:
        assert read(tmp_path) == WRITTEN


@pytest.mark.representative(1)
@pytest.mark.parametrize("opened", ["", "    if step == 50: bus.flush()\n"], ids=["at the exit", "before"])
def test_what_was_emitted_is_written_at_the_exit(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, opened: str
) -> None:
    """A program may end without closing its bus, though from its main thread's end on Python 3.12 starts no thread."""
    console = "ConsoleWriter(stream=open('console.txt', 'w'), progress=False).attach(bus, lambda: Run(work_dir='.'))\n"
    first, _, rest = PROGRAM.partition("for writer")

    ran = python(f"{first}{console}for writer{rest}{opened}{AT_EXIT}")

    assert (ran.returncode, ran.stderr) == (0, "")
    for _, read in READERS:
        assert read(tmp_path) == WRITTEN
    assert (tmp_path / "console.txt").read_text().splitlines()[-1].startswith("Iter(train) [100]")


# --- errors ------------------------------------------------------------------------------------------------


class OnFullDisk(TensorBoardWriter):
    """Its file is on a disk without room."""

    def open(self, run: Run) -> None:
        self._file = FileIO("/dev/full", "wb")


@pytest.mark.parametrize(
    "make",
    [
        lambda: JSONLWriter("/dev/full"),
        lambda: CSVWriter("/dev/full"),
        OnFullDisk,
    ],
    ids=["jsonl", "csv", "tensorboard"],
)
def test_a_full_disk_is_named_and_never_raises(
    attach: Attach, account: Account, caplog: pytest.LogCaptureFixture, make: Callable[[], Writer]
) -> None:
    """Each emit returns; the account has the error, one message logs it, and closing is clean. A device is never replaced
    by a file."""
    bus = attach(make())

    with caplog.at_level(logging.ERROR, "eventloop"):
        write(bus, *train(*range(1, 11)))

    stats = account(bus)
    assert (stats.delivered, stats.failed + stats.dropped) == (0, 10)
    assert "No space left on device" in stats.error
    assert caplog.messages == [f"background subscriber {stats.name} failed and is disabled"]
    assert Path("/dev/full").is_char_device()


@each_writer
def test_a_folder_that_cannot_be_written_is_named(
    attach: Attach, account: Account, tmp_path: Path, make: Callable[[], Writer], read: object
) -> None:
    """The account has the path that was refused."""
    (tmp_path / "taken").write_text("a file, no folder")
    bus = attach(make(), work_dir=str(tmp_path / "taken"))
    write(bus, *train(1, 2))

    assert (account(bus).delivered, account(bus).failed + account(bus).dropped) == (0, 2)
    assert str(tmp_path / "taken") in account(bus).error


# --- a training --------------------------------------------------------------------------------------------


class Extra(Hook):
    """Puts values where writers are likely to lose them, and breaks off where it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        if event.iter == self.fail_at:
            raise RuntimeError("power cut")
        metrics = trainer.metrics
        if event.iter % 7 == 3:
            metrics.put_scalar("now_and_then", torch.tensor(float(event.iter)), smoothing_hint=False)
        if event.iter >= 12:
            metrics.put_scalar("late", event.iter / 8, smoothing_hint=False, cur_iter=event.iter - 12)

    def after_run(self, trainer: Trainer, event: AfterRun) -> None:
        trainer.metrics.put_scalar("final", 42.0, smoothing_hint=False)


def make_trainer(work_dir: Path, fail_at: int | None = None) -> Trainer:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 0, 1])) for _ in range(23)]
    model = torch.nn.Linear(3, 2)
    return Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.125),
        loss_fn=F.cross_entropy,
        train_loader=data,
        val_loader=data[:2],
        max_iters=23,
        val_interval=4,
        work_dir=work_dir,
        hooks=[Extra(fail_at), LoggerHook(interval=5), CheckpointHook(interval=5)],
        writers=[CSVWriter(), JSONLWriter(), TensorBoardWriter()],
    )


def without_times(values: Values) -> Values:
    return {key: value for key, value in values.items() if "time" not in key[2]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that completed."""
    work_dir = tmp_path_factory.mktemp("run")
    trainer = make_trainer(work_dir)
    trainer.train()
    trainer.close()
    return work_dir


def test_all_writers_have_the_same(run: Path) -> None:
    """Key by key: nothing is in one file and missing in another."""
    ours = in_csv(run)

    assert ours == in_jsonl(run)
    theirs = in_tensorboard(run)
    assert theirs.keys() == ours.keys()
    assert theirs == pytest.approx(ours, rel=1e-6)  # TensorBoard's curves are float32


def test_every_validation_is_there(run: Path) -> None:
    """Also those between two logs of the training."""
    steps = sorted(step for mode, step, name in in_csv(run) if (mode, name) == ("val", "accuracy"))

    assert steps == [4, 8, 12, 16, 20, 23]


def test_late_and_rare_values_are_at_their_own_step(run: Path) -> None:
    """A value put for an earlier iteration is in the row of that iteration; the last ones come after the last iteration."""
    values = in_csv(run)

    assert {s: v for (_, s, n), v in values.items() if n == "late"} == {i - 11: i / 8 for i in range(12, 23)}
    assert {s: v for (_, s, n), v in values.items() if n == "now_and_then"} == {4: 3.0, 11: 10.0, 18: 17.0}
    assert [value for (_, _, name), value in values.items() if name == "final"] == [42.0]


@pytest.mark.slow
def test_an_interrupted_and_resumed_run_has_the_same_rows(run: Path, tmp_path: Path) -> None:
    """No row is lost or doubled by a failure between two checkpoints, and each value is that of the whole run."""
    broken = make_trainer(tmp_path, fail_at=18)
    with pytest.raises(RuntimeError, match="power cut"):
        broken.train()

    resumed = make_trainer(tmp_path)
    resumed.resume()
    resumed.train()
    resumed.close()

    assert without_times(in_csv(tmp_path)) == pytest.approx(without_times(in_csv(run)))
    assert without_times(in_tensorboard(tmp_path)) == pytest.approx(without_times(in_tensorboard(run)))
