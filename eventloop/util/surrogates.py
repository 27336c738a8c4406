"""Escape lone surrogates, which UTF-8 cannot encode.

A path that is not UTF-8 has a surrogate for each such byte (`os.fsdecode`). In a text file it becomes an
escape such as `\\udcff`, as `errors="backslashreplace"` writes it. This module imports no torch.
"""

from __future__ import annotations

from typing import Any


def escaped(text: str) -> str:
    """Return `text` with an escape in place of each lone surrogate."""
    return text.encode("utf-8", "backslashreplace").decode()


def without_surrogates(value: Any) -> Any:
    """Return `value` with all texts in it escaped, also those in lists, tuples, sets and mappings."""
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
