"""Test the copies of a state: they are of one moment, in buffers that are used again."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eventloop.checkpoint.saving.buffers import Buffer, Buffers, pin
from eventloop.checkpoint.saving.snapshot import ChangedWhileCopiedError, Snapshot
from tests.support.saving import begun
from tests.support.trainers import DEADLINE

needs_shared_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")
OLD, NEW = {"state_dict": {"w": torch.zeros(3)}}, {"state_dict": {"w": torch.ones(3)}}


def sparse(layout: torch.layout) -> torch.Tensor:
    """Return a diagonal matrix in a sparse layout."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        made = torch.eye(4).to_sparse(layout=layout)
    return made.coalesce() if made.is_sparse else made


def pointers(state: dict[str, Any]) -> set[int]:
    """Return the addresses of the storages of a state's tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in state["state_dict"].values()}


def test_a_snapshot_is_a_copy() -> None:
    """Later changes in place do not change the snapshot, whose tensors have no gradients."""
    weight = torch.nn.Parameter(torch.zeros(3))
    live: dict[str, Any] = {
        "state_dict": {"w": weight},
        "nested": [{"n": 1, "t": (torch.ones(()), None, {1, 2})}],
        "odd": torch.device("cpu"),
    }

    snapshot = begun(live)
    weight.data.add_(1)
    taken = snapshot.wait()

    assert torch.equal(taken["state_dict"]["w"], torch.zeros(3))
    assert not taken["state_dict"]["w"].requires_grad
    assert taken["nested"] == [{"n": 1, "t": (torch.ones(()), None, {1, 2})}]
    assert taken["odd"] == torch.device("cpu")


def test_a_snapshot_reuses_its_buffers() -> None:
    """The second snapshot of a state is in the memory of the first one."""
    buffers = Buffers()
    first = pointers(begun(OLD, buffers=buffers).wait())

    second = begun(NEW, buffers=buffers).wait()

    assert pointers(second) == first
    assert torch.equal(second["state_dict"]["w"], torch.ones(3))


@pytest.mark.parametrize("changed", [torch.ones(2, 2), torch.ones(3, dtype=torch.float64)])
def test_a_snapshot_of_another_shape(changed: torch.Tensor) -> None:
    """A state with other shapes or types gets new buffers."""
    buffers = Buffers()
    begun(OLD, buffers=buffers)

    taken = begun({"state_dict": {"w": changed}}, buffers=buffers).wait()["state_dict"]["w"]

    assert torch.equal(taken, changed)
    assert taken.dtype == changed.dtype


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_copied(layout: torch.layout) -> None:
    """A sparse tensor, which fits no buffer, is copied by itself."""
    weight = sparse(layout)
    taken = begun({"state_dict": {"s": weight, "w": torch.ones(3)}}).wait()["state_dict"]

    weight.values().zero_()

    assert taken["s"].layout is layout
    assert torch.equal(taken["s"].to_dense(), torch.eye(4))
    assert torch.equal(taken["w"], torch.ones(3))


# --- what comes later --------------------------------------------------------------------------------------


def late(weight: torch.Tensor, at_once: torch.Tensor) -> Snapshot:
    """Return a snapshot whose weight is still to be copied."""
    return begun({"state_dict": {"w": weight, "n": at_once}}, {weight.data_ptr()})


def test_what_comes_later_is_copied_by_copy() -> None:
    """`copy` copies the late tensors; all others are copied when `begin` returns."""
    weight, at_once = torch.ones(3), torch.ones(3)
    snapshot = late(weight, at_once)
    at_once.add_(1)
    before = snapshot.unfinished
    snapshot.copy()

    assert (before, snapshot.unfinished) == (True, False)
    assert [t.tolist() for t in snapshot.wait()["state_dict"].values()] == [[1.0] * 3] * 2


def test_a_detached_view_is_the_parameter() -> None:
    """Tensors of a state dict are found by address, and their changes by the parameter's version."""
    parameter = torch.nn.Parameter(torch.ones(3))
    snapshot = begun({"state_dict": {"w": parameter.detach()}}, {parameter.data_ptr()})
    with torch.no_grad():
        parameter.add_(1)

    snapshot.copy()
    with pytest.raises(ChangedWhileCopiedError, match="1 tensors of the parameters"):
        snapshot.wait()


@pytest.mark.parametrize("wait", ["join", "wait"])
def test_waiting_for_the_copy(wait: str) -> None:
    """`join` and `wait` return after `copy`."""
    snapshot = late(torch.ones(3), torch.ones(3))
    order: list[str] = []

    def waits() -> None:
        getattr(snapshot, wait)()
        order.append("waited")

    thread = threading.Thread(target=waits)
    thread.start()
    order.append("copy")
    snapshot.copy()
    thread.join(DEADLINE)

    assert order == ["copy", "waited"]


