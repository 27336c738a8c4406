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

    It works only on the thread of the `with` block, not on threads started inside or in background
    subscribers. An asyncio task has the storage of the code that created it.

    Raises:
        RuntimeError: this thread has no storage.
    """
    entered = ENTERED.get()
    # asyncio copies contexts to other threads, and two threads must not put into one storage
    if entered and entered[-1].entered_in == threading.get_ident():
        return entered[-1]
    raise RuntimeError(
        "get_event_storage() found no storage on this thread: call it inside `with EventStorage(start_iter) "
        "as storage:`, or while a Trainer runs; pass the storage to other threads explicitly"
    )


def exit_run(storage: EventStorage, outside: tuple[EventStorage, ...]) -> None:
    """Leave the storage that a run has entered, if this context is the run's; it may be called again.

    Args:
        storage: the storage of the run.
        outside: the storages that were active before the run.
    """
    if ENTERED.get() == (*outside, storage):
        ENTERED.set(outside)
