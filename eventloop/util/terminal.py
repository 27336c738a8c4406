"""Write to standard output for commands, and detect terminals and notebooks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from eventloop.util.printable import printable


def at_least_one(text: str) -> int:
    """Convert a command-line argument to a positive int.

    Raises:
        argparse.ArgumentTypeError: the argument is not a positive int.
    """
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; False for None or a closed stream."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # a stand-in that has no such method; a closed file
        return False


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, which shows standard output below the cell."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None


class OutputError(OSError):
    """An error that standard output cannot be written: the disk is full, or the stream was closed."""


def print_line(text: str) -> bool:
    """Write a line to standard output at once; return False if its reader has closed the pipe.

    The reader does so in `eventloop demo | head`, for example. Control characters, and characters outside the
    encoding of standard output, are written as escapes.

    Raises:
        OutputError: standard output cannot be written.
    """
    return _put(lambda: sys.stdout.write(_encodable(printable(f"{text}\n"))))


def print_lines(lines: Iterable[tuple[str, bool]]) -> bool:
    """Write lines as `print_line` does; each is given as a text and whether to dim it.

    Lines are dimmed only on a terminal, and not if `NO_COLOR` is set.
    """
    colour = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
    shown = [(_encodable(printable(line)), dim and colour) for line, dim in lines]
    text = "".join(f"\x1b[2m{line}\x1b[0m\n" if dim else f"{line}\n" for line, dim in shown)
    return _put(lambda: sys.stdout.write(text))


def put_file(data: bytes) -> bool:
    """Write the bytes of a file to standard output; return False if its reader has closed the pipe.

    Raises:
        OutputError: standard output cannot be written.
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
    """Return the encoding of standard output; "utf-8" if it has no encoding or is closed."""
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _encodable(text: str) -> str:
    encoding = output_encoding()
    return text.encode(encoding, "backslashreplace").decode(encoding)


def drop_output() -> None:
    """Discard further output, because the interpreter would otherwise fail at exit to write the rest."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
