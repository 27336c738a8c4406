"""Texts that UTF-8 has no bytes for: those with a lone surrogate, as each path is that is not UTF-8 itself.

Python has a surrogate for each byte of such a path (`os.fsdecode`). A file of text has none: there it is an escape,
`\\udcff`, as `errors="backslashreplace"` writes it. This module imports no torch.
"""

from __future__ import annotations

from typing import Any


def escaped(text: str) -> str:
    """`text`, with an escape in place of each lone surrogate."""
    return text.encode("utf-8", "backslashreplace").decode()


def without_surrogates(value: Any) -> Any:
    """`value`, with all texts in it escaped: those in mappings, as keys too, in lists, in tuples and in sets."""
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
