"""An error as accounts and events have it, on one line."""

from __future__ import annotations


class UnavailableError(ConnectionError):
    """Something outside of the program that a subscriber needs is not there. The text says all there is to say, with what
    to do about it, and is logged as a warning of one line: no line of the program's is at fault."""


def error_text(error: BaseException) -> str:
    """`ValueError: no such name`; of an error without a text the type alone."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
