"""Implement `eventloop watch`, which shows runs under way in the terminal, as JSON, or in the browser.

`arguments` removes plain files from the paths that are given, `text` formats a view, `chart` draws a curve,
and `screen` updates the terminal. `eventloop.watching.web` serves the page. May import every package.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.cli.output_file import failed
from eventloop.util.terminal import is_terminal, output_encoding, print_line, print_lines

if TYPE_CHECKING:  # slow imports, which --help does not need
    from eventloop.watching import RunReader, RunView

EXIT_CODES = (
    "exit codes: 0 all runs have ended, or --once has shown them; 1 with --once: a run was killed, hangs, or "
    "has ended by an error; 2 bad input; 130 ended by Ctrl-C; 141 the reader of the output has "
    "left. The runs are only read. Without a terminal, and without --json, this is as with --once."
)
NARROWEST = 40
"""The least width of a line in characters; a narrower terminal wraps longer lines itself."""
BROKEN_PIPE = 141
INSTALL = "pip install 'torch-eventloop[watch]'"
ABSENT = f"the live view needs rich: {INSTALL}, or use --once or --json"


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "watch", help="show a run that is under way, or several side by side", epilog=EXIT_CODES
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="the directory of a run; plain files among several are left out",
    )
    parser.add_argument(
        "--metrics",
        metavar="NAMES",
        help="the curves to show, by name or pattern, separated by commas: loss,accuracy or 'val/*' "
        "(default: the loss, and all that the run validates; with --json none)",
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="seconds between two reads of the directories (default: 1)",
    )
    parser.add_argument(
        "--hung-after",
        type=_seconds,
        metavar="SECONDS",
        help="seconds without the end of an iteration, after which a training is called hung (default: 60; "
        "it is at least 20 mean iterations, and ten times as long for the first two)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object a line: for each run at once, and again when something has changed",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the runs once, as plain text or with --json, and end"
    )
    parser.add_argument(
        "--web",
        nargs="?",
        const=0,
        type=_port,
        metavar="PORT",
        help="serve a page for the browser on 127.0.0.1, with buttons for commands; print its address, whose "
        "token is its password, and serve until Ctrl-C (default: a free port)",
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from eventloop.cli.watch.arguments import without_files
    from eventloop.watching import RunReader
    from eventloop.watching.liveness import HUNG_SECONDS

    options.runs = without_files(options.runs)
    try:
        metrics = None if options.metrics is None else [name for name in options.metrics.split(",") if name]
        hung = HUNG_SECONDS if options.hung_after is None else options.hung_after
        if options.web is not None:
            return _serve(options, metrics, hung)
        readers = [RunReader(run, metrics=metrics, hung_seconds=hung) for run in options.runs]
        live = not options.once and not options.json and is_terminal(sys.stdout)
        if live:
            _check_rich()
    except (ImportError, OSError, ValueError) as error:
        return failed(options, error, 2)
    if options.json:
        return _print_json(readers, options, curves=metrics is not None)
    return _show_live(readers, options.interval) if live else _print_once(readers)


def _serve(options: argparse.Namespace, metrics: list[str] | None, hung_seconds: float) -> int:
    """Serve the page until a signal comes.

    Raises:
        ImportError, OSError, ValueError: a package is missing, the port is taken, or a path is not a run.
    """
    if options.json or options.once:
        raise ValueError(
            f"--web expects no other output, got {'--json' if options.json else '--once'} as well"
        )
    try:
        from eventloop.watching.web.server import serve
    except ImportError as error:
        raise ImportError(f"the page needs starlette, uvicorn and plotly ({error}): {INSTALL}") from error
    serve(
        options.runs,
        options.web,
        print_line,
        metrics=metrics,
        interval=options.interval,
        hung_seconds=hung_seconds,
    )
    return 0


def _port(text: str) -> int:
    """Convert the argument of --web to the number of a port.

    Raises:
        argparse.ArgumentTypeError: the argument is not a number from 0 to 65535.
    """
    if text.isascii() and text.isdecimal() and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}: give runs before --web")


def _seconds(text: str) -> float:
    """Convert a command-line argument to a number of seconds.

    Raises:
        argparse.ArgumentTypeError: the argument is not a number above 0, or is infinite.
    """
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0 seconds, got {text}")
    return number


def _check_rich() -> None:
    """Raise ImportError with the remedy if rich, which draws the screen, is not installed."""
    try:
        import rich.live  # noqa: F401
    except ImportError as error:
        raise ImportError(ABSENT) from error


def _views(readers: Sequence[RunReader], interval: float) -> Iterator[list[RunView]]:
    """Yield the present views of all runs, again after each interval of seconds, until all runs are over."""
    while True:
        views = [reader.read() for reader in readers]
        yield views
        if all(view.over for view in views):
            return
        time.sleep(interval)


def _show_live(readers: Sequence[RunReader], interval: float) -> int:
    """Show the runs on the whole terminal until all are over; then restore it and print the last views."""
    from eventloop.cli.watch.screen import Screen

    with Screen() as screen:
        for views in _views(readers, interval):
            screen.show(views)
    _print_views(views)
    return 0


def _print_once(readers: Sequence[RunReader]) -> int:
    views = [reader.read() for reader in readers]
    return _exit_code(views) if _print_views(views) else BROKEN_PIPE


def _print_views(views: Sequence[RunView]) -> bool:
    """Print views as plain text; return False if the reader of the output has closed it."""
    from eventloop.cli.watch.text import view_lines

    width = max(NARROWEST, shutil.get_terminal_size((100, 24)).columns)
    lines: list[tuple[str, bool]] = []
    for view in views:
        lines += [("", False)] if lines else []
        lines += [(text, style == "dim") for text, style in view_lines(view, width, None, output_encoding())]
    return print_lines(lines)


def _exit_code(views: Sequence[RunView]) -> int:
    return int(any(view.state in ("killed", "hung") or view.error is not None for view in views))


def _print_json(readers: Sequence[RunReader], options: argparse.Namespace, *, curves: bool) -> int:
    """Print the view of a run at first and whenever it has changed; return the exit code."""
    printed: dict[int, str] = {}  # by the index of the run
    for views in _views(readers, options.interval):
        for index, view in enumerate(views):
            line, compared = _as_json(view, curves=curves)
            if printed.get(index) != compared:
                printed[index] = compared
                if not print_line(line):
                    return BROKEN_PIPE
        if options.once:
            return _exit_code(views)
    return 0


def _as_json(view: RunView, *, curves: bool) -> tuple[str, str]:
    """Return a view as a line of JSON, and the same line without the fields that change at each read."""
    import msgspec

    from eventloop.util.surrogates import without_surrogates

    shown = view if curves else msgspec.structs.replace(view, curves=[])
    fields = without_surrogates(msgspec.to_builtins(shown))
    blanked = dict.fromkeys(("time", "age", "still", "eta", "sentence"))
    return msgspec.json.encode(fields).decode(), msgspec.json.encode(fields | blanked).decode()
