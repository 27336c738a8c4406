"""Escape lone surrogates, which UTF-8 cannot encode.

If a path is not valid UTF-8, its str has a lone surrogate for each byte that cannot be decoded
(`os.fsdecode`). This module replaces the surrogates by escapes such as `\\udcff`, as
`errors="backslashreplace"` does. It imports no torch.
"""

from __future__ import annotations

from typing import Any


def escaped(text: str) -> str:
    """Return `text` with an escape in place of each lone surrogate."""
    return text.encode("utf-8", "backslashreplace").decode()


def without_surrogates(value: Any) -> Any:
    """Return a copy of `value`, a text or a nested container, with escapes in place of lone surrogates.

    The containers are lists, tuples, sets and mappings, whose keys are escaped too.
    """
    match value:
        case str():
            return escaped(value)
        case dict():
            return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
        case list():
            return [without_surrogates(item) for item in value]
        case tuple():
            return tuple(without_surrogates(item) for item in value)
        case set() | frozenset():
            return {without_surrogates(item) for item in value}
    return value
