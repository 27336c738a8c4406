"""Write the value of a writer's argument as a text for `eventloop replay --set`, and read it.

A text stands for itself. A value that begins with `{`, `[` or `"` is JSON.
"""

from __future__ import annotations

import json
from typing import Any

_JSON = ("{", "[", '"')


def text_of(value: str | list[Any]) -> str:
    """Return an argument, a text or a list of plain values, as it is written after `--set NAME=`.

    Raises:
        TypeError, ValueError: JSON has no form for the value.
    """
    if isinstance(value, str) and not value.startswith(_JSON):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def value_of(text: str) -> Any:
    """Return the argument that was written after `--set NAME=`: JSON is read, another text stays as it is.

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
