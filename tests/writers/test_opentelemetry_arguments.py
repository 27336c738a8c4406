"""OpenTelemetryWriter: wrong arguments and environment variables, and keys that no message shows."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from eventloop.writers import OpenTelemetryWriter
from tests.writers.conftest import Attach, train, write
from tests.writers.otlp_collector import Collector, is_missing, make

if is_missing("opentelemetry.proto"):
    pytest.skip(
        "opentelemetry-proto is not installed, so OpenTelemetryWriter is NOT tested: "
        "pip install 'torch-eventloop[otlp]'",
        allow_module_level=True,
    )


def test_no_secret_is_in_the_writer_s_text(collector: Collector) -> None:
    """A debugger or a report that prints the writer shows no header."""
    assert "s3cr3t" not in repr(make(collector))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {},
            ValueError,
            "OpenTelemetryWriter needs endpoint, got None: pass endpoint=, or set OTEL_EXPORTER_",
        ),
        (
            {"endpoint": "localhost:4318"},
            ValueError,
            "endpoint must be an http or https URL .*'localhost:4318'",
        ),
        (
            {"endpoint": "http://me:pw1@h"},
            ValueError,
            r"endpoint must not contain a password, got http://me:\*\*\*@h",
        ),
        (
            {"endpoint": "http://h/x?api-key=pw1"},
            ValueError,
            r"endpoint must not contain a password, got http://h/x\?api-key=\*\*\*: pass it in headers, or",
        ),
        (
            {"endpoint": "http://h/x?a=pw1"},
            ValueError,
            r"endpoint must be a URL without \? and #, got 'http://h/x' and more: pass a key in headers",
        ),
        ({"endpoint": "http://h:x"}, ValueError, "endpoint must be an http .*, got 'http://h:x': Port could"),
        ({"endpoint": "http://:4318"}, ValueError, "endpoint must be an http .*, got 'http://:4318'"),
        ({"endpoint": "http://me@h"}, ValueError, "endpoint must be an http .*, got 'http://me@h'"),
        ({"endpoint": "http://my h"}, ValueError, "endpoint must be an http .*, got 'http://my h'"),
        ({"endpoint": "http://h/\u00e4"}, ValueError, "endpoint must be an http .*, got 'http://h/\u00e4'"),
        (
            {"endpoint": "http://h/v1/traces/"},
            ValueError,
            "endpoint must be the URL of the collector without /v1/metrics .*, got 'http://h/v1/traces/'",
        ),
        ({"headers": {1: "a"}}, TypeError, "the names in headers must be a str, got 1"),
        ({"headers": "a=b"}, TypeError, "headers must be a mapping of names to values, got str"),
        (
            {"headers": {"a b": "c"}},
            ValueError,
            "the names in headers may have only letters, digits.*, got 'a b'",
        ),
        *(
            (
                {"headers": {key: "x"}},
                ValueError,
                f"headers must not have '{key}', which the writer sets: leave",
            )
            for key in ("Content-Length", "content-type", "HOST", "transfer-encoding")
        ),
        ({"headers": {"key": 3}}, TypeError, r"headers\['key'\] must be a str, got int"),
        ({"headers": {"key": "a\n"}}, ValueError, r"headers\['key'\] must be printable ASCII, got other"),
        ({"timeout": 0}, ValueError, "timeout must be above 0 seconds and finite, got 0"),
        ({"timeout": math.inf}, ValueError, "timeout must be above 0 seconds and finite, got inf"),
        ({"timeout": "1"}, TypeError, "timeout must be a number of seconds, got '1'"),
        ({"service": 1}, TypeError, "service must be a str or None, got int"),
    ],
)
def test_bad_arguments(
    options: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong argument is an error where the writer is made."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    if options and "endpoint" not in options:
        options = {"endpoint": "http://localhost:4318", **options}

    with pytest.raises(error, match=text):
        OpenTelemetryWriter(**options)


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ("s3cr3t", "OTEL_EXPORTER_OTLP_HEADERS must be key=value,key=value .*, got another part 1 of 1"),
        (
            "a=b,s3cr3t c=d",
            "OTEL_EXPORTER_OTLP_HEADERS must be key=value,.* letters, .*, got another part 2 of 2",
        ),
        ("Authorization: Bearer s3cr3t==", "OTEL_EXPORTER_OTLP_HEADERS must be .*, got another part 1 of 1"),
        ("a=b,Host=s3cr3t", "^OTEL_EXPORTER_OTLP_HEADERS must not have 'Host', which the writer sets: leave"),
        ("content-length=s3cr3t", "^OTEL_EXPORTER_OTLP_HEADERS must not have 'content-length', which the"),
        ("a=s3cr3t%0A", r"OTEL_EXPORTER_OTLP_HEADERS\['a'\] must be printable ASCII, got other characters"),
    ],
)
def test_wrong_headers_of_the_environment(
    headers: str, text: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are an error where the writer is made, unless it is given others; the message has no key."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)

    with pytest.raises(ValueError, match=text) as caught:
        OpenTelemetryWriter(collector.url)

    assert "s3cr3t" not in str(caught.value)
    OpenTelemetryWriter(collector.url, headers={})


def test_headers_of_the_environment_are_sent(
    attach: Attach, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is as in a URL, and an empty part is none."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Basic%20cHc=, x-team = a,")

    write(attach(OpenTelemetryWriter(collector.url, offload="thread")), *train(1))

    assert {("authorization", "Basic cHc="), ("x-team", "a")} <= collector.headers[0].items()


def test_a_service_that_is_not_utf8_has_escapes(attach: Attach, collector: Collector) -> None:
    """Its default is the name of the work dir, which may be any bytes."""
    writer = OpenTelemetryWriter(collector.url, service=os.fsdecode(b"caf\xe9"), offload="thread")

    write(attach(writer), *train(1))

    assert collector.points() == [("train/loss", 1, 0.25)]
    (resource,) = (m.resource_metrics[0].resource for m in collector.messages["/v1/metrics"][1:])
    assert resource.attributes[0].value.string_value == "caf\\udce9"


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_password_in_the_environment_is_refused_and_masked(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """urllib would take it for a part of the host, and name it in its error."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{scheme}://me:pw1@h")

    with pytest.raises(
        ValueError,
        match=rf"^OTEL_EXPORTER_OTLP_ENDPOINT must not contain a password, got {scheme}://me:\*\*\*@h: pass it in",
    ):
        OpenTelemetryWriter()


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("localhost", "must be an http or https URL such as http://localhost:4318, got 'localhost'"),
        ("http://h:x", "must be an http or https URL .*, got 'http://h:x': Port could"),
        (
            "http://h/v1/logs",
            "must be the URL of the collector without /v1/metrics .*, got 'http://h/v1/logs'",
        ),
        ("http://h?a=b", r"must be a URL without \? and #, got 'http://h' and more"),
    ],
)
def test_a_wrong_endpoint_of_the_environment(
    endpoint: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the variable."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)

    with pytest.raises(ValueError, match=f"^OTEL_EXPORTER_OTLP_ENDPOINT {text}"):
        OpenTelemetryWriter()


@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
def test_another_protocol_is_refused(
    protocol: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port of another protocol would not answer; the message says what to do."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)

    with pytest.raises(
        ValueError,
        match=f"^OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf .*, got '{protocol}': unset it, and .* 4318",
    ):
        OpenTelemetryWriter()

    OpenTelemetryWriter(collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    OpenTelemetryWriter()
