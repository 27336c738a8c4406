"""Read the runs once for all open pages, and send to each page what it lacks.

The feed lives on the server's event loop; only the directories are read on a thread. A page that does not
read its messages fast enough gets all sections with its next one, so nothing is queued for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eventloop.watching.web.sent import Request, Sent, SentCommands
from eventloop.watching.web.threads import call_in_thread
from eventloop.watching.web.watched import Parts, Reading, WatchedRun


class Feed:
    """The messages to the pages. The runs are read once by `begin`, then only while a page is open.

    Args:
        runs: the runs, in the order in which they are shown.
        directories: their directories, for commands.
        interval: seconds between two reads.
    """

    def __init__(self, runs: Sequence[WatchedRun], directories: list[Path], interval: float) -> None:
        self._runs, self._interval = runs, interval
        self.commands = SentCommands(directories, self._publish_commands)
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: asyncio.Task[None] | None = None
        self._pages = 0
        self._number = 0  # of the last message
        self._change = self._whole = b""
        self._published = asyncio.Event()
        self._is_fresh = False  # whether the runs were read since a page came after a time without any
        self._closed = False

    def begin(self) -> None:
        """Read the runs for the first time, so that the first page need not wait for a long log."""
        self._reading = asyncio.create_task(self._read_on())

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield all sections, and then those that have changed, as server-sent events."""
        self._pages += 1
        try:
            if self._reading is None or self._reading.done():
                self._is_fresh = False
                self._reading = asyncio.create_task(self._read_on())
            while not (self._is_fresh or self._closed or self._reading.done()):
                await self._published.wait()
            received = -1
            while not self._closed:
                if self._reading.done():
                    self._reading.result()  # raises its error
                published, number = self._published, self._number
                if number != received:
                    yield self._change if number == received + 1 > 0 else self._all()
                    received = number
                if not self._closed and number == self._number:
                    await published.wait()
        finally:
            self._pages -= 1

    def send(self, request: Request) -> Sent:
        """Send a command, whose answer comes with a later message.

        Raises:
            IndexError, Busy: as `SentCommands.begin`.
        """
        sent = self.commands.begin(request)
        task = asyncio.create_task(self.commands.finish(request, sent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return sent

    def close(self) -> None:
        """End the messages of all pages."""
        self._closed = True
        for task in (self._reading, *self._tasks):
            if task is not None:
                task.cancel()
        self._wake()

    # --- reading -------------------------------------------------------------------------------------------

    async def _read_on(self) -> None:
        """Read the runs and publish what has changed: once, and on as long as a page is open."""
        try:
            while True:
                readings = await call_in_thread(self._read)
                self._is_fresh = True
                self._publish(
                    [run.update(found) for run, found in zip(self._runs, readings, strict=True)], None
                )
                if self._pages:
                    await asyncio.sleep(self._interval)
                if not self._pages:
                    return
        finally:
            self._wake()

    def _read(self) -> list[Reading | None]:
        return [run.read() for run in self._runs]

    def _publish_commands(self) -> None:
        if self._is_fresh:  # else no page has a message that this could follow
            self._publish([{} for _ in self._runs], self._shown_commands())

    def _publish(self, changed: Sequence[Parts], commands: list[Any] | None) -> None:
        self._change = _message(changed, commands)
        self._whole = b""
        self._number += 1
        self._wake()

    def _all(self) -> bytes:
        if not self._whole:
            self._whole = _message(
                [run.whole() for run in self._runs], self._shown_commands(), interval=self._interval
            )
        return self._whole

    def _shown_commands(self) -> list[Any]:
        return [msgspec.to_builtins(sent) for sent in self.commands.shown]

    def _wake(self) -> None:
        self._published.set()
        self._published = asyncio.Event()


def _message(runs: Sequence[Parts], commands: list[Any] | None, **fields: float) -> bytes:
    """Return a server-sent event; its JSON has no line breaks."""
    content: dict[str, Any] = {"runs": runs, **fields}
    if commands is not None:
        content["commands"] = commands
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
