"""`eventloop watch --web` in a process of its own, and requests to it that a browser would not send."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.cli.conftest import ENVIRONMENT
from tests.watching.conftest import DEADLINE


class Answered(NamedTuple):
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


class PageServer:
    """The command, which serves until it is ended."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "eventloop", "watch", *map(str, arguments)],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise AssertionError(self.process.communicate()[1])
        parts = urlsplit(self.url)
        assert parts.port is not None
        self.port, self.token = parts.port, parts.fragment.removeprefix("token=")
        self.origin = f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answered:
        """Send a request, with `_` for `-` in the names of headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Answered(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def command(self, request: object, **headers: str) -> Answered:
        """Send a command as the page does, but with some headers changed."""
        own = {"Content_Type": "application/json", "Origin": self.origin, "X_Eventloop_Token": self.token}
        return self.request("POST", "/command", json.dumps(request).encode(), **own | headers)

    @contextmanager
    def messages(self) -> Iterator[Iterator[dict[str, Any]]]:
        """Open a page, and return the messages that it gets."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        connection.request("GET", f"/events?token={self.token}")
        answer = connection.getresponse()
        assert answer.status == 200
        try:
            yield (json.loads(line[len(b"data: ") :]) for line in answer if line.startswith(b"data: "))
        finally:
            answer.close()
            connection.close()

    def message(self, ready: Callable[[dict[str, Any]], object] = bool) -> dict[str, Any]:
        """Return the first message of a page that is as expected."""
        with self.messages() as messages:
            return next(message for message in messages if ready(message))

    def interrupt(self) -> tuple[int, str]:
        """End it as Ctrl-C does; return its exit code and what it wrote on standard error."""
        self.process.send_signal(signal.SIGINT)
        errors = self.process.communicate(timeout=DEADLINE)[1]
        return self.process.returncode, errors


@contextmanager
def page_server(*runs: Path, interval: float = 0.1, options: tuple[object, ...] = ()) -> Iterator[PageServer]:
    """A server of runs on a free port."""
    server = PageServer(*runs, "--interval", interval, *options, "--web")
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()
