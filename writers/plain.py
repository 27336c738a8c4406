"""Convert values that msgspec cannot encode, for the files of `JSONLWriter` and `EventLogWriter`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from eventloop.util.surrogates import without_surrogates

_BINARY = (bytes, bytearray, memoryview, datetime)
"""Types that msgpack encodes itself; in JSON they become strings."""


class NoPlainValue(Exception):
    """Report a tensor or array that is not a single readable number.

    The text of such a value would be abbreviated, and another thread may be changing its elements.
    """


def plain(value: Any) -> Any:
    """Convert a numpy scalar or a tensor of one element to a number, and any other value to its text."""
    item = getattr(value, "item", None)
    if item is None:
        return str(value)
    try:
        return item()
    except Exception as error:
        raise NoPlainValue(str(error)) from error


def encodable(value: Any) -> Any:
    """Replace the lone surrogates in `value` by escapes, so that it can be encoded.

    Objects become mappings, or the result of `plain`.

    Raises:
        NoPlainValue: the value contains a tensor or array that is not one readable number.
    """
    return without_surrogates(msgspec.to_builtins(value, enc_hook=plain, builtin_types=_BINARY))
