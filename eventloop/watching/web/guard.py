"""Refuse requests that do not come from the page itself, and add the headers that protect it.

Any web site in a browser may send requests to 127.0.0.1, and any user of the machine may connect to it. So
the `Host` header of a request must name this machine, which refuses sites whose DNS name was changed to
127.0.0.1. A command must have the origin of this page. Reading a run and sending a command need the token.
"""

from __future__ import annotations

import hmac
import re

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""The accepted `Host` headers. Any port is accepted, because an SSH tunnel may use another one."""
TOKEN = "x-eventloop-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy; styles may be inline, because plotly.js sets styles of elements."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """Check the host of each request, and add `HEADERS` to each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an HTTP request on to the application, or refuse it because of its host."""
        if scope["type"] != "http":
            return
        host = Request(scope).headers.get("host", "")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app
        if HOST.fullmatch(host) is None:
            app = refused(403, f"expected the host 127.0.0.1 or localhost, got {host[:80]!r}")
        await app(scope, receive, send_with_headers)


def refused(status: int, reason: str) -> Response:
    """Return the response to a refused request: JSON with the reason."""
    return JSONResponse({"error": reason}, status)


def check_token(given: str | None, token: str) -> Response | None:
    """Return None if the token is the right one, else the response that refuses the request."""
    if given is not None and hmac.compare_digest(given.encode(), token.encode()):
        return None
    got = "none" if given is None else "another one"
    return refused(
        403, f"expected the token of the address that eventloop watch has printed, got {got}: open it again"
    )


def check_origin(request: Request) -> Response | None:
    """Return None if the page itself has sent the request, else the response that refuses the request."""
    origin, own = request.headers.get("origin"), f"http://{request.headers['host']}"
    if origin is not None and origin.lower() == own.lower():
        return None
    return refused(403, f"expected the origin {own}, got {'none' if origin is None else repr(origin[:80])}")
