"""Implement `eventloop replay`, which passes the events of a run's event log to any writer.

Without `--to`, it delivers the events that were still queued for the run's writers when the run ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from os import PathLike
from os.path import lexists
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.cli.output_file import failed
from eventloop.util.errors import WorkDirInUseError
from eventloop.util.formatting import on_a_line
from eventloop.util.terminal import drop_output
from eventloop.util.text import error_text

if TYPE_CHECKING:  # slow imports, which --help does not need
    from eventloop.eventlog.redelivery import Delivery, UndeliveredLog
    from eventloop.eventlog.replay import ReplayReport
    from eventloop.eventlog.sinks import Sink

TARGETS = {
    "tensorboard": "TensorBoardWriter",
    "jsonl": "JSONLWriter",
    "csv": "CSVWriter",
    "console": "ConsoleWriter",
    "wandb": "WandbWriter",
    "mlflow": "MLflowWriter",
    "trackio": "TrackioWriter",
    "otlp": "OpenTelemetryWriter",
}
OUTPUT_ATTRIBUTES = {
    "JSONLWriter": "filename",
    "CSVWriter": "filename",
    "EventLogWriter": "filename",
    "ImageFileWriter": "folder",
}
"""The attribute of a writer that names its file or folder in --out; see `_made_by` for TensorBoardWriter."""
EXIT_CODES = (
    "exit codes: 0 done, also if a kill has torn the end of the log; 1 a file could not be written, or bytes "
    "in the middle of the log are damaged, and the whole events are replayed; 2 bad input, or a log without "
    "an event (one line each); 130 ended by Ctrl-C, 143 by SIGTERM; without --to, the next call "
    "delivers the rest"
)
PROGRESS_SECONDS = 10.0
"""Seconds between two lines on the progress of a delivery."""
IMPORT = "--import MODULE imports the module that declares"


class Job(NamedTuple):
    """Hold an event log, and the writer that is to write its events."""

    log: Path
    writer: Sink
    out: Path
    """The directory for the writer's files."""
    made: Path | None
    """The file or folder that the writer will create; None if it is unknown."""


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="deliver the events that a run's end left, or write its log with another writer",
        description="Without --to, deliver the events that the run's writers had not received at its end; "
        "only for a run that you trust, because its folder says with which arguments each writer is made. "
        "With --to, write the events of the run's event log with another writer.",
        epilog=EXIT_CODES,
        usage="%(prog)s [-h] RUN [--to TARGET] [--set NAME=VALUE] [--only EVENT [EVENT ...]] "
        "[--import MODULE] [--out DIR] [--traceback]",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory, or its event log")
    parser.add_argument(
        "--to", metavar="TARGET", help=f"{', '.join(TARGETS)}, or the class name of another writer"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        metavar="EVENT",
        help='names of events, such as scalars_logged; "*" for all; put RUN before --only',
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=_argument,
        help="an argument of the writer: a text, such as project=digits, or JSON, such as "
        """config='{"lr": 0.1}'; may be repeated; keys are taken from the environment""",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="first import a module, installed or in the current directory, that declares your events or "
        "registers a writer; may be repeated",
    )
    help_of_out = "the directory for files (default: replay, in the run's directory)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=help_of_out)
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    with _finding_modules_here() if options.modules else nullcontext():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Replay the log with the writer of `--to`, or deliver undelivered events; return the exit code."""
    if options.to is None:
        return _deliver_undelivered(options)
    try:
        job = _prepare(options)
    except (ImportError, OSError, ValueError, TypeError) as error:
        return failed(options, error, 2)
    from eventloop.eventlog.replay import replay
    from eventloop.writers import Writer

    try:
        if isinstance(job.writer, Writer):
            job.writer.begin_process()
        report = replay(job.log, job.writer, only=options.only, on_torn="ignore", work_dir=job.out)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has ended, such as `head` in a pipe
        drop_output()
        return 0
    except WorkDirInUseError as error:
        return failed(options, error, 2)
    except OSError as error:
        return failed(options, error, 1)
    except Exception as error:  # the writer has raised it, for example for an image without its pixels
        return failed(options, _writer_error(job, error), 1)
    if report.empty:
        return failed(options, ValueError(_no_event(job.log, report)), 2)
    summary = report.describe(into=_output_of(job, report) or "", unknown=f"{IMPORT} them")
    sys.stderr.write(f"eventloop: {on_a_line(summary)}\n")
    return 1 if report.damaged else 0


def _writer_error(job: Job, cause: Exception) -> Exception:
    """Return an error that names the writer and the log, with the writer's own error as its cause."""
    writer = type(job.writer).__name__
    error = RuntimeError(f"{writer} cannot write an event of {job.log}: {error_text(cause)}")
    error.__cause__ = cause
    return error


