"""Call functions that do I/O from the event loop of the server, each on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def call_in_thread(function: Callable[[], T]) -> T:
    """Call a function on a daemon thread, and return its result or raise its error.

    Unlike a thread of a pool, a daemon thread does not delay the end of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        """Pass the result or the error to the awaiting task, on the event loop."""
        if future.done():  # the awaiting task was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        """Call the function on the thread, and have the loop call `finish`."""
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the event loop was closed
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=work, name="eventloop-watch", daemon=True).start()
    return await future
