"""Format an error as one line, for accounts and events."""

from __future__ import annotations


class UnavailableError(ConnectionError):
    """Raised when something outside the program is missing that a subscriber needs, such as a server.

    The text is logged as a warning of one line, without a traceback: no line of the program is wrong.
    """


def error_text(error: BaseException) -> str:
    """Return "ValueError: no such name", or only the type if the error has no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
