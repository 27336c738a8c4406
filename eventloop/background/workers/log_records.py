"""Send the log records of a worker process to the program, which logs them again.

These are the records of the logger "eventloop". So the program's handlers, levels and filters apply to the
warnings of a writer with `offload="process"` as well. The worker prints its records itself only if the
program has ended.
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
    """Pass the records of the logger "eventloop" to `send`, within a `with` block.

    Handlers of the root logger do not receive these records.

    Args:
        send: sends an encoded record to the program. If it raises an OSError, the program has ended, and the
            root logger's handlers receive the record.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send

    def __enter__(self) -> Self:
        """Begin to pass records to `send`."""
        logger.addHandler(self)
        logger.propagate = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the root logger's handlers receive the records again."""
        logger.propagate = True
        logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record to the program; if its message cannot be formatted, let `logging` print the error."""
        try:
            self._send(_pack(record))
        except OSError:
            logging.getLogger().handle(record)
        except Exception:
            self.handleError(record)


def level_for_workers() -> int:
    """Return the level below which a worker sends no records.

    It is at most WARNING, because the program may lower its own level while the worker runs.
    """
    return min(logger.getEffectiveLevel(), logging.WARNING)


def log_again(body: bytes) -> None:
    """Log a record of a worker in the program."""
    record = msgspec.msgpack.decode(body, type=_Record)
    if logger.isEnabledFor(record.level):
        log_record = logger.makeRecord(
            logger.name, record.level, record.path, record.line, record.message, (), None, record.function
        )
        log_record.exc_text = record.traceback or None  # formatters print this as an exception's traceback
        try:
            logger.handle(log_record)
        except Exception:  # an error of the program's filters and handlers must not end the subscriber
            print_exc()


def _pack(record: logging.LogRecord) -> bytes:
    """Encode a log record, with its traceback as text."""
    error = logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text
    traceback = "\n".join(text for text in (error, record.stack_info) if text)
    message, traceback, path = map(escaped, (record.getMessage(), traceback, record.pathname))
    return msgspec.msgpack.encode(
        _Record(record.levelno, message, traceback, path, record.lineno, record.funcName or "")
    )
