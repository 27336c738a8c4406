"""An error as accounts and events have it, on one line."""

from __future__ import annotations


def error_text(error: BaseException) -> str:
    """`ValueError: no such name`; of an error without a text the type alone."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