def _deliver_undelivered(options: argparse.Namespace) -> int:
    """Deliver the events that were queued when a run ended to their writers; return the exit code."""
    try:
        undelivered_logs = _find_undelivered(options)
    except (ImportError, OSError, ValueError) as error:
        return failed(options, error, 2)
    code = 0
    for undelivered in undelivered_logs:
        log, name = undelivered.log, undelivered.recipe.name
        if undelivered.writer is None:
            sys.stderr.write(
                f"eventloop: {log} holds events for {on_a_line(name)}, which cannot be made "
                "again: deliver it with --to, or in Python with eventloop.replay(log, bus)\n"
            )
            code = 1
            continue
        try:
            report = _deliver(undelivered, options.run)
        except Exception as error:  # one writer has raised it; the others still get their events
            code = failed(options, type(error)(f"{name}: {error}; {log} stays"), 1)
        else:
            description = report.describe(into=name, unknown=f"{IMPORT} them")
            sys.stderr.write(f"eventloop: {on_a_line(description)}\n")
    return code


def _deliver(undelivered: UndeliveredLog, run: Path) -> ReplayReport:
    """Deliver the events of one log, and print the progress, also when an error or a signal stops it."""
    from eventloop.eventlog.redelivery import Delivery

    name = on_a_line(undelivered.recipe.name)
    last_printed = monotonic()

    def print_progress(delivery: Delivery) -> None:
        """Print the number of delivered events, at most once in `PROGRESS_SECONDS`."""
        nonlocal last_printed
        if (now := monotonic()) - last_printed >= PROGRESS_SECONDS:
            last_printed = now
            counts = f"{delivery.written:,} of {delivery.total:,}"
            sys.stderr.write(f"eventloop: {name}: {counts} events delivered\n")

    delivery = Delivery(undelivered, run, print_progress)
    try:
        with _exiting_at_sigterm():
            return delivery.run()
    except BaseException:
        done, total = delivery.stored, delivery.total
        sys.stderr.write(
            f"eventloop: {name}: {done:,} of {total:,} events delivered, {total - done:,} left for the next "
            "replay\n"
        )
        raise


@contextmanager
def _exiting_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, with exit code 143."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    former_handler = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former_handler)


def _find_undelivered(options: argparse.Namespace) -> list[UndeliveredLog]:
    """Return the logs of the events that were still queued when the run ended; raise for bad input."""
    from eventloop.eventlog.redelivery import find_undelivered
    from eventloop.eventlog.undelivered import FOLDER

    if options.only or options.out is not None:
        raise ValueError("--only and --out belong to --to: without it each event goes to its own writer")
    if not options.run.is_dir():
        raise FileNotFoundError(f"no run at {options.run}: give the run's directory")
    for module in options.modules:
        _import(module)
    if not (undelivered_logs := find_undelivered(options.run)):
        former_logs = sorted(map(str, options.run.glob(f"{FOLDER}_*/*.evl")))  # renamed at a resume
        hint = f"The run before a resume left {', '.join(former_logs)}: give this file, with --to. "
        raise FileNotFoundError(
            f"{options.run / FOLDER} holds nothing: no events wait there for their writers. "
            f"{hint if former_logs else ''}"
            f"--to TARGET writes its event log with another writer: {', '.join(TARGETS)}"
        )
    return undelivered_logs


def _no_event(log: Path, report: ReplayReport) -> str:
    """Return why a log holds no event: it is damaged, or the run has written none."""
    damaged_bytes = report.damaged + (0 if report.torn is None else report.torn.size)
    if damaged_bytes:
        return f"{log} holds no whole event: {damaged_bytes:,} of its bytes are torn or damaged"
    return f"{log} holds no event: the run was killed before it wrote one, or is about to write it"


def _output_of(job: Job, report: ReplayReport) -> Path | None:
    """Return the writer's file or folder, or else the job's directory; None if nothing was written."""
    if job.made is not None:
        return job.made if job.made.exists() else None
    if not report.emitted or _is_a("ConsoleWriter", job.writer):
        return None
    has_files = any(not path.name.startswith(".") for path in job.out.iterdir())
    return job.out if has_files else None


