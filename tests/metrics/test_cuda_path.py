"""Getting values off a device: with a fake of CUDA everywhere, with the real one where there is one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.saving.buffers import Buffers
from eventloop.checkpoint.saving.saver import Saver
from eventloop.checkpoint.saving.saver_client import Job
from eventloop.checkpoint.saving.snapshot import ChangedWhileCopiedError
from eventloop.costs.records import read_costs
from eventloop.metrics import EventStorage
from eventloop.metrics.device import HostCopy, PinnedPool
from tests.support.cuda import Device, OnCuda, on_cuda, set_cuda
from tests.support.internals import substitute
from tests.support.saving import begun, nothing_is_small
from tests.support.trainers import DEADLINE, build_trainer

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Odd(OnCuda):
    """One of a layout that PyTorch cannot reshape."""

    def reshape(self, *shape: Any) -> torch.Tensor:
        raise NotImplementedError("reshape is not implemented for this layout")


def test_a_copy_starts_at_once_and_waits_for_nothing(device: Device) -> None:
    """Taking values off a device pins a buffer, copies, and records an event behind the copy; nothing waits."""
    HostCopy([on_cuda(1.0), on_cuda(2.0)], PinnedPool())

    assert device.calls == ["pin", "record on the stream of cuda:0"]


def test_ready_asks_the_event(device: Device) -> None:
    """`ready` asks, and does not wait."""
    copy = HostCopy([on_cuda(1.0)], PinnedPool())
    before = copy.ready()
    device.done = True

    assert (before, copy.ready()) == (False, True)
    assert device.calls[2:] == ["query", "query"]


def test_values_wait_for_the_event(device: Device) -> None:
    """`values` synchronizes with the copy's own event before it reads the buffer."""
    copy = HostCopy([on_cuda(1.0), on_cuda(2.0)], PinnedPool())

    assert copy.values() == [1.0, 2.0]
    assert device.calls[-1] == "synchronize"


def test_values_come_in_the_order_they_were_given(device: Device) -> None:
    """Tensors of several types and devices are copied by kind, and given back in their order."""
    tensors = [
        on_cuda(1),
        torch.tensor(2.0),
        on_cuda(3, torch.int64),
        on_cuda(4),
        torch.tensor(5),
        on_cuda(6, torch.int64),
    ]

    assert HostCopy(tensors, PinnedPool()).values() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert device.calls.count("record on the stream of cuda:0") == 2


def test_pinned_buffers_are_used_again(device: Device) -> None:
    """A buffer goes back to the pool when it was read; the next copy of about that size pins nothing."""
    pool = PinnedPool()
    HostCopy([on_cuda(float(i)) for i in range(5)], pool).values()

    values = HostCopy([on_cuda(float(i)) for i in range(8)], pool).values()

    assert values == [float(i) for i in range(8)]
    assert device.calls.count("pin") == 1


def test_two_copies_under_way_have_two_buffers(device: Device) -> None:
    """A buffer that was not read yet is nobody else's."""
    pool = PinnedPool()
    first, second = HostCopy([on_cuda(1.0)], pool), HostCopy([on_cuda(2.0)], pool)

    assert (first.values(), second.values()) == ([1.0], [2.0])
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


def test_a_packet_read_early_does_not_wait_for_later_ones(device: Device) -> None:
    """Making the events of values that somebody has read already waits for nothing."""
    storage = EventStorage()
    storage.put_scalar("loss", on_cuda(1.0))
    first = storage.collect()
    storage.latest()
    storage.put_scalar("loss", on_cuda(2.0))
    storage.collect()
    device.calls.clear()

    first.events()

    assert device.calls == []


# --- reads on the training thread ---------------------------------------------------------------------------


def reads_of(storage: EventStorage) -> dict[str, int]:
    """How often each function waited for the device."""
    return {read.name: read.calls for read in storage.device_reads.records()}


def test_a_read_that_waits_is_counted_for_the_function_that_reads(device: Device) -> None:
    """Once a call, however many values it reads, with the line; of collected values, and of those that are not."""
    with EventStorage() as storage:

        def watch() -> None:
            storage.latest()

        storage.put_scalars(loss=on_cuda(1.0), score=on_cuda(2.0))
        watch()
        storage.put_scalar("loss", on_cuda(3.0))
        storage.collect()
        watch()

    (read,) = storage.device_reads.records()
    assert (read.name, read.calls) == ("watch", 2)
    assert read.line == f"test_cuda_path.py:{watch.__code__.co_firstlineno + 1}"
    assert read.seconds > 0


