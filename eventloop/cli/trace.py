"""Implement `eventloop trace`, which lists, copies or merges the traces that a run has recorded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.output_file import STANDARD_OUTPUT, check_output, failed, print_stderr, write_output
from eventloop.util.terminal import at_least_one, print_line

if TYPE_CHECKING:  # slow imports, which --help does not need
    from eventloop.tracing.files import TraceFile

EXIT_CODES = (
    "exit codes: 0 done, 1 the file could not be written, 2 bad input, 130 ended by Ctrl-C. The "
    "times are the host's; ProfilerHook records those of the GPU. The run may still be training."
)
OPEN = "open it at https://ui.perfetto.dev or in chrome://tracing"


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="list the traces of a run, which Perfetto and chrome://tracing open; copy or merge them",
        epilog=EXIT_CODES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help='copy a window to this file; "-" is standard output'
    )
    parser.add_argument(
        "--window",
        type=at_least_one,
        metavar="N",
        help="the number of the window to copy, from 1 (default: the last)",
    )
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="put the window of all ranks into one file, each rank a process, on one clock (default FILE: "
        "ranks_FIRST-LAST.json in the folder of the traces)",
    )
    parser.add_argument("--merge", action="store_true", help="put all windows into the file")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from eventloop.tracing.files import find_traces

    try:
        traces = find_traces(options.run)
        _check_options(options)
        chosen = traces if options.merge else [_choose(traces, options.window)]
        if options.ranks:
            return _write_ranks(options, chosen[0])
        data = _contents(chosen) if options.out is not None else b""
    except (OSError, ValueError) as error:
        return failed(options, error, 2)
    if options.out is None:
        print_line(_listing(traces))
        return 0
    names = ", ".join(f"{trace.first}..{trace.last}" for trace in chosen)
    return _write(options, options.out, data, f"iterations {names}")


def _write_ranks(options: argparse.Namespace, file: TraceFile) -> int:
    """Write the traces of all ranks for one window to one file; return the exit code.

    The file is by default in the folder of rank 0's trace.

    Args:
        file: the trace of rank 0.

    Raises:
        OSError, ValueError: the trace of a rank is missing or damaged.
    """
    from eventloop.tracing.files import encoded
    from eventloop.tracing.ranks import merge_ranks

    merged = merge_ranks(file)
    out = options.out or str(file.path.with_name(f"ranks_{file.first}-{file.last}.json"))
    slow = f"; {merged.slow.text}" if merged.slow is not None else "; no rank is slow"
    content = f"iterations {file.first}..{file.last} of {merged.world_size} ranks"
    return _write(options, out, encoded(merged.trace), content, slow)


def _write(options: argparse.Namespace, out: str, data: bytes, content: str, note: str = "") -> int:
    """Write a trace, describe it on standard error, and return the exit code.

    Args:
        out: the path of the file, or "-" for standard output.
        data: the bytes of the file.
        content: the first words of the description, such as "iterations 0..9".
        note: the end of the description.
    """
    try:
        if not write_output("-o", out, data):
            return 0  # the reader of standard output has ended, such as `head`, which is no error
    except OSError as error:
        return failed(options, error, 1)
    where = "" if out == STANDARD_OUTPUT else f" into {out}; {OPEN}"
    print_stderr(f"{content}{where}{note}")
    return 0


def _listing(traces: list[TraceFile]) -> str:
    """Return a table of the traces, with a last line on the programs that open them."""
    from eventloop.cli.listing_text import size_text
    from eventloop.util.formatting import table

    rows = [
        [str(number), f"{trace.first}..{trace.last}", size_text(trace.path.stat().st_size), str(trace.path)]
        for number, trace in enumerate(traces, start=1)
    ]
    return f"{table(['window', 'iterations', 'size', 'file'], rows, right=(0, 1, 2))}\n{OPEN}"


def _choose(traces: list[TraceFile], number: int | None) -> TraceFile:
    """Return the trace of the window with a number, counted from 1; None means the last window.

    Raises:
        ValueError: there is no window with this number.
    """
    if number is None:
        return traces[-1]
    if number > len(traces):
        known = "; ".join(f"{i}: iterations {t.first}..{t.last}" for i, t in enumerate(traces, start=1))
        raise ValueError(f"{traces[0].path.parent} has no window {number}: it has {known}")
    return traces[number - 1]


def _contents(chosen: list[TraceFile]) -> bytes:
    """Return the bytes of the only trace's file, or of a trace that is merged from several."""
    from eventloop.tracing.files import encoded, merged

    return chosen[0].path.read_bytes() if len(chosen) == 1 else encoded(merged(chosen))


def _check_options(options: argparse.Namespace) -> None:
    """Refuse inconsistent options, and an output path that cannot be used."""
    from eventloop.tracing.files import is_trace

    if options.merge and options.window is not None:
        raise ValueError("--merge takes all windows: leave out --merge or --window")
    if options.merge and options.ranks:
        raise ValueError("--ranks takes one window: leave out --merge or --ranks")
    if options.out is None and not options.ranks and (options.merge or options.window is not None):
        raise ValueError("--merge and --window are for writing a file: expected -o FILE, got none")
    if options.out is not None:
        check_output("-o", options.out, "a trace", is_trace)
