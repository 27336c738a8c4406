"""A fake of CUDA: tensors that say they are on a device, and streams and events that note what is asked of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

CUDA = torch.device("cuda", 0)


def set_cuda(monkeypatch: pytest.MonkeyPatch, **functions: object) -> None:
    """Replace functions of `torch.cuda` for one test: `set_cuda(monkeypatch, is_available=lambda: True)`."""
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)


class OnCuda(torch.Tensor):
    """A tensor of the host that says it is on a CUDA device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


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
    current = lambda where: device.current
    set_cuda(monkeypatch, Event=Event, Stream=side_stream, stream=on_stream, current_stream=current)
    monkeypatch.setattr(
        OnCuda,
        "record_stream",
        lambda tensor, stream: device.calls.append(f"in use by {stream}"),
        raising=False,
    )
    return device
