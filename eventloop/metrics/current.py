"""Find the storage of the innermost `with` block of this thread."""

from __future__ import annotations

import threading

from eventloop.metrics.storage import ENTERED, EventStorage


def get_event_storage() -> EventStorage:
    """Return the storage of the innermost `with` block, or the metrics of the running trainer.

    Use it in code that has no reference to the storage or the trainer:

        class Detector(nn.Module):
            def forward(self, images):
                get_event_storage().put_scalar("num_boxes", boxes.shape[0])

    It works only on the thread of the `with` block, not on threads that are started in the block, nor in
    background subscribers. An asyncio task has the storage of the code that created it.

    Raises:
        RuntimeError: this thread has no storage.
    """
    entered = ENTERED.get()
    # `asyncio.to_thread` copies the context to another thread, which must not put into the storage
    if entered and entered[-1].entered_in == threading.get_ident():
        return entered[-1]
    raise RuntimeError(
        "get_event_storage() found no storage on this thread: call it inside `with EventStorage(start_iter) "
        "as storage:`, or while a Trainer runs; pass the storage to other threads explicitly"
    )


def exit_run(storage: EventStorage, outside: tuple[EventStorage, ...]) -> None:
    """Exit the storage of a run, if the run entered it in this context; else do nothing.

    Args:
        storage: the storage of the run.
        outside: the storages that were active before the run, the innermost last.
    """
    if ENTERED.get() == (*outside, storage):
        ENTERED.set(outside)
