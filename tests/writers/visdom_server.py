"""A real visdom server for tests, and a way to it that can be cut."""

from __future__ import annotations

import importlib
import json
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

Points = list[tuple[int, float | None]]


class Server:
    """A visdom server in a process of its own. `python -m visdom.server` would first download scripts for browsers."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        program = (  # it would import torch, for a client
            "import sys; sys.modules['torch'] = None; from visdom.server.run_server import main; main()"
        )
        arguments = ["-port", str(port), "-env_path", str(folder), "-bind_local", "-logging_level", "ERROR"]
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if not any("navigate" in line for line in self._process.stdout):  # printed once it listens
            pytest.fail(f"the visdom server did not start: {self._process.communicate()[1]}")

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def client(self, env: str) -> Any:
        """visdom's own client."""
        visdom = importlib.import_module("visdom")
        client = visdom.Visdom(
            port=self.port, env=env, raise_exceptions=True, send=False, use_incoming_socket=False
        )
        client.send = True
        return client

    def windows(self, env: str) -> dict[str, Any]:
        """Every window of an environment, by name."""
        client = self.client(env)
        if env not in client.get_env_list():
            return {}
        windows: dict[str, Any] = json.loads(client.get_window_data())
        client.session.close()
        return windows

    def curve(self, env: str, name: str, mode: str = "train") -> Points:
        """The points of a curve, in the order in which they are drawn."""
        for trace in self.windows(env)[name]["content"]["data"]:
            if trace["name"] == mode:
                return list(zip(trace["x"], trace["y"], strict=True))
        return []


class Relay(socketserver.ThreadingTCPServer):
    """A way to the server that can be cut and mended, on one port."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, server: Server) -> None:
        self.server = server
        self.open: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), _Forward)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self.server_address[1]
        return port

    def cut(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in self.open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Forward(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.server.port)) as up:
            for connection in (up, self.request):
                self.server.open.append(connection)
            back = threading.Thread(target=self.pump, args=(up, self.request), daemon=True)
            back.start()
            self.pump(self.request, up)
            back.join()

    def pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A proxy before the server; `judge` returns the status for one request, given its body, or 0 to pass it on."""

    def __init__(self, server: Server, judge: Callable[[str], int]) -> None:
        self.judge = judge
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, text = proxy.judge(body.decode()), b""
                if not status:
                    up = HTTPConnection("127.0.0.1", server.port)
                    up.request(self.command, self.path, body, dict(self.headers))
                    answer = up.getresponse()
                    status, text = answer.status, answer.read()
                    up.close()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server, for the tests of a module."""
    server = Server(free_port(), tmp_path_factory.mktemp("visdom"))
    yield server
    server.stop()


@pytest.fixture
def env(tmp_path: Path) -> str:
    """The environment of a writer without `env`: the name of the work_dir, which is another in each test."""
    return tmp_path.name
