"""Getting values off a device, with a fake of CUDA; tests/gpu has the real one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.saving.saver import Saver
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.checkpoint.saving.snapshot import ChangedWhileCopiedError, Packed, Rest, Snapshot
from eventloop.metrics import EventStorage
from eventloop.metrics.device import HostCopy, PinnedPool
from tests.support.trainers import DEADLINE

CUDA = torch.device("cuda", 0)


class OnCuda(torch.Tensor):
    """A tensor of the host that says it is on a CUDA device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class Odd(OnCuda):
    """One of a layout that PyTorch cannot reshape."""

    def reshape(self, *shape: Any) -> torch.Tensor:
        raise NotImplementedError("reshape is not implemented for this layout")


def on_cuda(value: complex, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A number on the fake device."""
    return torch.tensor(value, dtype=dtype).as_subclass(OnCuda)


class Device:
    """What is asked of the fake device, in order; its copies are done when `done` says so."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.done = False
        self.waited: list[str] = []  # the threads that did
        self.current: Any = None


class Stream:
    """A stream of the fake device."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name

    def __str__(self) -> str:
        return self._name

    def wait_stream(self, other: object) -> None:
        """What comes on this stream comes after what is on the other by now."""
        self._device.calls.append(f"{self} waits for {other}")

    def wait_event(self, event: object) -> None:
        """What comes on this stream comes after an event."""
        self._device.calls.append(f"{self} waits for {event}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Put a fake in the place of CUDA's streams, events and page-locked memory."""
    device = Device()
    empty = torch.empty

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking, "who waits for another would keep a CPU busy"
            self._name = "an event"

        def __str__(self) -> str:
            return self._name

        def record(self, stream: object) -> None:
            self._name = f"the event of {stream}"
            device.calls.append(f"record on {stream}")

        def query(self) -> bool:
            device.calls.append("query")
            return device.done

        def synchronize(self) -> None:
            device.calls.append("synchronize")
            device.waited.append(threading.current_thread().name)

    def fake_empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            device.calls.append("pin")
        return empty(*size, **options)

    def side_stream(where: torch.device) -> Stream:
        device.calls.append("a stream more")
        return Stream(device, "the copies' stream")

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        device.current, before = stream, device.current
        yield
        device.current = before

    device.current = Stream(device, "the stream of cuda:0")
    monkeypatch.setattr(torch, "empty", fake_empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", side_stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: device.current)
    monkeypatch.setattr(
        OnCuda,
        "record_stream",
        lambda tensor, stream: device.calls.append(f"in use by {stream}"),
        raising=False,
    )
    return device


def test_a_copy_is_waited_for_where_its_values_are_read(device: Device) -> None:
    """A copy pins a buffer and records an event behind itself; `ready` queries the event, `values` synchronizes."""
    copy = HostCopy([on_cuda(1.0), on_cuda(2.0)], PinnedPool())
    started = list(device.calls)
    before = copy.ready()
    device.done = True

    assert started == ["pin", "record on the stream of cuda:0"]
    assert (before, copy.ready(), copy.values()) == (False, True, [1.0, 2.0])
    assert device.calls[2:] == ["query", "query", "synchronize"]


def test_values_come_in_the_order_they_were_given(device: Device) -> None:
    """Tensors of several types and devices are copied by kind, and returned in their order."""
    tensors = [
        on_cuda(1), torch.tensor(2.0), on_cuda(3, torch.int64), on_cuda(4), torch.tensor(5), on_cuda(6, torch.int64),
    ]  # fmt: skip

    assert HostCopy(tensors, PinnedPool()).values() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert device.calls.count("record on the stream of cuda:0") == 2


def test_pinned_buffers_are_used_again(device: Device) -> None:
    """A buffer that was read serves the next copy of about its size; two copies in progress have two buffers."""
    pool = PinnedPool()
    first, second = HostCopy([on_cuda(1.0)] * 5, pool), HostCopy([on_cuda(2.0)] * 5, pool)
    assert (first.values(), second.values()) == ([1.0] * 5, [2.0] * 5)
    assert device.calls.count("pin") == 2

    assert HostCopy([on_cuda(3.0)] * 8, pool).values() == [3.0] * 8
    assert device.calls.count("pin") == 2


def test_one_copy_for_an_interval(device: Device) -> None:
    """However many values an interval has, they leave the device in one copy."""
    storage = EventStorage()
    for storage.iter in range(10):
        storage.put_scalar("loss", on_cuda(float(storage.iter)))
        storage.put_scalar("score", on_cuda(1.0))
    before = list(device.calls)

    packet = storage.collect()

    assert before == []
    assert not packet.ready()
    assert device.calls == ["pin", "record on the stream of cuda:0", "query"]
    assert packet.events()[0].scalars == {"loss": 4.5, "score": 1.0}  # type: ignore[attr-defined]


def test_a_value_of_a_device_that_cannot_be_read_is_lost_alone(device: Device) -> None:
    """The others are read one by one, once the copies of all are there; nothing is read where it is collected."""
    storage = EventStorage()
    storage.put_scalars({"loss": 1.0, "z": 1.0})
    storage.put_scalars({"loss": on_cuda(3.0), "z": on_cuda(1j, torch.complex64)})
    packet = storage.collect()
    started = list(device.calls)

    assert (repr(packet), repr(storage.collect())) == (
        "Packet(metrics of iterations 0 to 0)",
        "Packet(no metrics)",
    )
    assert packet.events()[0].scalars == {"loss": 2.0, "z": 1.0}  # type: ignore[attr-defined]
    assert storage.unreadable == {"z": 1}
    assert started == ["pin", "record on the stream of cuda:0"] * 2
    assert device.calls[-2:] == ["synchronize", "synchronize"]


def test_what_cannot_be_stacked_on_a_device_fails_no_step(device: Device) -> None:
    """A number of an odd layout under a name that was seen before is collected as the others, and read by itself."""
    storage = EventStorage()
    storage.put_scalars({"loss": 1.0, "z": 1.0})
    storage.put_scalars({"loss": on_cuda(3.0), "z": torch.tensor(3.0).as_subclass(Odd)})
    packet = storage.collect()

    assert packet.events()[0].scalars == {"loss": 2.0, "z": 2.0}  # type: ignore[attr-defined]
    assert device.waited


# --- checkpoints -------------------------------------------------------------------------------------------

SIDE = "the copies' stream"


def rest_of(packed: Packed) -> Rest:
    """What is still to come of a snapshot."""
    assert packed.rest is not None
    return packed.rest


def later_snapshot(later: torch.Tensor, **now: torch.Tensor) -> Packed:
    """A snapshot of `now`, and of `later`, which is not changed before the join."""
    return Snapshot().pack({"state_dict": {**now, "later": later}}, {later.data_ptr()})


def test_a_snapshot_of_a_device_waits_where_it_is_written(device: Device) -> None:
    """`pack` copies into pinned memory and records an event; `wait`, on the writing thread, synchronizes."""
    packed = Snapshot().pack({"state_dict": {"a": on_cuda(1.0), "b": on_cuda(2.0)}})
    taken = list(device.calls)
    rest_of(packed).wait()

    assert taken == ["pin", "record on the stream of cuda:0"]
    assert device.calls[2:] == ["synchronize"]
    assert packed.unpack()["state_dict"] == {"a": 1.0, "b": 2.0}


def test_what_comes_later_is_copied_on_a_stream_of_its_own(device: Device) -> None:
    """The second copy comes after the work that the device has so far; its memory is kept until it is read, and
    neither it nor a thread waits."""
    packed = later_snapshot(on_cuda(2.0), now=on_cuda(1.0))

    assert device.calls == [
        "pin", "record on the stream of cuda:0",
        "a stream more", f"{SIDE} waits for the stream of cuda:0", f"in use by {SIDE}", f"record on {SIDE}",
    ]  # fmt: skip
    assert not rest_of(packed).left
    assert packed.unpack()["state_dict"] == {"now": 1.0, "later": 2.0}


def test_join_lets_the_device_wait(device: Device) -> None:
    """`join` orders later work of the device after the copy, without a wait of the thread; a change after it is the
    next step's. `wait` synchronizes with both copies."""
    later = on_cuda(2.0)
    rest = rest_of(later_snapshot(later, now=on_cuda(1.0)))
    device.calls.clear()
    rest.join()
    joined = list(device.calls)
    later.add_(1)
    rest.wait()

    assert joined == [f"the stream of cuda:0 waits for the event of {SIDE}"]
    assert device.calls[1:] == ["synchronize", "synchronize"]


def test_a_change_beside_the_device(device: Device) -> None:
    """A change before the `join`, of a tensor that the device is still copying, is an error of `wait`."""
    later = on_cuda(2.0)
    rest = rest_of(later_snapshot(later))
    later.add_(1)
    rest.join()

    with pytest.raises(ChangedWhileCopiedError, match="1 tensors of the parameters or of the optimizer's"):
        rest.wait()


def test_the_training_thread_never_synchronizes(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Saving, joining and saving once more waits for the device on the copying thread alone."""
    monkeypatch.setattr("eventloop.checkpoint.saving.saver.AT_ONCE", 0)
    saver = Saver(process=False)
    weight = on_cuda(2.0)
    for number in range(2):
        state = {"state_dict": {"now": on_cuda(1.0), "later": weight}}
        written = saver.save(state, Job(tmp_path / f"{number}"), later=lambda: {weight.data_ptr()})
        saver.join()
        written.result(DEADLINE)
    saver.close()

    assert set(device.waited) == {"eventloop checkpoint copy"}
    assert load_checkpoint(tmp_path / "1")["state_dict"] == {"now": 1.0, "later": 2.0}


class Elsewhere(torch.Tensor):
    """A tensor of the host that says it is on an accelerator that is not CUDA's."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[torch.Tensor], bool]]:
    """The sources of each copy, with whether it may be under way still when it returns."""
    copies: list[tuple[list[torch.Tensor], bool]] = []
    foreach_copy = torch._foreach_copy_

    def copy(views: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool) -> None:
        copies.append((sources, non_blocking))
        foreach_copy(views, sources, non_blocking=non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", copy)
    return copies


def test_what_only_a_flag_conjugates_is_made_so_before_it_leaves_the_device(
    device: Device, copied: list[tuple[list[torch.Tensor], bool]]
) -> None:
    """PyTorch would look at the flag before the numbers have arrived."""
    conj, neg = on_cuda(1j, torch.complex64).conj(), on_cuda(1 + 2j, torch.complex64).conj().imag
    packed = Snapshot().pack({"state_dict": {"conj": conj, "neg": neg}})

    assert (conj.is_conj(), neg.is_neg()) == (True, True)
    assert [(t.is_conj(), t.is_neg()) for sources, _ in copied for t in sources] == [(False, False)] * 2
    assert packed.unpack()["state_dict"] == {"conj": -1j, "neg": -2.0}


def test_another_accelerator_is_copied_at_once(copied: list[tuple[list[torch.Tensor], bool]]) -> None:
    """Its memory is not the host's to read, and it has no events here: it is waited for, whatever may come later."""
    weight = torch.ones(3).as_subclass(Elsewhere)
    packed = Snapshot().pack({"state_dict": {"w": weight}}, {weight.data_ptr()})

    assert not rest_of(packed).left
    assert [non_blocking for _, non_blocking in copied] == [False]
    assert packed.unpack()["state_dict"]["w"].tolist() == [1.0, 1.0, 1.0]


def test_memory_is_pinned_on_a_device_of_the_state(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current one, where the training may have nothing."""
    entered: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        device.calls.append("on its device")
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    weight = on_cuda(2.0)
    Snapshot().pack({"n": torch.ones(()), "state_dict": {"w": weight}})

    assert entered == [weight]
    assert device.calls[:2] == ["on its device", "pin"]
