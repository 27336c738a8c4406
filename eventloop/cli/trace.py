"""The command `eventloop trace`: convert a recorded window of a run for Perfetto and Chrome's tracing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.util.append_file import replacing
from eventloop.util.formatting import on_a_line
from eventloop.util.terminal import at_least_one, put_file

if TYPE_CHECKING:  # not for --help
    from eventloop.tracing.file import Trace, Window

EXIT_CODES = (
    "exit codes: 0 done, 1 the file could not be written, 2 bad input (one line), 130 ended by Ctrl-C. The "
    "times are the host's; ProfilerHook records those of the GPU. The run may still be training."
)
OUT = "trace.json"


def add_parser(commands: Any) -> None:
    """Add the command to those of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="convert the trace of some iterations, to open it in Perfetto or chrome://tracing",
        epilog=EXIT_CODES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory, or its trace.jsonl")
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help=f'the file to write; "-" is standard output (default: {OUT} in the run)',
    )
    parser.add_argument(
        "--window",
        type=at_least_one,
        metavar="N",
        help="the number of the recorded window, from 1 (default: the last)",
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from eventloop.tracing.chrome import as_json
    from eventloop.tracing.file import read_trace

    try:
        trace = read_trace(options.run)
        window = _choose(trace, options.window)
        out = _checked_out(options.out, trace)
    except (OSError, ValueError) as error:
        return _failed(options, error, 2)
    try:
        if not _write(out, as_json(window)):
            return 0
    except OSError as error:
        return _failed(options, error, 1)
    sys.stderr.write(f"eventloop: {on_a_line(_summary(trace, window, out))}\n")
    return 0


def _choose(trace: Trace, number: int | None) -> Window:
    """Return the window with a number, 1 for the first; without a number the last one.

    Raises:
        ValueError: there is no such window.
    """
    windows = trace.windows
    if number is None:
        return windows[-1]
    if number > len(windows):
        known = "; ".join(f"{i}: {window}" for i, window in enumerate(windows, start=1))
        raise ValueError(f"{trace.path} has no window {number}: it has {known}")
    return windows[number - 1]


def _checked_out(out: str | None, trace: Trace) -> Path | None:
    """Return the path to write to, None for standard output, after checking it.

    Raises:
        ValueError: the path is a directory, or its folder does not exist; it is the trace itself or another
            file of a run; or the default path holds a file that this command has not made.
    """

    if out == "-":
        return None
    path = trace.path.with_name(OUT) if out is None else Path(out)
    if path.is_dir():
        raise ValueError(f"-o {path} is a directory: give the name of a file")
    if path.exists() and path.samefile(trace.path):
        raise ValueError(f"-o {path} is the recorded trace itself: give the name of another file")
    if not path.parent.is_dir():
        raise ValueError(f"-o {path} cannot be written: the folder {path.parent} does not exist")
    if _belongs_to_a_run(path, trace):
        raise ValueError(f"-o {path} is a file of a run: give the name of another file")
    if out is None and _is_foreign(path):
        raise ValueError(f"{path} was not made by this command, and is not replaced: give -o FILE")
    return path


def _belongs_to_a_run(path: Path, trace: Trace) -> bool:
    """Return whether a path is that of a file of a run, this one or another.

    In this run it is any file that this command has not made, and every name that a run's own files have,
    written or not; in another run an existing file with such a name.
    """
    from eventloop.tracing.file import OF_A_RUN

    own = path.name in OF_A_RUN
    if path.resolve().is_relative_to(trace.path.resolve().parent):
        return own or (path.name != OUT and _is_foreign(path))
    return own and _is_foreign(path)


def _is_foreign(path: Path) -> bool:
    """Return whether there is a file that this command has not made."""
    from eventloop.tracing.chrome import is_ours

    if not path.exists():
        return False
    with open(path, "rb") as file:
        return not is_ours(file.read(64))


def _write(out: Path | None, data: bytes) -> bool:
    """Write the file; return False if the reader of standard output has left.

    A file is replaced at once, so that a viewer finds a whole one; a device such as /dev/null is written to.
    """
    if out is None:
        return put_file(data)
    if out.exists() and not out.is_file():
        out.write_bytes(data)
        return True
    try:
        with replacing(out, durable=False) as file:
            file.write(data)
    except OSError as error:
        raise OSError(f"-o {out} cannot be written: {error.strerror or error}") from error
    return True


def _summary(trace: Trace, window: Window, out: Path | None) -> str:
    parts = [str(window), f"{len(window.spans)} spans"]
    if window.lost:
        parts.append(f"{window.lost} left out beyond the limit")
    if not window.closed:
        parts.append("the run was killed, or has not yet recorded all of its background work")
    if trace.torn:
        parts.append("the end of the file is torn")
    if len(trace.windows) > 1:
        parts.append(f"window {trace.windows.index(window) + 1} of {len(trace.windows)}")
    where = "" if out is None else f" into {out}; open it at https://ui.perfetto.dev or in chrome://tracing"
    return ", ".join(parts) + where


def _failed(options: argparse.Namespace, error: Exception, code: int) -> int:
    if options.traceback:
        raise error
    sys.stderr.write(f"eventloop: {on_a_line(str(error))} (--traceback shows where)\n")
    return code
