"""Format an error as one line, for reports and events."""

from __future__ import annotations


class UnavailableError(ConnectionError):
    """Raised when a subscriber needs something outside the program, such as a server, that is missing.

    The error is logged as a warning of one line without a traceback, because no line of the program is wrong.
    """


class StoppedError(TimeoutError):
    """Raised in place of a delivery that was cut short because its subscriber was closed or cancelled.

    It is logged as a warning of one line without a traceback, because no line of the program is wrong.
    """


def error_text(error: BaseException) -> str:
    """Return an error as a text such as "ValueError: no such name", or only its type if it has no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
