"""Who reads the output: a terminal, a notebook, or a reader who may have left; and reading a number for the commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TextIO

from eventloop.util.printable import printable


def at_least_one(text: str) -> int:
    """An argument that is a positive number.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; a closed one is not, nor is None, which a program without a console has."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # a stand-in that has no such method; a closed file
        return False


def in_notebook() -> bool:
    """Return whether this is a Jupyter kernel, which shows standard output below the cell."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None


class OutputError(OSError):
    """Standard output takes nothing: the disk is full, or it was closed."""


def say(text: str) -> bool:
    """Write a line, now; False when nobody is there to read it any more, as in `eventloop demo | head`. What standard
    output has no characters for stands there as escapes, and so do control characters.

    Raises:
        OutputError: it cannot be written.
    """
    return _put(lambda: sys.stdout.write(_encodable(printable(f"{text}\n"))))


def put_file(data: bytes) -> bool:
    """Write what else would be a file, as it is; see `say`.

    Raises:
        OutputError: it cannot be written.
    """
    return _put(lambda: sys.stdout.buffer.write(data))


def _put(write: Callable[[], object]) -> bool:
    if sys.stdout is None:  # as Python has it after `>&-`
        raise OutputError("standard output is closed: there is nowhere to write to")
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return False
    except OSError as error:
        drop_output()
        raise OutputError(f"standard output cannot be written: {error}") from error
    return True


def output_encoding() -> str:
    """Of standard output; UTF-8 where it has none, or is closed."""
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _encodable(text: str) -> str:
    encoding = output_encoding()
    return text.encode(encoding, "backslashreplace").decode(encoding)


def drop_output() -> None:
    """Send what is still to come nowhere, or the interpreter fails over it when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
