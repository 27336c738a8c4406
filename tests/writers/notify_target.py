"""A web server that receives the messages of `NotifyWriter`, as the service `json://` of apprise sends them."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.conftest import DEADLINE

KEY = "s3cr3tk3y0fth3addr3ss"
PASSWORD = "s3cr3tp4ssw0rd"


class Target:
    """Keep the messages that come; `status` is the answer, and None answers nothing before `release`."""

    def __init__(self, status: int | None = 200) -> None:
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = status
        self._came = threading.Condition()
        self._released = threading.Event()
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with target._came:
                    target.messages.append(body)
                    target.paths.append(self.path)
                    target._came.notify_all()
                if target.status is None:
                    target._released.wait()
                try:
                    self.send_response(target.status or 200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                except OSError:  # the writer no longer waits
                    pass

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        """The address with two secrets, and a time limit of its own that no test reaches."""
        port = self._server.server_address[1]
        return f"json://me:{PASSWORD}@127.0.0.1:{port}/{KEY}/?rto=3600&cto=3600"

    @property
    def titles(self) -> list[str]:
        """The titles of the messages so far."""
        return [message["title"] for message in self.messages]

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many messages, and return all."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.messages) >= count, DEADLINE), self.titles
            return list(self.messages)

    def release(self) -> None:
        """Answer the requests that wait."""
        self._released.set()

    def close(self) -> None:
        """End the server."""
        self.release()
        self._server.shutdown()
        self._server.server_close()
