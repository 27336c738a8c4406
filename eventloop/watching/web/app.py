"""Define the HTTP routes of the live page: its files, its stream of messages, and its commands."""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eventloop.watching.web import sent
from eventloop.watching.web.feed import Feed
from eventloop.watching.web.guard import TOKEN, Guard, check_origin, check_token, refused
from eventloop.watching.web.threads import call_in_thread

LARGEST = 16 * 1024
"""The largest request for a command in bytes."""
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = ("page.css", "page.js", "parts.js", "charts.js", "commands.js")
_decoder = msgspec.json.Decoder(sent.Request)


def make_app(feed: Feed, token: str) -> Guard:
    """Return the application that answers the page's requests."""

    async def messages(request: Request) -> Response:
        """Stream the messages of the page, if the request has the token."""
        if (refusal := check_token(request.query_params.get("token"), token)) is not None:
            return refusal
        return StreamingResponse(
            feed.messages(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def command(request: Request) -> Response:
        """Send a command from the page to the run; the page gets the answer later, as a server-sent event."""
        refusal = check_origin(request) or check_token(request.headers.get(TOKEN), token)
        if refusal is not None:
            return refusal
        try:
            sent_command = feed.send(_decoder.decode(await _body(request)))
            return JSONResponse({"number": sent_command.number}, 202)
        except (msgspec.MsgspecError, UnicodeDecodeError, IndexError, ValueError) as error:
            return refused(400, f"expected a command: {error}")
        except sent.Busy as error:
            return refused(429, str(error))

    routes = [Route(f"/{name}", _page_file) for name in FILES]
    routes += [Route("/", _page_file), Route("/plotly.js", _plotly), Route("/events", messages)]
    return Guard(Starlette(routes=[*routes, Route("/command", command, methods=["POST"])]))


async def _body(request: Request) -> bytes:
    """Return the body of a request.

    Raises:
        ValueError: the body is too large or incomplete, or its content type is not JSON.
    """
    if (kind := request.headers.get("content-type", "")) != "application/json":
        raise ValueError(f"expected the content type application/json, got {kind[:80]!r}")
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > LARGEST:
                raise ValueError(f"expected at most {LARGEST:,} bytes, got more")
    except ClientDisconnect:
        raise ValueError("the request was cut off") from None
    return body


async def _page_file(request: Request) -> Response:
    """Return a file of the page, which a browser must request each time."""
    name = request.url.path.removeprefix("/") or "page.html"
    kind = KINDS[name.rpartition(".")[2]]
    content = await call_in_thread(lambda: _content(name))
    return Response(content, media_type=kind, headers={"cache-control": "no-cache"})


async def _plotly(request: Request) -> Response:
    """Answer with plotly.js. The page requests a version, so a browser loads each version only once."""
    compressed, version = await call_in_thread(compressed_plotly)
    headers = {"cache-control": "private, max-age=31536000, immutable", "vary": "accept-encoding"}
    if request.query_params.get("version") != version:
        headers["cache-control"] = "no-cache"
    if "gzip" not in request.headers.get("accept-encoding", ""):
        content = await call_in_thread(lambda: gzip.decompress(compressed))
    else:
        content, headers["content-encoding"] = compressed, "gzip"
    return Response(content, media_type=KINDS["js"], headers=headers)


@cache
def _content(name: str) -> bytes:
    """Read a file of the page once, and insert the version of plotly."""
    text = (files(__package__) / name).read_text("utf-8")
    if name == "page.html":
        text = text.replace("PLOTLY_VERSION", compressed_plotly()[1])
    return text.encode()


@cache
def compressed_plotly() -> tuple[bytes, str]:
    """Return plotly.js, compressed by gzip, and the version of the Python package plotly, which has it."""
    import plotly
    from plotly.offline import get_plotlyjs

    return gzip.compress(get_plotlyjs().encode(), 1), plotly.__version__
