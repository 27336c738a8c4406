"""Define the format of `metrics.jsonl`: one JSON object per line, with scalars or any other event.

    {"mode":"train","step":40,"iter":39,"epoch":0,"loss":0.1234,"lr":0.001}
    {"event":"checkpoint_saved","iter":39,"epoch":0,...,"path":"runs/digits/epoch_1"}

`JSONLWriter` writes it; `eventloop report` and `eventloop watch` read it. JSON has no NaN and no infinities:
they are stored as the strings in `NUMBERS`, and a text equal to one of these strings gets a "~" in front.
This module imports no torch.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import msgspec

FILE_NAME = "metrics.jsonl"
"""The default name of the file."""
RESERVED = frozenset({"event", "mode", "step", "iter", "epoch"})
"""The keys in a line of scalars that are not metrics."""
PREFIX = "scalars/"
"""The prefix of a metric's key if the metric's name is in `RESERVED` or itself begins with the prefix."""
NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The strings that stand for numbers that JSON does not have."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors that decoding a damaged line may raise.

A line may be incomplete, have a flipped bit, be nested too deep, or contain a number of thousands of digits.
"""
LIKE_A_NUMBER = re.compile(r"~*(NaN|-?Infinity)")
"""Matches a text that `to_json_value` must prefix with "~", because a reader would take it for a number."""


def key_of(name: str) -> str:
    """Return the key that a metric of this name has in a line of scalars."""
    return PREFIX + name if is_reserved(name) else name


@lru_cache(1024)
def is_reserved(name: str) -> bool:
    """Return whether a metric of this name needs the prefix; cached, as all lines have the same names."""
    return name in RESERVED or name.startswith(PREFIX)


def name_of(key: str) -> str:
    """Return the name of the metric that has this key; the inverse of `key_of`."""
    return key.removeprefix(PREFIX)


def to_json_value(value: Any) -> Any:
    """Return `value` in JSON's types, with NaN and the infinities as strings.

    A text that equals one of these strings gets a "~" in front.
    """
    match value:
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case str() if LIKE_A_NUMBER.fullmatch(value):
            return "~" + value
        case dict():
            return {key: to_json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json_value(item) for item in value]
    return value


def from_json_value(value: Any) -> Any:
    """Convert a result of `to_json_value` back to its original value; tuples have become lists."""
    match value:
        case str() if LIKE_A_NUMBER.fullmatch(value):
            return NUMBERS[value] if value in NUMBERS else value[1:]
        case dict():
            return {key: from_json_value(item) for key, item in value.items()}
        case list():
            return [from_json_value(item) for item in value]
    return value


def is_torn(line: bytes) -> bool:
    """Return whether a kill or a crash has cut short the last line of a file.

    Such a line is an incomplete JSON object, or the zero bytes that a crash of the machine may leave. A
    complete object without a line feed is not torn: the file may be written by hand. Nor is other text, which
    another program has written.

    Args:
        line: the bytes after the last line feed of the file.
    """
    if line.lstrip(b"\0")[:1] not in (b"", b"{"):
        return False
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError:
        return True
    except RecursionError:  # nested deeper than any line that eventloop writes
        return False
    return False
