"""Convert the value of a writer's argument to a text for `eventloop replay --set NAME=TEXT`, and back.

A text that begins with `{`, `[` or `"` is JSON. Any other text is the value itself.
"""

from __future__ import annotations

import json
from typing import Any

_JSON = ("{", "[", '"')
"""The first characters of a text that is JSON."""


def text_of(value: str | list[Any]) -> str:
    """Return the text for an argument that is a text or a list of plain values.

    Raises:
        TypeError, ValueError: JSON has no form for the value.
    """
    if isinstance(value, str) and not value.startswith(_JSON):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def value_of(text: str) -> Any:
    """Return the argument for a text: the value of JSON, or the text itself.

    Raises:
        ValueError: the text begins like JSON and cannot be read as JSON.
    """
    if not text.startswith(_JSON):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"expected JSON, because it begins with {text[0]}, got {text}: {error}; a text that begins so is "
            "written as a JSON string, in double quotes"
        ) from None
