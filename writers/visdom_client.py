"""Read and draw curves on a visdom server, for `VisdomWriter`.

visdom's own client waits forever for a server that hangs, and ignores HTTP errors. This module gives every
request a timeout, and raises HTTP errors.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from eventloop.util.surrogates import escaped

Curve = dict[int, float]
"""The points of a curve: step -> value."""


REFUSALS = (400, 413, 422, 500)
"""The HTTP status codes with which a server, or a proxy before it, refuses one request.

500 is an error of the server while it handles this request. Other errors concern the server or the login.
"""


class RefusedError(Exception):
    """Raised if the server refuses the points of a curve, and would refuse them again.

    Args:
        text: the message.
        too_large: whether the server refuses the number of points in one request, not the points themselves.
    """

    def __init__(self, text: str, *, too_large: bool = False) -> None:
        super().__init__(text)
        self.too_large = too_large


class Panels:
    """Draw curves in one visdom environment: one window per metric name, with one curve per mode.

        panels = Panels("localhost", 8097, env="digits", timeout=5.0)
        panels.append("loss", "train", {10: 0.5, 20: 0.25})

    Lone surrogates in names become escapes. Every method raises ConnectionError if the server does not answer
    within `timeout` seconds or answers with an error, and RefusedError if the server refuses one curve.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        env: str,
        timeout: float,
        base_url: str = "/",
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        visdom = importlib.import_module("visdom")
        server = host if "://" in host else f"http://{host}"
        self.url = f"{server}:{port}{base_url.rstrip('/')}"
        self._command = f"python -m visdom.server -port {port}"
        if base_url.rstrip("/"):
            self._command += f" -base_url {base_url}"
        # send=False: the constructor sends no request and starts no listening thread
        self._client: Any = visdom.Visdom(
            server=server,
            port=port,
            base_url=base_url,
            env=escaped(env),
            raise_exceptions=True,
            send=False,
            use_incoming_socket=False,
        )
        self._client.send = True
        session = importlib.import_module("requests").Session()
        session.request = partial(session.request, timeout=timeout)
        session.hooks["response"].append(self._refuse_errors)
        self._status = 0  # the HTTP status of the last answer; 0 before the answer to a request
        self._client._session = session
        self._credentials = None
        if username is not None:
            hashed = hashlib.sha256((password or "").encode()).hexdigest()  # as visdom's client sends it
            self._credentials = {"username": username, "password": hashed}

    def check(self) -> None:
        """Check that a visdom server answers, and log in if a username was given."""
        try:
            if self._credentials is not None:
                self._client.session.post(self.url, json=self._credentials)
            self._client.get_env_list()
        # requests' errors are OSErrors; ValueError: the reply is not JSON, so it is another kind of server
        except (OSError, ValueError) as error:
            cause = _root_cause(error)
            message = f"no visdom server answers at {self.url}: {_text(cause)}"
            if isinstance(cause, ConnectionRefusedError):  # nothing listens on the port
                message += f"; `{self._command}` starts one there"
            raise ConnectionError(message) from None  # the chain of causes has three tracebacks

    def read(self, name: str, mode: str) -> Curve:
        """Return the points of the curve of a metric and mode on the server; {} if it does not exist."""
        name, mode = escaped(name), escaped(mode)
        with self._request(name):
            if (exists := self._client.win_exists(name)) is None:
                raise ConnectionError(
                    f"the visdom server at {self.url} did not answer whether it has {name!r}"
                )
            window = json.loads(self._client.get_window_data(name)) if exists else {}
        content = window.get("content", {})
        if not isinstance(content, dict):
            raise RefusedError(f"{name!r} is a pane of another kind on the visdom server at {self.url}")
        for trace in content.get("data", ()):
            if trace.get("name") == mode:
                points = zip(trace["x"], trace["y"], strict=True)
                return {int(step): math.nan if value is None else value for step, value in points}
        return {}

    def append(self, name: str, mode: str, points: Curve) -> None:
        """Add points at the end of a curve; a missing window or curve is created."""
        self._draw(name, mode, points, "append")

    def replace(self, name: str, mode: str, points: Curve) -> None:
        """Replace all points of an existing curve."""
        self._draw(name, mode, points, "replace")

    def _draw(self, name: str, mode: str, points: Curve, update: str) -> None:
        """Draw points with one request, or with several if they are too many for one.

        Args:
            name: the metric.
            mode: the mode, such as "train".
            points: the points.
            update: "append" or "replace".
        """
        try:
            self._draw_at_once(escaped(name), escaped(mode), points, update)
        except RefusedError as error:
            if not error.too_large or len(points) < 2:
                raise
            middle, items = len(points) // 2, list(points.items())
            self._draw(name, mode, dict(items[:middle]), update)
            self._draw(name, mode, dict(items[middle:]), "append")

    def _draw_at_once(self, name: str, mode: str, points: Curve, update: str) -> None:
        """Draw points with one request; raise RefusedError or ConnectionError if they were not drawn."""
        # an infinity would make the whole window blank, because JSON has none; NaN is drawn as a gap
        values = [value if math.isfinite(value) else math.nan for value in points.values()]
        with self._request(name):
            reply = self._client.line(
                X=np.array([*points]),
                Y=np.array(values, dtype=np.float64),
                win=name,
                name=mode,
                update=update,
                opts={"title": name, "xlabel": "step", "showlegend": True},
            )
        if reply == "win does not exist":  # the window was closed since `read` or an earlier draw
            raise ConnectionError(f"the visdom server at {self.url} has lost {name!r}")
        if reply != name:
            raise RefusedError(f"the visdom server at {self.url} did not draw {name!r}: {reply}")

    @contextmanager
    def _request(self, name: str) -> Iterator[None]:
        """Raise RefusedError in place of ConnectionError if the server has refused the curve `name`."""
        self._status = 0
        try:
            yield
        except ConnectionError:
            if self._status not in REFUSALS:
                raise
            text = f"the visdom server at {self.url} answered {self._status} for {name!r}"
            raise RefusedError(text, too_large=self._status == 413) from None

    def _refuse_errors(self, response: Any, *args: Any, **kwargs: Any) -> None:
        """Record the status of an answer, and raise an error if it is an HTTP error; a hook of requests."""
        self._status = response.status_code
        response.raise_for_status()


def _root_cause(error: BaseException) -> BaseException:
    """Return the first error in the chain of causes; the errors of visdom and requests only wrap it."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _text(error: BaseException) -> str:
    """Return the text of an error, such as "Connection refused", or the name of its class."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
