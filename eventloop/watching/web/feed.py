"""Read the runs once for all open pages, and send each page the sections that have changed.

The feed runs on the server's event loop, and reads the directories on a thread. No messages are queued: a
page that has missed one, because it reads too slowly, gets all sections with the next.
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
    """Make the messages to the pages, from reads of the runs while a page is open.

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
        self._number = 0  # the number of the last message
        self._change = b""  # the last message, for pages that have received the one before
        self._whole = b""  # the last message with all sections; b"" if it has not been made
        self._published = asyncio.Event()  # set, and replaced, when there is a new message
        self._is_fresh = False  # whether the runs were read since the first of the open pages was opened
        self._closed = False

    def begin(self) -> None:
        """Read the runs for the first time, so that the first page need not wait for a long log."""
        self._reading = asyncio.create_task(self._read_while_open())

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield all sections, and then those that have changed, as server-sent events."""
        self._pages += 1
        try:
            if self._reading is None or self._reading.done():
                self._is_fresh = False
                self._reading = asyncio.create_task(self._read_while_open())
            while not (self._is_fresh or self._closed or self._reading.done()):
                await self._published.wait()
            received = -1  # the number of the last message to this page
            while not self._closed:
                if self._reading.done():
                    self._reading.result()  # raises the error that has ended the reading
                published, number = self._published, self._number
                if number != received:
                    follows = received >= 0 and number == received + 1
                    yield self._change if follows else self._all()
                    received = number
                if not self._closed and number == self._number:
                    await published.wait()
        finally:
            self._pages -= 1

    def send(self, request: Request) -> Sent:
        """Send a command to a run. Its answer comes with a later message.

        Raises:
            IndexError: there is no such run.
            Busy: too many commands wait for their answers.
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

    async def _read_while_open(self) -> None:
        """Read the runs and publish the changed sections: once, and again as long as a page is open."""
        try:
            while True:
                readings = await call_in_thread(self._read)
                self._is_fresh = True
                self._publish(
                    [run.update(reading) for run, reading in zip(self._runs, readings, strict=True)], None
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
        if self._is_fresh:  # else no page has received a message yet, and its first one has the commands
            self._publish([{} for _ in self._runs], self._shown_commands())

    def _publish(self, changed: Sequence[Parts], commands: list[Any] | None) -> None:
        """Make a message, and wake the pages that wait for one.

        Args:
            changed: the changed sections of each run.
            commands: the commands to show; None if they have not changed.
        """
        self._change = _message(changed, commands)
        self._whole = b""
        self._number += 1
        self._wake()

    def _all(self) -> bytes:
        """Return a message with all sections, which is made once for all pages that need it."""
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
    """Encode a message as a server-sent event, whose data is JSON without line breaks."""
    content: dict[str, Any] = {"runs": runs, **fields}
    if commands is not None:
        content["commands"] = commands
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
