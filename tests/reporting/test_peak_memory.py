"""The peak memory of a run: of the host and of CUDA devices, in `costs.json`, the summary and the report."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eventloop.costs.records import DeviceMemory, Memory, read_costs
from eventloop.hooks.memory import resident_bytes
from eventloop.model.peak_memory import peak_memory
from eventloop.reporting.facts import facts, memory_text
from eventloop.reporting.report import load_report
from tests.support.cuda import set_cuda
from tests.support.internals import substitute
from tests.support.trainers import MakeTrainer

MIB = 1 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_covers_what_was_held() -> None:
    """It is at least the memory in use while 64 MiB more were held, and stays so once they are free."""
    block = bytearray(b"x") * (64 * MIB)
    in_use = resident_bytes()
    del block

    peak = peak_memory().host

    assert in_use is not None
    assert peak is not None
    assert peak >= in_use - MIB  # the kernel counts pages of a thread in groups


@pytest.mark.parametrize(
    ("status", "platform", "peak"),
    [
        ("VmPeak:\t 9999 kB\nVmHWM:\t    2048 kB\n", "linux", 2 * MIB),
        ("", "linux", 3 * MIB),
        ("", "darwin", 3 * 1024),
    ],
    ids=["Linux", "a Unix without /proc", "macOS"],
)
def test_the_host_s_peak_is_in_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, platform: str, peak: int
) -> None:
    """Linux counts in KiB, per process; elsewhere `ru_maxrss` is in KiB, and in bytes on macOS."""
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=3 * 1024))
    path = tmp_path / "status"
    path.write_text(status)
    substitute(monkeypatch, "peak_memory.STATUS", path if status else tmp_path / "nowhere")
    substitute(monkeypatch, "peak_memory.resource", usage)
    monkeypatch.setattr(sys, "platform", platform)

    assert peak_memory().host == peak


def test_a_system_that_counts_no_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has neither; the record then has no figure, and no report shows one."""
    substitute(monkeypatch, "peak_memory.STATUS", tmp_path / "nowhere")
    substitute(monkeypatch, "peak_memory.resource", None)

    assert peak_memory() == Memory()
    assert memory_text(Memory()) == ""


def test_devices_that_were_used_have_their_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory of this process is left out; no device is waited for or initialized."""
    peaks = {0: (5, 7), 1: (0, 0), 2: (11, 13)}
    set_cuda(
        monkeypatch,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 3,
        max_memory_allocated=lambda index: peaks[index][0],
        max_memory_reserved=lambda index: peaks[index][1],
        synchronize=None,
    )

    assert peak_memory().devices == [DeviceMemory("cuda:0", 5, 7), DeviceMemory("cuda:2", 11, 13)]


def test_a_text_for_people() -> None:
    """Host and devices on one line, in units that fit."""
    memory = Memory(300 * MIB, [DeviceMemory("cuda:0", 3 << 29, 2 << 30)])

    assert memory_text(memory) == "host 300 MiB; cuda:0 1.50 GiB in tensors, 2.00 GiB reserved"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_record_summary_and_report_have_it(make_trainer: MakeTrainer) -> None:
    """`costs.json` in bytes; the summary and the head of the report as one line."""
    trainer = make_trainer()

    trainer.train()

    memory = read_costs(trainer.work_dir).memory
    shown = {fact.name: fact.value for fact in facts(load_report(trainer.work_dir))}
    assert memory.host is not None
    assert memory.host > MIB
    assert shown["peak memory"] == memory_text(memory)
    assert "\npeak memory: host " in trainer.summary()
