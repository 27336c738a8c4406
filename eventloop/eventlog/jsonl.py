"""Define the format of `metrics.jsonl`: one JSON object per line, with scalars or any other event.

    {"mode":"train","step":40,"iter":39,"epoch":0,"loss":0.1234,"lr":0.001}
    {"event":"checkpoint_saved","iter":39,"epoch":0,...,"path":"runs/digits/epoch_1"}

JSONLWriter writes it, and the report reads it. JSON has no NaN and no infinities: they are stored as the
strings in `NUMBERS`, and a text equal to one of these strings gets a "~" in front. This module imports no
torch.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import msgspec

FILE_NAME = "metrics.jsonl"
RESERVED = frozenset({"event", "mode", "step", "iter", "epoch"})
"""The keys in a line of scalars that are not metrics."""
PREFIX = "scalars/"
"""The prefix of a metric whose name is reserved, or begins with the prefix, so that names stay distinct."""
NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""The errors of a decoder on a bad line.

It may be torn, have a flipped bit, be nested too deep, or contain a number with thousands of digits.
"""
LIKE_A_NUMBER = re.compile(r"~*(NaN|-?Infinity)")


def key_of(name: str) -> str:
    """Return the key of a metric in a line of scalars."""
    return PREFIX + name if is_reserved(name) else name


@lru_cache(1024)
def is_reserved(name: str) -> bool:
    """Return whether a metric needs another key. It is cached, because each line has the same names."""
    return name in RESERVED or name.startswith(PREFIX)


def name_of(key: str) -> str:
    """Return the metric's name for a key; the inverse of `key_of`."""
    return key.removeprefix(PREFIX)


def marked(value: Any) -> Any:
    """Return `value` in JSON's types: non-finite floats become texts, and equal texts get a "~" in front."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case str() if LIKE_A_NUMBER.fullmatch(value):
            return "~" + value
        case dict():
            return {key: marked(item) for key, item in value.items()}
        case list() | tuple():
            return [marked(item) for item in value]
    return value


def unmarked(value: Any) -> Any:
    """Return the original of a value that `marked` returned, except that tuples come back as lists."""
    match value:
        case str() if LIKE_A_NUMBER.fullmatch(value):
            return NUMBERS[value] if value in NUMBERS else value[1:]
        case dict():
            return {key: unmarked(item) for key, item in value.items()}
        case list():
            return [unmarked(item) for item in value]
    return value


def is_torn(line: bytes) -> bool:
    """Return whether the last line, which has no line feed, was cut short by a kill or a crash.

    A torn line is the beginning of a JSON object, or zeros that a crash of the machine leaves. A complete
    object is not torn, because a file made by hand may lack the last line feed; nor is a text of another
    program.

    Args:
        line: the bytes after the last line feed.
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