def test_a_change_meanwhile() -> None:
    """A tensor that changed before `join` makes `wait` raise with advice; `join` then returns."""
    weight = torch.ones(3)
    snapshot = late(weight, torch.ones(3))
    weight.add_(1)
    snapshot.copy()

    with pytest.raises(
        ChangedWhileCopiedError,
        match=r"1 tensors of .* were changed while they were copied, .*: change them in a handler that "
        r"runs before CheckpointHook, or use CheckpointHook\(overlap=False\)",
    ):
        snapshot.wait()
    snapshot.join()


# --- tensors of odd kinds ----------------------------------------------------------------------------------


def test_tied_tensors_are_copied_once() -> None:
    """Equal tensors under several names are copied once; other views of the same memory are copied
    separately."""
    weight = torch.arange(6.0).view(2, 3)
    state = {"state_dict": {"a": weight, "tied": weight.detach()}, "hooks": [weight, weight.t(), weight[0]]}
    taken = begun(state).wait()
    first, *views = taken["hooks"]

    assert len({first.data_ptr(), *(view.data_ptr() for view in views)}) == 3
    assert taken["state_dict"]["tied"].data_ptr() == taken["state_dict"]["a"].data_ptr() == first.data_ptr()
    assert [t.tolist() for t in views] == [weight.t().tolist(), [0.0, 1.0, 2.0]]


def test_empty_tensors_are_no_tied_ones() -> None:
    """Empty tensors keep their own shapes and types, although they have no address."""
    empty = {"a": torch.empty(0), "b": torch.empty(0, 2), "c": torch.empty(0, dtype=torch.int64)}

    assert {key: (t.shape, t.dtype) for key, t in begun(empty).wait().items()} == {
        key: (t.shape, t.dtype) for key, t in empty.items()
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
    ids=["quantized", "meta", "nested"],
)
def test_what_fits_no_flat_memory_is_copied_beside(make: Callable[[], torch.Tensor]) -> None:
    """Quantized, meta and nested tensors, which fit no buffer, are copied by themselves."""
    odd = make()
    taken = begun({"w": torch.ones(2), "odd": odd}).wait()

    assert type(taken["odd"]) is type(odd)
    assert taken["odd"] is not odd
    assert (taken["odd"].is_quantized, taken["odd"].is_meta, taken["odd"].is_nested) == (
        odd.is_quantized,
        odd.is_meta,
        odd.is_nested,
    )


# --- memory ------------------------------------------------------------------------------------------------


@needs_shared_memory
def test_another_process_reads_the_memory_by_its_path() -> None:
    """The path of shared memory gives its present bytes; empty buffers are not listed."""
    buffers = Buffers(shared=True)
    for value in (0.0, 1.0):
        begun({"a": torch.full((2,), value), "none": torch.empty(0)}, buffers=buffers)
    memories = buffers.memory()
    assert memories is not None
    (memory,) = memories.values()
    with memory.open() as seen:
        assert list(seen.cast("f")) == [1.0, 1.0]


@needs_shared_memory
def test_memory_is_given_back() -> None:
    """A buffer's file is closed when the buffer is deleted."""
    buffer = Buffer(1000, torch.float32, shared=True)
    number = buffer._file
    assert number is not None
    os.fstat(number)
    del buffer

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


class FakeRuntime:
    """The part of CUDA's runtime that pins memory."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls: list[str] = []

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.calls.append(f"register {size}")
        return self.error

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append("unregister")
        return 0


@needs_shared_memory
def test_shared_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory is registered with CUDA when it is mapped, and unregistered when it is deleted, except in
    a forked process."""
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    forked = Buffer(9, torch.float32, pinned=True, shared=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        del forked
    buffer = Buffer(10, torch.float32, pinned=True, shared=True)

    assert buffer.shared
    del buffer
    assert runtime.calls == ["register 36", "register 40", "unregister"]


def no_runtime() -> None:
    """Raise the error of a machine without CUDA."""
    raise RuntimeError("no CUDA here")


@pytest.mark.parametrize(
    ("runtime", "why"),
    [(lambda: FakeRuntime(2), "CUDA error 2"), (no_runtime, "no CUDA here")],
    ids=["refused", "no CUDA"],
)
def test_memory_that_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runtime: Any, why: str
) -> None:
    """The log says why memory cannot be pinned; after a CUDA error a kernel is run that consumes the
    error."""
    launched: list[str] = []

    def launch(size: int, *, device: str) -> torch.Tensor:
        launched.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.cuda, "cudart", runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "ones", launch)

    with caplog.at_level(logging.WARNING):
        assert not pin(torch.zeros(3))
    assert f"the memory for checkpoints could not be pinned: {why}" in caplog.text
    assert launched == (["cuda"] if why == "CUDA error 2" else [])


@needs_shared_memory
def test_shared_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """If shared memory cannot be pinned, the buffer is pinned and not shared."""
    asked: list[bool] = []
    empty = torch.empty

    def fake_empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(2))
    monkeypatch.setattr(torch, "empty", fake_empty)

    assert not Buffer(10, torch.float32, pinned=True, shared=True).shared
    assert asked[-1]
