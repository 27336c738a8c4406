"""Run the saver's work on a thread that can be abandoned if it hangs.

The saver uses one thread to copy and one to write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class SaverThread:
    """A daemon thread that runs functions in order.

    An executor is not used, because the interpreter's exit joins its threads, and a thread whose disk hangs
    never ends. If no thread can be started, `do` runs the function on the calling thread.
    """

    def __init__(self, name: str) -> None:
        self._todo: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=self._run, name=f"eventloop {name}", daemon=True)
        self._thread: threading.Thread | None = thread
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts no thread once the main thread has ended
            self._thread = None

    def do(self, work: Callable[[], None]) -> None:
        """Let the thread run `work`, which must not raise."""
        if self._thread is None:
            work()
        else:
            self._todo.put(work)

    def end(self, timeout: float | None = None) -> None:
        """Let the thread end after its work; wait for that at most `timeout` seconds."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()
            del work  # it refers to the copy that was written
