"""Send what a worker process logs by the logger "eventloop" to the program, which logs it.

So the handlers, levels and filters of the program apply to the warnings of a writer with `offload="process"`,
as they do to those of a writer on a thread. The worker prints these records only when the program is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from traceback import print_exc
from types import TracebackType
from typing import Self

import msgspec

from eventloop.util.surrogates import escaped

logger = logging.getLogger("eventloop")


class _Record(msgspec.Struct, frozen=True):
    """An encoded log record."""

    level: int
    message: str
    traceback: str
    path: str
    line: int
    function: str


class LogForwarder(logging.Handler):
    """Inside the block, pass the records of the logger "eventloop" to `send`, and to no handler of the root.

    Args:
        send: sends an encoded record to the program. When it raises an `OSError`, the program is gone, and
            the root's handlers get the record; without any, Python prints a warning to standard error.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send

    def __enter__(self) -> Self:
        """Begin to forward records."""
        logger.addHandler(self)
        logger.propagate = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the worker print its records again."""
        logger.propagate = True
        logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record to the program. If its message cannot be formatted, `logging` prints that error."""
        try:
            self._send(_pack(record))
        except OSError:
            logging.getLogger().handle(record)
        except Exception:
            self.handleError(record)


def level_for_workers() -> int:
    """Return the level below which a worker that starts now need not send records.

    It is at most WARNING, as the program may lower its own level while the worker runs.
    """
    return min(logger.getEffectiveLevel(), logging.WARNING)


def log_again(body: bytes) -> None:
    """Log a record of a worker in the program."""
    record = msgspec.msgpack.decode(body, type=_Record)
    if logger.isEnabledFor(record.level):
        made = logger.makeRecord(
            logger.name, record.level, record.path, record.line, record.message, (), None, record.function
        )
        made.exc_text = record.traceback or None  # a formatter prints it as that of an exception
        try:
            logger.handle(made)
        except Exception:  # of a filter or handler of the program, which must not end the subscriber
            print_exc()


def _pack(record: logging.LogRecord) -> bytes:
    error = logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text
    traceback = "\n".join(text for text in (error, record.stack_info) if text)
    message, traceback, path = map(escaped, (record.getMessage(), traceback, record.pathname))
    return msgspec.msgpack.encode(
        _Record(record.levelno, message, traceback, path, record.lineno, record.funcName or "")
    )
