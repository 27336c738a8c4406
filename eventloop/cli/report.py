"""The command `eventloop report`: show the costs and the curves of runs as tables, JSON or a page."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.output_file import STANDARD_OUTPUT, check_output, failed, tell, write_output
from eventloop.util.terminal import OutputError, output_encoding, say

if TYPE_CHECKING:  # not for --help
    from eventloop.reporting.report import Report

EXIT_CODES = (
    "exit codes: 0 done, 1 the page could not be written, 2 bad input (one line), 130 ended by Ctrl-C. The "
    "runs are only read, and may still be training."
)

NARROWEST = 40
"""Characters of a line at least; a narrower terminal wraps them."""


def add_parser(commands: Any) -> None:
    """Add the command to those of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report", help="show the costs and the curves of a run, or of several side by side", epilog=EXIT_CODES
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="the directory of a run; further runs are compared with the first",
    )
    parser.add_argument(
        "--all", action="store_true", help="print every table in full, in place of the lines that matter"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, for programs; a list for several runs"
    )
    parser.add_argument(
        "--html", metavar="FILE",
        help='write one page with charts, which needs no other file and no network; "-" is standard output; '
        "needs plotly, which the extras demo and report install",
    )  # fmt: skip
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from eventloop.reporting.report import load_report

    try:
        if options.html is not None:
            _check_html(options.html, json=options.json)
        reports = [load_report(run) for run in options.runs]
    except (ImportError, OSError, ValueError) as error:
        return failed(options, error, 2)
    if options.html is not None:
        from eventloop.cli.listing_text import size_text
        from eventloop.reporting.html import as_page

        try:
            write_output("--html", options.html, as_page(reports).encode())
        except OutputError:  # `main` reports it, as for the tables
            raise
        except OSError as error:
            return failed(options, error, 1)
        if options.html != STANDARD_OUTPUT:
            summary = f"{options.html} is written, {size_text(Path(options.html).stat().st_size)}"
            tell(summary)
    if options.json:
        say(_as_json(reports))
    elif options.html is None:
        from eventloop.reporting.text import as_text

        width = None if options.all else max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
        say(as_text(reports, encoding=output_encoding(), width=width))
    return 0


def _as_json(reports: list[Report]) -> str:
    import msgspec

    document = reports[0] if len(reports) == 1 else reports
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode()


def _check_html(out: str, *, json: bool) -> None:
    """Check the argument of --html before anything is read.

    Raises:
        ImportError: plotly is not installed.
        ValueError: the page would replace another file, or its folder does not exist; or --json also needs
            standard output.
    """
    from eventloop.reporting.html import check_plotly, is_page

    check_plotly()
    if json and out == STANDARD_OUTPUT:
        raise ValueError(
            "--html - and --json would both go to standard output: give --html the name of a file"
        )
    check_output("--html", out, "a page of HTML", is_page)
