"""Convert values that msgspec cannot encode, for `JSONLWriter`, `EventLogWriter` and tracker settings."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from eventloop.util.surrogates import without_surrogates

_BINARY = (bytes, bytearray, memoryview, datetime)
"""Types that msgpack encodes itself; in JSON they become strings."""


class NoPlainValue(Exception):
    """Raised for a tensor or array that has several elements, or whose only element cannot be read.

    No text is written in its place, because the text of a large tensor is abbreviated, and because another
    thread may change the elements.
    """


def plain(value: Any) -> Any:
    """Convert a tensor or array of one element to a number, and an object without `item()` to its text.

    Raises:
        NoPlainValue: the value is a tensor or array, and `item()` raises an error.
    """
    item = getattr(value, "item", None)
    if item is None:
        return str(value)
    try:
        return item()
    except Exception as error:
        raise NoPlainValue(str(error)) from error


def encodable(value: Any) -> Any:
    """Convert `value` to lists, mappings, texts and numbers, with escapes for lone surrogates in texts.

    A struct becomes a mapping. An object of a type that msgspec does not know is converted by `plain`.

    Raises:
        NoPlainValue: the value contains a tensor or array that `plain` refuses.
    """
    return without_surrogates(msgspec.to_builtins(value, enc_hook=plain, builtin_types=_BINARY))
