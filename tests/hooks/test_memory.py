"""MemoryHook: memory as metrics."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from eventloop.events import ScalarsLogged, TextLogged
from eventloop.hooks import LoggerHook, MemoryHook
from eventloop.hooks.memory import MIB, resident_bytes
from tests.hooks.conftest import Make, Record
from tests.support.cuda import set_cuda
from tests.support.internals import substitute

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")


def steps(seen: list[ScalarsLogged], name: str) -> list[int]:
    """The steps at which a metric was logged."""
    return [event.step for event in seen if name in event.scalars]


def test_resident_memory_is_put_at_the_interval(make_trainer: Make, record_scalars: Record) -> None:
    """Every `interval` iterations and in the last one, each at its own step."""
    trainer = make_trainer(batches=7, hooks=[MemoryHook(interval=3), LoggerHook(10)])
    seen = record_scalars(trainer)

    trainer.train()

    assert steps(seen, "memory/resident") == [3, 6, 7]


def test_resident_memory_is_that_of_the_process() -> None:
    """Taking 64 MiB and writing to them adds as much."""
    before = resident_bytes()
    with mmap.mmap(-1, 64 * MIB) as block:  # from the system, not from what earlier tests have freed
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        after = resident_bytes()

    assert before is not None
    assert after is not None
    assert after - before > 60 * MIB


@pytest.mark.parametrize(("folder", "expected"), [("/proc/self", {"memory/resident"}), ("/nowhere", set())])
def test_on_the_cpu_there_is_no_device_metric(
    make_trainer: Make,
    record_scalars: Record,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    expected: set[str],
) -> None:
    """The host's memory alone; a system without /proc has none, and the training goes on."""
    substitute(monkeypatch, "memory.STATM", Path(folder, "statm"))
    trainer = make_trainer(hooks=[MemoryHook(interval=1), LoggerHook(1)])
    seen = record_scalars(trainer)

    trainer.train()

    assert {name for event in seen for name in event.scalars if name.startswith("memory")} == expected


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CUDA device with 2 of 4 MiB allocated, 3 of 5 at its peak; returns what it was asked."""
    asked: list[str] = []
    stats = {
        "allocated_bytes.all.current": 2 * MIB,
        "reserved_bytes.all.current": 4 * MIB,
        "allocated_bytes.all.peak": 3 * MIB,
        "reserved_bytes.all.peak": 5 * MIB,
    }

    def answer(name: str, reply: object) -> None:
        def query(device: torch.device) -> object:
            asked.append(f"{name} of {device}")
            return reply

        set_cuda(monkeypatch, **{name: query})

    answer("memory_stats", stats)
    answer("reset_peak_memory_stats", None)
    answer("memory_summary", "| a table |")
    return asked


@pytest.mark.parametrize("reset", [False, True])
def test_memory_of_the_device_is_put(
    make_trainer: Make, record_scalars: Record, device: list[str], reset: bool
) -> None:
    """In MiB; they are started anew only where that is asked for."""
    hook = MemoryHook(interval=2, reset_peak=reset, device="cuda:1")
    trainer = make_trainer(batches=4, hooks=[hook, LoggerHook(2)])
    seen = record_scalars(trainer)

    trainer.train()

    names = ("allocated", "reserved", "max_allocated", "max_reserved")
    put = [(e.step, *(e.scalars[f"memory/{name}"] for name in names)) for e in seen]
    assert put == [(2, 2.0, 4.0, 3.0, 5.0), (4, 2.0, 4.0, 3.0, 5.0)]
    assert device == (["memory_stats of cuda:1"] + ["reset_peak_memory_stats of cuda:1"] * reset) * 2


def test_the_summary_is_logged_at_the_end(make_trainer: Make, device: list[str]) -> None:
    """Once, where it is asked for, as text for every writer."""
    trainer = make_trainer(batches=4, hooks=[MemoryHook(interval=4, device="cuda:1", summary=True)])
    told: list[TextLogged] = []
    trainer.bus.subscribe(told.append, "text_logged", offload="thread", name="told")

    trainer.train()

    assert [(event.name, event.text) for event in told] == [("memory_summary", "\n| a table |")]
    assert device.count("memory_summary of cuda:1") == 1