def test_every_way_to_read_is_counted(device: Device) -> None:
    """`latest` with medians, `history`, `histories` and the rows that a checkpoint needs."""
    with EventStorage() as storage:
        ways = [
            storage.latest,
            storage.latest_with_smoothing_hint,
            lambda: storage.history("loss"),
            storage.histories,
            storage.read_pending,
        ]
        for read in ways:
            storage.put_scalar("loss", on_cuda(1.0))
            read()

    assert sum(reads_of(storage).values()) == len(ways)


@pytest.mark.parametrize("value", [1.0, torch.tensor(1.0)], ids=["number", "tensor on the CPU"])
def test_a_value_of_the_host_is_no_wait(device: Device, value: Any) -> None:
    """Reading it is not counted."""
    with EventStorage() as storage:
        storage.put_scalar("loss", value)
        storage.latest()

    assert reads_of(storage) == {}


def test_a_value_that_has_arrived_is_no_wait(device: Device) -> None:
    """A copy that is done is only looked up; and a value is read from the device once."""
    with EventStorage() as storage:
        storage.put_scalar("loss", on_cuda(1.0))
        storage.collect()
        device.done = True
        storage.latest()
        storage.latest()

    assert reads_of(storage) == {}


def test_only_reads_of_the_training_thread_in_an_iteration_count(device: Device) -> None:
    """Another thread holds up no step; between iterations and in a validation a wait is no part of one."""
    with EventStorage() as storage:

        def read() -> None:
            storage.put_scalar("loss", on_cuda(1.0))
            storage.latest()

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        storage.in_iteration = False
        read()
        storage.in_iteration, storage.mode = True, "val"
        read()

    assert reads_of(storage) == {}


def test_a_run_records_the_handlers_that_wait(device: Device, tmp_path: Path) -> None:
    """In `costs.json`, under the handler's name; a training that reads nothing records no wait."""

    def trained(*, reading: bool) -> Trainer:
        trainer = build_trainer(
            tmp_path / str(reading),
            train_step=lambda trainer, batch: {
                "loss": trainer.model(batch[0]).sum(),
                "score": on_cuda(1.0),
            },
            max_epochs=2,
        )
        device.done = False
        trainer.bus.subscribe(lambda event: setattr(device, "done", True), "after_train", priority="HIGHEST")
        if reading:

            @trainer.bus.on("after_train_iter", priority=55)
            def show(trainer: Trainer, event: Any) -> None:
                trainer.metrics.latest()

        trainer.train()
        trainer.close()
        return trainer

    quiet, loud = trained(reading=False), trained(reading=True)

    assert read_costs(quiet.work_dir).reads == []
    (read,) = read_costs(loud.work_dir).reads
    assert (read.name, read.calls) == ("show", loud.iter)


# --- checkpoints -------------------------------------------------------------------------------------------

SIDE = "the copies' stream"


def test_a_snapshot_of_a_device_waits_where_it_is_written(device: Device) -> None:
    """`begin` copies into pinned memory and records an event; `wait`, on the writing thread, synchronizes."""
    snapshot = begun({"state_dict": {"a": on_cuda(1.0), "b": on_cuda(2.0)}})
    taken = list(device.calls)
    copy = snapshot.wait()

    assert taken == ["pin", "record on the stream of cuda:0"]
    assert device.calls[2:] == ["synchronize"]
    assert copy["state_dict"] == {"a": 1.0, "b": 2.0}


def test_what_comes_later_is_copied_on_a_stream_of_its_own(device: Device) -> None:
    """It comes after what the device was given so far; its memory is kept until it is read; nobody waits, and no
    thread has anything to do for it."""
    now, later = on_cuda(1.0), on_cuda(2.0)
    snapshot = begun({"state_dict": {"now": now, "later": later}}, {later.data_ptr()})

    assert device.calls == [
        "pin",
        "record on the stream of cuda:0",
        "a stream more",
        f"{SIDE} waits for the stream of cuda:0",
        f"in use by {SIDE}",
        f"record on {SIDE}",
    ]
    assert not snapshot.unfinished
    assert snapshot.wait()["state_dict"] == {"now": 1.0, "later": 2.0}


def test_join_lets_the_device_wait(device: Device) -> None:
    """`join` orders what the device is given from then on after the copy; the thread does not wait."""
    later = on_cuda(2.0)
    snapshot = begun({"state_dict": {"later": later}}, {later.data_ptr()})
    device.calls.clear()
    snapshot.join()

    assert device.calls == [f"the stream of cuda:0 waits for the event of {SIDE}"]


