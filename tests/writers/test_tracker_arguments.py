"""Secrets and arguments in the messages of the writers of experiment trackers."""

from __future__ import annotations

import shlex
from functools import partial
from typing import Any

import numpy as np
import pytest

from eventloop.eventlog.set_values import value_of
from eventloop.writers import CSVWriter, OpenTelemetryWriter
from eventloop.writers.tracker_arguments import masked, secrets_of, secrets_of_headers, set_options
from tests.writers.otlp_collector import is_missing


@pytest.mark.parametrize(
    ("secret", "text", "expected"),
    [
        ("s3cr3t", "401 for as3cr3tb", "401 for a***b"),
        ("k%2Fy0fme", "401 for k/y0fme and k%2Fy0fme", "401 for *** and ***"),
        ("1", "http://127.0.0.1:1 answered 401, Errno 111", "http://127.0.0.1:1 answered 401, Errno 111"),
        ("1", "sent x: 1 and x=1, not x=10 or 10: 11", "sent x: *** and x=***, not x=10 or 10: 11"),
        ("pw.", "no route to http://me:pw.@host:80", "no route to http://me:***@host:80"),
        ("", "401", "401"),
    ],
)
def test_a_secret_is_replaced_and_nothing_else(secret: str, text: str, expected: str) -> None:
    """A short one is replaced as the value of a name and as the password of a URL, a long one everywhere."""
    assert masked(text, [secret]) == expected


@pytest.mark.parametrize(
    "uri", ["http://me:s3cr3t@h?api_key=s3cr3t-99", "http://me:s3cr3t-99@h?api_key=s3cr3t"]
)
def test_a_secret_that_begins_with_another_one_is_replaced_whole(uri: str) -> None:
    """Whichever of them the URI has first, no end of the longer one stays readable."""
    assert "99" not in masked(f"401 for {uri}", secrets_of(uri))


@pytest.mark.parametrize(
    ("header", "answer", "expected"),
    [
        ("Bearer s3cr3tkey99", "401 bad key s3cr3tkey99", "401 bad key ***"),
        ("Bearer s3cr3tkey99", "401 Bearer s3cr3tkey99", "401 ***"),
        ("Basic bWU6czNjcjN0cHc=", "401 bWU6czNjcjN0cHc= is no user", "401 *** is no user"),
        ("Basic bWU6czNjcjN0cHc=", "401 for me with s3cr3tpw", "401 for me with ***"),
        ("Basic no base64", "401 for no base64", "401 for ***"),
        ("s3cr3tkey99", "401 bad key s3cr3tkey99", "401 bad key ***"),
    ],
)
def test_a_key_in_a_header_is_replaced_alone(header: str, answer: str, expected: str) -> None:
    """A server may repeat it without its scheme, or decoded."""
    assert masked(answer, secrets_of_headers({"authorization": header})) == expected


def test_a_writer_is_made_again_by_options_without_its_secrets() -> None:
    """The options are the arguments that are texts, quoted for a shell."""
    if is_missing("opentelemetry.proto"):
        pytest.skip("opentelemetry-proto is not installed: pip install 'torch-eventloop[otlp]'")
    made = partial(
        OpenTelemetryWriter, "http://localhost:4318", headers={"key": "s3cr3t"}, service="my digits"
    )

    options = set_options(made)

    assert options == " --set endpoint=http://localhost:4318 --set 'service=my digits'"
    assert set_options(partial(CSVWriter)) == ""
    assert set_options(made, secret=["service"]) == " --set endpoint=http://localhost:4318"


class Made:
    """Takes any arguments, as a writer of a user may."""

    def __init__(self, value: object, headers: object = None) -> None: ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (("a b", "c"), ["a b", "c"]),
        ([{"lr": 0.1, "note": "it's \u00e4"}, float("inf")], None),
        ("digits", None),
        ("[1] of 2", None),
        ('"quoted"', None),
        ("", None),
    ],
)
def test_an_argument_is_the_same_after_a_shell(value: object, expected: Any) -> None:
    """The shell splits the option, and `--set` reads the argument's value again."""
    options = set_options(partial(Made, value, headers={"key": "s3cr3t"}), secret=["headers"])

    flag, text = shlex.split(options)
    name, _, written = text.partition("=")
    assert (flag, name) == ("--set", "value")
    assert value_of(written) == (value if expected is None else expected)


@pytest.mark.parametrize("value", [3, True, None, print, [np.zeros(3)], {"hf_token": "s3cr3t"}])
def test_an_argument_without_a_form_is_left_out(value: object) -> None:
    """A message about events that were not written never fails by its command, and has no config with a key."""
    assert set_options(partial(Made, value)) == ""