# --- input ------------------------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace) -> Job:
    """Check the user's input, and return the job.

    Raises:
        ImportError, OSError, ValueError, TypeError: the input is bad; the message names it.
    """
    from eventloop.eventlog.reader import find_log, read_events
    from eventloop.eventlog.replay import folder_of

    log = find_log(options.run)
    read_events(log)
    for module in options.modules:
        _import(module)
    _check_events(options.only or [])
    writer = _make_writer(options.to, options.only, dict(options.settings))
    if options.to == "console" and options.out is not None:
        raise ValueError(
            "--out is for targets that write files, and the console writes none: leave --out out"
        )
    out: Path = options.out or folder_of(log)
    made = _made_by(writer, out)
    if _is_a("EventLogWriter", writer) and out.resolve() == log.resolve().parent:
        raise ValueError(f"{out} is the run itself, whose {log.name} is replayed: choose another --out")
    if made is not None and lexists(made):
        raise ValueError(f"{made} exists already: choose another --out, or remove it")
    return Job(log, writer, out, made)


@contextmanager
def _finding_modules_here() -> Iterator[None]:
    """Search modules also in the current directory within the block, as `--import` needs.

    Otherwise it is not searched: it may be the directory of an untrusted run, with a file `tensorboard.py`.
    """
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove("")


def _import(name: str) -> None:
    """Import a module that declares events or registers writers."""
    try:
        import_module(name)
    except (Exception, SystemExit) as error:
        reason = error_text(error)
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            reason = "no such module is installed or in the current directory"
        if name.endswith(".py"):
            reason = f"expected the name of a module, as in an import: {name[:-3].replace(os.sep, '.')}"
        raise ImportError(f"--import {name} failed: {reason}") from error


def _check_events(names: list[str]) -> None:
    """Raise ValueError for a name that is not the name of a declared event."""
    from eventloop.events.base import ALIASES, event_name
    from eventloop.events.catalogue import declared_events, find_event
    from eventloop.util.suggest import suggest

    declared = [event_name(event) for event in declared_events()]
    for name in names:
        if name in declared or name in ALIASES:
            find_event(name)  # raises if two modules have declared an event of this name
        elif name != "*":
            hint = suggest(name, [*declared, *ALIASES])
            raise ValueError(f"unknown event {name!r}{hint}; {IMPORT} an event of yours")


def _made_by(writer: Sink, out: Path) -> Path | None:
    """Return the file or folder that a writer will create in the directory `out`; None if it is unknown."""
    if _is_a("TensorBoardWriter", writer):
        log_dir: str | PathLike[str] | None = getattr(writer, "log_dir", None)
        return out / "tensorboard" if log_dir is None else Path(log_dir)
    for name, attribute in OUTPUT_ATTRIBUTES.items():
        if _is_a(name, writer):
            file_name: str | PathLike[str] | None = getattr(writer, attribute, None)
            return None if file_name is None else out / file_name
    return None


def _is_a(name: str, writer: Sink) -> bool:
    """Return whether the writer is of a class by name, which is not imported before it is needed."""
    from eventloop.registry import WRITERS

    cls = WRITERS.find(name)
    return cls is not None and isinstance(writer, cls)


def _argument(text: str) -> tuple[str, Any]:
    """Return the name and the value of a `--set` option, for argparse, which shows the error."""
    from eventloop.eventlog.set_values import value_of

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as project=digits, got {text!r}")
    try:
        return name, value_of(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}: {on_a_line(str(error))}") from None


def _make_writer(target: str, only: list[str] | None, arguments: dict[str, Any]) -> Sink:
    """Return the writer of `--to` with its arguments; refuse it if it takes none of the `--only` events."""
    from eventloop.events.base import event_name
    from eventloop.events.catalogue import find_event, several
    from eventloop.registry import WRITERS, build
    from eventloop.util.suggest import suggest

    cls: Any = WRITERS.find(TARGETS.get(target, target))
    if not isinstance(cls, type) or target == "Writer":
        raise ValueError(f"unknown target {target!r}{suggest(target, [*TARGETS, *WRITERS.names()])}")
    options: dict[str, Any] = {"type": cls, **arguments}
    if target == "console":
        options["progress"] = False
    elif target == "jsonl" and only:
        options["events"] = only
    writer: Sink = build(options)
    events = several(writer.events)
    if only and "*" not in (*only, *events):
        supported = {find_event(event) for event in events}
        if supported.isdisjoint(find_event(event) for event in only):
            names = ", ".join(sorted(event_name(event) for event in supported))
            raise ValueError(f"{cls.__name__} takes none of {', '.join(only)}: it takes {names}")
    return writer