def test_both_copies_are_waited_for_where_they_are_written(device: Device) -> None:
    """`wait` synchronizes with the copy on the stream of the training and with that beside it."""
    now, later = on_cuda(1.0), on_cuda(2.0)
    snapshot = begun({"state_dict": {"now": now, "later": later}}, {later.data_ptr()})
    device.calls.clear()
    snapshot.wait()

    assert device.calls == ["synchronize", "synchronize"]


def test_a_device_has_one_stream_for_copies(device: Device) -> None:
    """The second snapshot uses that of the first, and its memory."""
    buffers, later = Buffers(), on_cuda(2.0)
    for _ in range(2):
        begun({"state_dict": {"later": later}}, {later.data_ptr()}, buffers=buffers)

    assert (device.calls.count("a stream more"), device.calls.count("pin")) == (1, 1)


def test_the_training_thread_never_synchronizes(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Saving, joining and saving once more waits for the device on the copying thread alone."""
    substitute(monkeypatch, "saver.AT_ONCE", 0)
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


def test_a_copy_that_is_begun_again_has_all_tensors(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If CUDA fails while a state is copied into shared memory, the copy into other memory is complete."""
    nothing_is_small(monkeypatch)
    errors, stream = [RuntimeError("CUDA error: out of memory")], cast(Any, torch.cuda.Stream)

    def failing_once(where: torch.device) -> Any:
        if errors:
            raise errors.pop()
        return stream(where)

    def no_runtime() -> None:
        raise RuntimeError("no memory can be registered")

    set_cuda(monkeypatch, Stream=failing_once, cudart=no_runtime)
    saver, weight = Saver(), on_cuda(2.0)
    state = {"state_dict": {"now": on_cuda(1.0), "later": weight}}
    written = saver.save(state, Job(tmp_path / "0"), later=lambda: {weight.data_ptr()})
    saver.join()
    written.result(DEADLINE)
    saver.close()

    assert not errors
    assert load_checkpoint(tmp_path / "0")["state_dict"] == {"now": 1.0, "later": 2.0}


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
    snapshot = begun({"state_dict": {"conj": conj, "neg": neg}})

    assert (conj.is_conj(), neg.is_neg()) == (True, True)
    assert [(t.is_conj(), t.is_neg()) for sources, _ in copied for t in sources] == [(False, False)] * 2
    assert snapshot.wait()["state_dict"] == {"conj": -1j, "neg": -2.0}


def test_another_accelerator_is_copied_at_once(copied: list[tuple[list[torch.Tensor], bool]]) -> None:
    """Its memory is not the host's to read, and it has no events here: it is waited for, whatever may come later."""
    weight = torch.ones(3).as_subclass(Elsewhere)
    snapshot = begun({"state_dict": {"w": weight}}, {weight.data_ptr()})

    assert not snapshot.unfinished
    assert [non_blocking for _, non_blocking in copied] == [False]
    assert snapshot.wait()["state_dict"]["w"].tolist() == [1.0, 1.0, 1.0]


def test_a_change_beside_the_device(device: Device) -> None:
    """Who changes what a device is still copying without `join` is told where the copy is waited for."""
    later = on_cuda(2.0)
    snapshot = begun({"state_dict": {"later": later}}, {later.data_ptr()})
    later.add_(1)
    snapshot.join()

    with pytest.raises(ChangedWhileCopiedError, match="1 tensors of the parameters or of the optimizer's"):
        snapshot.wait()


def test_a_change_after_the_join_is_the_next_step(device: Device) -> None:
    """It does not count, for the device makes it when it has copied."""
    later = on_cuda(2.0)
    snapshot = begun({"state_dict": {"later": later}}, {later.data_ptr()})
    snapshot.join()
    later.add_(1)

    snapshot.wait()


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
    begun({"n": torch.ones(()), "state_dict": {"w": weight}})

    assert entered == [weight]
    assert device.calls[:2] == ["on its device", "pin"]


@needs_cuda
def test_values_of_a_real_device() -> None:
    """On a real device the values are those at the point of the program where the copy was started."""
    tensor = torch.ones((), device="cuda")
    copy = HostCopy([tensor], PinnedPool())
    tensor.add_(1)

    assert copy.values() == [1.0]


@needs_cuda
def test_a_snapshot_of_a_real_device() -> None:
    """On a real device a snapshot is a copy of the state at that point of the program."""
    tensor = torch.ones(3, device="cuda")
    snapshot = begun({"state_dict": {"w": tensor}})
    tensor.add_(1)

    assert snapshot.wait()["state_dict"]["w"].tolist() == [1.0, 1.0, 1.0]
