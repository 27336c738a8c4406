"""Run the HTTP server of the live page until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from eventloop.reporting.facts import RUN_COLOURS, labels_of
from eventloop.reporting.page.html import check_plotly
from eventloop.watching.liveness import HUNG_SECONDS
from eventloop.watching.reader import RunReader
from eventloop.watching.web.app import compressed_plotly, make_app
from eventloop.watching.web.feed import Feed
from eventloop.watching.web.threads import call_in_thread
from eventloop.watching.web.watched import WatchedRun

ADDRESS = "127.0.0.1"
POINTS = 800
"""The largest number of points of a curve; a chart is about 600 pixels wide."""
CURVES = 200
"""The largest number of curves of a run, which bounds the memory of the server and of the page."""
CONNECTIONS = 128
"""The largest number of connections at a time."""
GRACE_SECONDS = 1
"""Seconds for which the server waits at its end for connections whose browser does not read its messages."""


def serve(
    runs: Sequence[str],
    port: int,
    announce: Callable[[str], object],
    *,
    metrics: Sequence[str] | None = None,
    interval: float = 1.0,
    hung_seconds: float = HUNG_SECONDS,
) -> None:
    """Serve a page that shows runs and sends them commands, on this machine alone, until a signal comes.

    Args:
        runs: the directories of the runs.
        port: the port of 127.0.0.1; 0 for a free one.
        announce: called with the address of the page, which has a token, once the server listens.
        metrics: names or patterns of the scalars that have curves, as for `RunReader`; None for all scalars.
        interval: seconds between two reads of the directories while a page is open.
        hung_seconds: as for `RunReader`.

    Raises:
        ImportError: plotly is not installed.
        OSError, ValueError: the port cannot be used, or a directory is not a run's.
    """
    check_plotly()
    readers = [
        RunReader(
            run,
            metrics=["*"] if metrics is None else metrics,
            points=POINTS,
            curves=CURVES,
            hung_seconds=hung_seconds,
        )
        for run in runs
    ]
    watched = [
        WatchedRun(reader, name, RUN_COLOURS[number % len(RUN_COLOURS)])
        for number, (reader, name) in enumerate(zip(readers, labels_of(runs), strict=True))
    ]
    feed, token = Feed(watched, [Path(run) for run in runs], interval), secrets.token_urlsafe(24)
    with _listen(port) as listener:
        announce(f"http://{ADDRESS}:{listener.getsockname()[1]}/#token={token}")
        config = uvicorn.Config(
            make_app(feed, token),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        _Server(config, feed).run([listener])


class _Server(uvicorn.Server):
    """Read the runs and compress plotly.js when the server starts, and close the feed when it ends."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed
        self._compressing: asyncio.Task[object] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._feed.begin()
        self._compressing = asyncio.create_task(call_in_thread(compressed_plotly))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        await super().shutdown(sockets)


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine.

    Raises:
        OSError: the port is taken, or this user may not use it.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        hint = ": give another one, or none" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise OSError(f"port {port} of {ADDRESS} cannot be used ({error.strerror}){hint}") from error
    return listener
