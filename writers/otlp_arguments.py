"""Check the arguments and environment variables of `OpenTelemetryWriter`."""

from __future__ import annotations

import os
import re
from math import inf
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from eventloop.writers.tracker_arguments import check_mapping, refuse_password

_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_OWN_HEADERS = ("content-length", "content-type", "host", "transfer-encoding")
"""The headers that a request of this writer has; a second one would make it wrong."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""The names that HTTP allows, RFC 9110, section 5.6.2."""


def check_protocol() -> None:
    """Refuse another protocol than that of this writer, whose port would not answer.

    Raises:
        ValueError: naming the variable.
    """
    if (protocol := os.environ.get(_PROTOCOL, "").strip()) not in ("", "http/protobuf"):
        raise ValueError(
            f"{_PROTOCOL} must be http/protobuf for OpenTelemetryWriter, got {protocol!r}: unset it, and use "
            "the collector's port for HTTP, usually 4318"
        )


def check_endpoint(endpoint: str, source: str) -> str:
    """Refuse a URL to which no path can be added; the message has no password and no query.

    Args:
        source: the argument or variable with the URL, for the messages.

    Raises:
        ValueError: naming the URL.
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
    """Return whether urllib accepts a URL: it has a host, no user, and no spaces or the like."""
    text = parts.netloc + parts.path
    is_plain = text.isprintable() and " " not in text and parts.path.isascii()
    return is_plain and bool(parts.hostname) and "@" not in parts.netloc


def headers_of_environment() -> dict[str, str]:
    """Return the headers in OTEL_EXPORTER_OTLP_HEADERS: `key=value,key=value`, values as in a URL.

    Raises:
        ValueError: naming the variable.
    """
    text = os.environ.get(_HEADERS, "")
    headers: dict[str, str] = {}
    for number, part in enumerate(text.split(","), start=1):
        key, equals, value = (each.strip() for each in part.partition("="))
        if part.strip() and not (equals and _HEADER_NAME.fullmatch(key)):
            raise ValueError(
                f"{_HEADERS} must be key=value,key=value with keys of letters, digits, - and _, got another "
                f"part {number} of {len(text.split(','))}"  # which may be a key that nobody may see
            )
        headers |= {key: unquote(value)} if equals else {}
    return check_headers(_HEADERS, headers)


def check_headers(source: str, headers: Any) -> dict[str, str]:
    """Check that headers are texts; the messages have no values, which may be keys.

    Args:
        source: the argument or variable with the headers, for the messages.

    Raises:
        TypeError, ValueError: naming the header.
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
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not 0 < timeout < inf:
        raise ValueError(f"timeout must be above 0 seconds and finite, got {timeout}")
    return float(timeout)
