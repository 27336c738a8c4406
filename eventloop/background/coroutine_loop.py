"""Run the event loop of a bus, for its coroutine subscribers, on a thread of its own."""

from __future__ import annotations

import asyncio
import logging

import anyio

from eventloop.background.threads import BackgroundThread
from eventloop.util.waiting import Latch

logger = logging.getLogger("eventloop")


class CoroutineLoop:
    """An asyncio event loop on a daemon thread.

    Raises:
        RuntimeError: the thread cannot be started.
    """

    def __init__(self) -> None:
        self._began = Latch()
        self._refusal: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: anyio.Event | None = None
        self.thread = BackgroundThread(target=self._run, name="eventloop coroutines", daemon=True)
        self.thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Wait until the event loop runs, and return it.

        Raises:
            RuntimeError: it could not be started.
        """
        self._began.wait()
        if self._loop is None:
            raise RuntimeError(f"the background loop could not be started: {self._refusal!r}")
        return self._loop

    def _run(self) -> None:
        """Run the event loop until `stop`, and keep the error if it cannot be started."""
        try:
            anyio.run(self._main)
        except BaseException as error:
            if self._loop is None:
                self._refusal = error  # for example, no file descriptor is free
                return
            # asyncio ends a loop if a task, which a subscriber may have created, raises a SystemExit
            logger.error("the event loop of all coroutine subscribers was ended", exc_info=error)
        finally:
            self._began.set()

    async def _main(self) -> None:
        """Run on the loop until `stop`, so that the loop stays open for the tasks of subscribers."""
        self._stop = anyio.Event()
        self._loop = asyncio.get_running_loop()
        self._began.set()
        await self._stop.wait()

    @property
    def ended(self) -> bool:
        """Return whether the event loop has ended."""
        return self._loop is not None and self._loop.is_closed()

    def stop(self) -> None:
        """Cancel the coroutines that still run, and end the thread; safe from any thread."""
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
