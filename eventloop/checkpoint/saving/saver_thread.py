"""Run the saver's work on a thread that can be abandoned if it hangs.

The saver uses one thread to copy and one to write.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue


class SaverThread:
    """Run functions one after the other on a daemon thread.

    An executor is not used, because the interpreter's exit waits for an executor's threads, and a thread that
    waits for a hanging disk never ends. If no thread can be started, `do` runs the function itself.

    Args:
        name: the thread's name, after "eventloop ".
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
        """Let the thread run `work`; an error that it raises is printed, and the thread goes on."""
        if self._thread is None:
            work()
        else:
            self._todo.put(work)

    def end(self, timeout: float | None = None) -> None:
        """Let the thread end after its work; wait at most `timeout` seconds; None sets no limit."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                work()
            except BaseException:  # such as one of a logging filter: the saves that follow need this thread
                traceback.print_exc()  # without logging, which may have raised it
            del work  # otherwise the copy that it refers to would stay in memory during the next `get`
