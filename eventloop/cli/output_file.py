"""Check and write the output file that an option of a command names; "-" means standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from eventloop.util.append_file import replacing
from eventloop.util.formatting import on_a_line
from eventloop.util.terminal import put_file

STANDARD_OUTPUT = "-"


def check_output(option: str, out: str, kind: str, is_own: Callable[[Path], bool]) -> None:
    """Refuse an output path whose folder does not exist, or where a file of another kind is.

    Args:
        option: the option that names the path, for the message.
        out: the path.
        kind: the kind of file that the command writes, such as "a trace".
        is_own: returns whether a file is of that kind, and may be replaced.

    Raises:
        ValueError: the path cannot be used.
    """
    path = Path(out)
    if out == STANDARD_OUTPUT:
        return
    if path.is_dir() or (path.is_file() and not is_own(path)):
        got = "a directory" if path.is_dir() else f"not {kind}"
        raise ValueError(f"{option} {path} is {got}, and is not replaced: give the name of a new file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path} cannot be written: the folder {path.parent} does not exist")


def write_output(option: str, out: str, data: bytes) -> bool:
    """Write the data to a path; return False if the reader of standard output has closed it.

    A file is replaced atomically, so that a reader finds either the old or the new one whole. A device such
    as /dev/null is written to.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(out)
    if out == STANDARD_OUTPUT:
        return put_file(data)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            with replacing(path, durable=False) as file:
                file.write(data)
    except OSError as error:
        raise OSError(f"{option} {path} cannot be written: {error.strerror or error}") from error
    return True


def failed(options: argparse.Namespace, error: Exception, code: int) -> int:
    """Print an error on one line and return the exit code; with the option --traceback, raise the error."""
    if options.traceback:
        raise error
    print_stderr(f"{error} (--traceback shows where)")
    return code


def print_stderr(text: str) -> None:
    """Write a text as one line to standard error, with line breaks escaped; do nothing if that is closed."""
    if sys.stderr is not None:
        sys.stderr.write(f"eventloop: {on_a_line(text)}\n")
