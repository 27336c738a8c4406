"""The command `eventloop trace`: a recorded window of a run, for Perfetto and Chrome's tracing."""

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
    "exit codes: 0 done, 1 the file could not be written, 2 bad input (one line), 130 ended by Ctrl-C. The times are "
    "the host's: what the GPU does, ProfilerHook records. A run that is under way may be looked at, too."
)
OUT = "trace.json"


def add_parser(commands: Any) -> None:
    """Add the command to those of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="what went on in some iterations, to open in Perfetto or chrome://tracing",
        epilog=EXIT_CODES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory, or its trace.jsonl")
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help=f'where to write; "-" is standard output (default: {OUT} in the run)',
    )
    parser.add_argument(
        "--window",
        type=at_least_one,
        metavar="N",
        help="of several that were recorded, the N-th (default: the last)",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was found")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
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
    sys.stderr.write(f"eventloop: {on_a_line(_told(trace, window, out))}\n")
    return 0


def _choose(trace: Trace, number: int | None) -> Window:
    """The window with a number, 1 for the first; the last one without.

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
    """Where to write, None for standard output; found before anything is made.

    Raises:
        ValueError: it is a directory, or in one that is not there; the trace itself or another file of a run; or by
            default a file that is somebody else's.
    """

    if out == "-":
        return None
    path = trace.path.with_name(OUT) if out is None else Path(out)
    if path.is_dir():
        raise ValueError(f"-o {path} is a directory: give the name of a file")
    if path.exists() and path.samefile(trace.path):
        raise ValueError(f"-o {path} is what the run recorded: give the name of another file")
    if not path.parent.is_dir():
        raise ValueError(f"-o {path} cannot be written: there is no folder {path.parent}")
    if _belongs_to_a_run(path, trace):
        raise ValueError(f"-o {path} is a file of a run: give the name of another file")
    if out is None and _is_others(path):
        raise ValueError(f"{path} was not made by this command, and is not replaced: give -o FILE")
    return path


def _belongs_to_a_run(path: Path, trace: Trace) -> bool:
    """Whether a run has a file there: this one anything that is no such trace, another one what has one of its names.
    Where this run has none yet, a name of its own is kept for it."""
    from eventloop.tracing.file import OF_A_RUN

    own = path.name in OF_A_RUN
    if path.resolve().is_relative_to(trace.path.resolve().parent):
        return own or (path.name != OUT and _is_others(path))
    return own and _is_others(path)


def _is_others(path: Path) -> bool:
    """Whether there is a file that this command has not made."""
    from eventloop.tracing.chrome import is_ours

    if not path.exists():
        return False
    with open(path, "rb") as file:
        return not is_ours(file.read(64))


def _write(out: Path | None, data: bytes) -> bool:
    """Replace the file at once, so that a viewer finds a whole one; what is no file, as /dev/null, is written to. False
    when nobody reads on, as in `eventloop trace ... -o - | head`."""
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


def _told(trace: Trace, window: Window, out: Path | None) -> str:
    parts = [str(window), f"{len(window.spans)} spans"]
    if window.lost:
        parts.append(f"{window.lost} beyond the limit left out")
    if not window.closed:
        parts.append("the run was killed, or goes on, before all of the background was recorded")
    if trace.torn:
        parts.append("behind the windows something was cut short")
    if len(trace.windows) > 1:
        parts.append(f"window {trace.windows.index(window) + 1} of {len(trace.windows)}")
    where = "" if out is None else f" into {out}; open it at https://ui.perfetto.dev or in chrome://tracing"
    return ", ".join(parts) + where


def _failed(options: argparse.Namespace, error: Exception, code: int) -> int:
    if options.traceback:
        raise error
    sys.stderr.write(f"eventloop: {on_a_line(str(error))} (--traceback shows where)\n")
    return code
