"""Implement `eventloop report`, which shows the costs and the curves of runs as tables, JSON or a page.

With `--diff` it compares the costs and the scores of two runs; with `--fail-above` the exit code shows
whether the second run is slower.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.output_file import STANDARD_OUTPUT, check_output, failed, print_stderr, write_output
from eventloop.util.terminal import OutputError, output_encoding, print_line, print_lines

if TYPE_CHECKING:  # slow imports, which --help does not need
    from eventloop.reporting.report import Report

EXIT_CODES = (
    "exit codes: 0 done, 1 the page could not be written, 2 bad input, or a run without costs or without the "
    "record of a rank, of which the rest is shown, 3 the second run is slower "
    "than --fail-above allows, 130 ended by Ctrl-C. The runs may still be training, and their "
    "files are only read."
)

PAGE = "report.html"
"""The file in the run's directory that --html writes if it is given no name."""
IN_RUN = ""
"""The value of the option --html if it is given no name."""
NARROWEST = 40
"""The least width of a line in characters; a narrower terminal wraps longer lines itself."""


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report", help="show the costs and the curves of a run, or of several side by side", epilog=EXIT_CODES
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
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
        "--html",
        nargs="?",
        const=IN_RUN,
        metavar="FILE",
        help='write one page with charts, which needs no other file and no network: FILE, "-" for standard '
        f"output, or without a name {PAGE} in the directory of the one run; needs plotly, which the extras "
        "demo and report install",
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="compare two runs: for each phase and handler, and for each score at the steps that both runs "
        "have, the difference with a 95 %% interval; what is only noise is dimmed",
    )
    parser.add_argument(
        "--fail-above",
        metavar="PERCENT",
        help="with --diff: exit with 3 if an iteration, a phase or a handler of both runs is slower in the "
        "second one by more than this part of an iteration of the first, such as 5%%: the lower end of its "
        "interval must be above it",
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.set_defaults(show=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from eventloop.reporting.report import load_report

    if not options.runs and options.html:  # in `--html RUN`, argparse takes RUN for the name of the page
        options.runs, options.html = [Path(options.html)], IN_RUN
    if not options.runs:
        options.show.error("the following arguments are required: RUN")
    try:
        limit = _check_diff(options)
        if options.html == IN_RUN:
            options.html = _page_of(options.runs)
        if options.html is not None:
            _check_html(options.html, json=options.json)
        reports = [load_report(run) for run in options.runs]
        if options.diff:
            _refuse_units(reports)
            return _show_diff(reports, limit, options)
    except OutputError:  # `main` handles it
        raise
    except (ImportError, OSError, ValueError) as error:
        return failed(options, error, 2)
    if options.html is not None:
        from eventloop.cli.listing_text import size_text
        from eventloop.reporting.page.html import as_page

        try:
            write_output("--html", options.html, as_page(reports).encode())
        except OutputError:  # `main` handles it
            raise
        except OSError as error:
            return failed(options, error, 1)
        if options.html != STANDARD_OUTPUT:
            summary = f"{options.html} is written, {size_text(Path(options.html).stat().st_size)}"
            print_stderr(summary)
    if options.json:
        print_line(_as_json(reports))
    elif options.html is None:
        from eventloop.reporting.text import as_text

        print_line(as_text(reports, encoding=output_encoding(), width=None if options.all else _width()))
    return _report_missing(reports)


def _refuse_units(reports: list[Report]) -> None:
    """Refuse to compare runs that count different units as an iteration.

    Raises:
        ValueError: an iteration is a batch in one run, and an optimizer step in another.
    """
    records = [report.begun for report in reports if report.begun is not None]
    units = [record.options.get("trainer", {}).get("unit", "batch") for record in records]
    if len({*units}) > 1:
        raise ValueError(
            f"--diff compares iterations: expected runs of one unit, got {' and '.join(map(repr, units))} "
            "(Trainer(unit=...)), in which an iteration is a batch or an optimizer step over several"
        )


def _report_missing(reports: list[Report]) -> int:
    """Print one line on missing parts of the reports; return the exit code: 2 if there are any, else 0."""
    missing = [f"{report.run}: {' '.join(report.missing)}" for report in reports if report.missing]
    if missing:
        print_stderr("; ".join(missing))
    return 2 if missing else 0


def _as_json(reports: list[Report]) -> str:
    """Return one report as a JSON object, and several as an array."""
    import msgspec

    document = reports[0] if len(reports) == 1 else reports
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode()


def _check_diff(options: argparse.Namespace) -> float | None:
    """Check the arguments of --diff; return the limit of --fail-above in percent."""
    if options.fail_above is not None and not options.diff:
        raise ValueError("--fail-above is the limit of a comparison: expected --diff and two runs with it")
    if options.diff and len(options.runs) != 2:
        raise ValueError(f"--diff compares two runs: expected two directories, got {len(options.runs)}")
    if options.diff and options.html is not None:
        raise ValueError(
            "--diff prints text or --json, and --html is a page without it: give one of the two options"
        )
    return None if options.fail_above is None else _percentage(options.fail_above)


def _percentage(text: str) -> float:
    """Convert the argument of --fail-above; below 1 it needs a "%", because 0.05 may mean 5 %."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"--fail-above must be a percentage such as 5%, got {text!r}")
    number, has_sign = float(match[1]), bool(match[2])
    if number < 1 and not has_sign:
        percents = f"{number * 100:g}% or {number:g}%"
        raise ValueError(f"--fail-above {text} may mean {percents}: expected a percentage, write it with %")
    return number


def _width() -> int:
    """Return the width of the terminal, or 80 characters if the output is not a terminal."""
    return max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def _show_diff(reports: list[Report], limit: float | None, options: argparse.Namespace) -> int:
    """Print the comparison of two runs; return the exit code: 3 if the second one exceeds the limit."""
    import msgspec
    from msgspec.structs import replace

    from eventloop.reporting.diff.comparing import compare
    from eventloop.reporting.diff.scores import compare_scores
    from eventloop.reporting.diff.text import diff_lines, regression_line

    comparison = replace(compare(reports[0], reports[1], limit), scores=compare_scores(*options.runs))
    if options.json:
        print_line(msgspec.json.format(msgspec.json.encode(comparison), indent=1).decode())
    else:
        print_lines(diff_lines(comparison, output_encoding(), width=_width(), everything=options.all))
    if limit is not None:
        print_stderr(regression_line(comparison))
    missing_code = _report_missing(reports)
    return 3 if comparison.failed else missing_code


def _page_of(runs: list[Path]) -> str:
    """Return the path of the page that --html writes if it is given no name.

    Raises:
        ValueError: there are several runs.
    """
    if len(runs) > 1:
        raise ValueError(
            f"--html needs the name of a file for several runs: expected --html FILE, got {len(runs)} runs "
            f"and no FILE; without it the page of one run is RUN/{PAGE}"
        )
    return str(runs[0] / PAGE)


def _check_html(out: str, *, json: bool) -> None:
    """Check the argument of --html before the files of the runs are read.

    Raises:
        ImportError: plotly is not installed.
        ValueError: the page would replace a file that is not a page, its folder does not exist, or --json
            would share standard output with it.
    """
    from eventloop.reporting.page.html import check_plotly, is_page

    check_plotly()
    if json and out == STANDARD_OUTPUT:
        raise ValueError(
            "--html - and --json would both go to standard output: give --html the name of a file"
        )
    check_output("--html", out, "a page of HTML", is_page)
