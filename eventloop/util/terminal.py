"""Write to standard output for commands, and detect terminals and notebooks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from eventloop.util.printable import printable


def at_least_one(text: str) -> int:
    """Convert a command-line argument to an int of at least 1.

    Raises:
        argparse.ArgumentTypeError: the argument is not such a number.
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
    except AttributeError:  # a program has put an object without this method in place of sys.stdout
        return False
    except ValueError:  # the file is closed
        return False


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, which shows standard output below the cell."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None


class OutputError(OSError):
    """Raised if standard output cannot be written, because the disk is full or the stream is closed."""


def print_line(text: str) -> bool:
    """Write a line to standard output and flush it; return False if the reader of a pipe has closed it.

    In `eventloop demo | head`, for example, `head` closes the pipe. Control characters, and characters
    outside the encoding of standard output, are written as escapes.

    Raises:
        OutputError: standard output cannot be written.
    """
    return _put(lambda: sys.stdout.write(_encodable(printable(f"{text}\n"))))


def print_lines(lines: Iterable[tuple[str, bool]]) -> bool:
    """Write lines to standard output and flush them, with escapes as `print_line` writes them.

    Args:
        lines: the text of each line, and whether to dim it. Lines are dimmed only on a terminal, and not if
            the environment variable `NO_COLOR` is set.

    Returns:
        False if the reader of a pipe has closed it.

    Raises:
        OutputError: standard output cannot be written.
    """
    colour = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
    shown = [(_encodable(printable(line)), dim and colour) for line, dim in lines]
    text = "".join(f"\x1b[2m{line}\x1b[0m\n" if dim else f"{line}\n" for line, dim in shown)
    return _put(lambda: sys.stdout.write(text))


def put_file(data: bytes) -> bool:
    """Write bytes to standard output and flush them; return False if the reader of a pipe has closed it.

    Raises:
        OutputError: standard output cannot be written.
    """
    return _put(lambda: sys.stdout.buffer.write(data))


def _put(write: Callable[[], object]) -> bool:
    """Call `write`, flush standard output, and convert its errors as `print_line` describes."""
    if sys.stdout is None:  # the shell's `>&-` has closed it
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
    """Discard the output that is buffered and all later output.

    Otherwise the interpreter would try to write the buffer at exit, and report an error.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
