"""Check the arguments and environment variables of `OpenTelemetryWriter`."""

from __future__ import annotations

import os
import re
from math import inf
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from eventloop.writers.tracker_arguments import check_mapping, refuse_password

_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""The environment variable with HTTP headers."""
_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
"""The environment variable with the protocol of the collector."""
_OWN_HEADERS = ("content-length", "content-type", "host", "transfer-encoding")
"""The headers that the writer sets itself; a second one of the same name would make the request invalid."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The names that HTTP allows, RFC 9110, section 5.6.2."""


def check_protocol() -> None:
    """Refuse a protocol in the environment that the writer does not use.

    Raises:
        ValueError: OTEL_EXPORTER_OTLP_PROTOCOL is set to another protocol than http/protobuf.
    """
    if (protocol := os.environ.get(_PROTOCOL, "").strip()) not in ("", "http/protobuf"):
        raise ValueError(
            f"{_PROTOCOL} must be http/protobuf for OpenTelemetryWriter, got {protocol!r}: unset it, and use "
            "the collector's port for HTTP, usually 4318"
        )


def check_endpoint(endpoint: str, source: str) -> str:
    """Return the URL of the collector, after a check that paths such as `/v1/metrics` can be added to it.

    Args:
        endpoint: the URL.
        source: the argument or environment variable that has the URL, for the message.

    Raises:
        ValueError: the URL is not of HTTP, or has such a path, a query, a fragment or a password. The message
            has the URL without password and query.
    """
    refuse_password(source, endpoint, "in headers, or in OTEL_EXPORTER_OTLP_HEADERS")
    expected = f"{source} must be an http or https URL such as http://localhost:4318"
    try:
        parts = urlsplit(endpoint)
        parts.port  # noqa: B018 - it is read to be checked
    except ValueError as error:
        raise ValueError(f"{expected}, got {endpoint!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not _can_be_sent_to(parts):
        raise ValueError(f"{expected}, got {endpoint!r}")
    if parts.path.rstrip("/").endswith(("/v1/metrics", "/v1/traces", "/v1/logs")):
        raise ValueError(
            f"{source} must be the URL of the collector without /v1/metrics and the like, got {endpoint!r}"
        )
    if parts.query or parts.fragment:
        plain = f"{parts.scheme}://{parts.netloc}{parts.path}"
        raise ValueError(
            f"{source} must be a URL without ? and #, got {plain!r} and more: pass a key in headers"
        )
    return endpoint


def _can_be_sent_to(parts: SplitResult) -> bool:
    """Return whether urllib accepts a URL: it has a host, no user, no blank and only printable characters."""
    text = parts.netloc + parts.path
    is_printable = text.isprintable() and " " not in text and parts.path.isascii()
    return is_printable and bool(parts.hostname) and "@" not in parts.netloc


def headers_of_environment() -> dict[str, str]:
    """Return the headers in OTEL_EXPORTER_OTLP_HEADERS: `key=value,key=value`, values escaped as in URLs.

    Raises:
        ValueError: the variable has another form, or a header is wrong.
    """
    parts = os.environ.get(_HEADERS, "").split(",")
    headers: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        key, equals, value = (text.strip() for text in part.partition("="))
        if part.strip() and not (equals and _HEADER_NAME.fullmatch(key)):
            raise ValueError(  # without the text of the part, which may be a secret
                f"{_HEADERS} must be key=value,key=value with keys of letters, digits, - and _, got another "
                f"part {number} of {len(parts)}"
            )
        if equals:
            headers[key] = unquote(value)
    return check_headers(_HEADERS, headers)


def check_headers(source: str, headers: Any) -> dict[str, str]:
    """Return HTTP headers as a dict, after a check of their names and values.

    Args:
        source: the argument or environment variable that has the headers, for the message.
        headers: a mapping of names to values, or None.

    Raises:
        TypeError, ValueError: a name or value is not allowed. The message has the name, and never the value,
            which may be a secret.
    """
    checked: dict[str, str] = check_mapping(source, headers)
    for key, value in checked.items():
        if not _HEADER_NAME.fullmatch(key):
            raise ValueError(f"the names in {source} may have only letters, digits, - and _, got {key!r}")
        if key.lower() in _OWN_HEADERS:
            raise ValueError(f"{source} must not have {key!r}, which the writer sets: leave it out")
        if not isinstance(value, str):
            raise TypeError(f"{source}[{key!r}] must be a str, got {type(value).__name__}")
        if not value.isprintable() or not value.isascii():
            raise ValueError(f"{source}[{key!r}] must be printable ASCII, got other characters")
    return checked


def check_timeout(timeout: Any) -> float:
    """Return a timeout in seconds as a float; raise TypeError or ValueError unless it is above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not 0 < timeout < inf:
        raise ValueError(f"timeout must be above 0 seconds and finite, got {timeout}")
    return float(timeout)
