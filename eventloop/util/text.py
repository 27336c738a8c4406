"""Format errors as text, and define errors that are logged without a traceback."""

from __future__ import annotations


class UnavailableError(ConnectionError):
    """Raised if a subscriber cannot reach something outside the program, such as a server.

    It is logged as one line, a warning without a traceback, because the program's code has no fault.
    """


class StoppedError(TimeoutError):
    """Raised if a delivery is abandoned because its subscriber is closed or cancelled.

    It is logged as one line, a warning without a traceback, because the program's code has no fault.
    """


def error_text(error: BaseException) -> str:
    """Return a text such as "ValueError: no such name"; only the error's type if it has no message."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
