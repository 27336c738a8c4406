"""The command `eventloop replay`: any writer, driven from a run's event log."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from os import PathLike
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.util.formatting import on_a_line
from eventloop.util.terminal import drop_output
from eventloop.util.text import error_text

if TYPE_CHECKING:  # not for --help
    from eventloop.eventlog.replay import ReplayReport, Sink

TARGETS = {
    "tensorboard": "TensorBoardWriter",
    "jsonl": "JSONLWriter",
    "csv": "CSVWriter",
    "console": "ConsoleWriter",
}
MADE = {
    "JSONLWriter": "filename",
    "CSVWriter": "filename",
    "EventLogWriter": "filename",
    "ImageFileWriter": "folder",
}
"""The attribute of a writer, or of one derived from it, that says what it makes within --out. TensorBoard's has its own
rule."""
EXIT_CODES = (
    "exit codes: 0 done, also where a kill left a torn end; 1 a file could not be written, or bytes in the middle of the log are "
    "damaged, and what is whole is replayed; 2 bad input, or a log without an event (one line each), 130 ended by Ctrl-C"
)
IMPORT = "--import MODULE imports the module that declares"


class Job(NamedTuple):
    """What is to be done."""

    log: Path
    writer: Sink
    out: Path
    """Where it writes."""
    made: Path | None
    """What it makes there, if that is known."""


def add_parser(commands: Any) -> None:
    """Add the command to those of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay", help="write what a run's event log holds with another writer", epilog=EXIT_CODES,
        usage="%(prog)s [-h] RUN --to TARGET [--only EVENT [EVENT ...]] [--import MODULE] [--out DIR] [--traceback]",
    )  # fmt: skip
    parser.add_argument(  # "?" because argparse would only say that it is missing, where --only has taken it
        "run", type=Path, nargs="?", metavar="RUN", help="the run's directory, or its event log"
    )
    parser.add_argument(
        "--to", required=True, metavar="TARGET",
        help=f"{', '.join(TARGETS)}, or the class name of another writer that needs no arguments",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="EVENT",
        help='names of events, e.g. scalars_logged; "*" for all; RUN comes before it',
    )  # fmt: skip
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="import a module first, found from here or installed, that declares events of your own, or registers a "
        "writer; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where files go (default: replay, in the run's directory)"
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was found")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    with _finding_modules_here() if options.modules else nullcontext():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        job = _prepare(options)
    except (ImportError, OSError, ValueError, TypeError) as error:
        return _failed(options, error, 2)
    from eventloop.eventlog.replay import replay

    try:
        report = replay(job.log, job.writer, only=options.only, on_torn="ignore", work_dir=job.out)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as in `eventloop replay ... --to console | head`
        drop_output()
        return 0
    except OSError as error:
        return _failed(options, error, 1)
    if report.empty:
        return _failed(options, ValueError(_no_event(job.log, report)), 2)
    told = report.describe(into=_where(job, report) or "", unknown=f"{IMPORT} them")
    sys.stderr.write(f"eventloop: {on_a_line(told)}\n")
    return 1 if report.damaged else 0


def _failed(options: argparse.Namespace, error: Exception, code: int) -> int:
    if options.traceback:
        raise error
    sys.stderr.write(f"eventloop: {on_a_line(str(error))} (--traceback shows where)\n")
    return code


def _no_event(log: Path, report: ReplayReport) -> str:
    lost = report.damaged + (0 if report.torn is None else report.torn.size)
    if lost:
        return f"{log} holds no whole event: {lost:,} of its bytes are torn or damaged"
    return f"{log} holds no event: the run was killed before it wrote one, or is about to write it"


def _where(job: Job, report: ReplayReport) -> Path | None:
    """What was made, or else where something was."""
    if job.made is not None:
        return job.made if job.made.exists() else None
    wrote = report.emitted and not _is_a("ConsoleWriter", job.writer)
    return job.out if wrote and any(job.out.iterdir()) else None


# --- what is asked for ------------------------------------------------------------------------------------


def _prepare(options: argparse.Namespace) -> Job:
    """All that can be wrong with what the user asked for is found here.

    Raises:
        ImportError, OSError, ValueError, TypeError: see the message.
    """
    from eventloop.eventlog.reader import find_log, read_events
    from eventloop.eventlog.replay import folder_of

    if options.run is None:
        raise ValueError(_no_run(options))
    log = find_log(options.run)
    read_events(log)
    for module in options.modules:
        _import(module)
    _check_events(log, options.only or [])
    writer = _make_writer(options.to, options.only)
    if options.to == "console" and options.out is not None:
        raise ValueError("--out is for targets that write files: the console has none")
    out: Path = options.out or folder_of(log)
    made = _made_by(writer, out)
    if _is_a("EventLogWriter", writer) and out.resolve() == log.resolve().parent:
        raise ValueError(f"{out} is the run itself, and {log.name} what is replayed: choose another --out")
    if made is not None and lexists(made):
        raise ValueError(f"{made} exists already: choose another --out, or remove it")
    return Job(log, writer, out, made)


def _no_run(options: argparse.Namespace) -> str:
    missing = "no RUN is given, the run's directory or its event log"
    if not options.only:
        return missing
    taken = next((word for word in options.only if Path(word).exists()), None)
    if taken is None:
        return f"{missing}: put it first, --only takes all the words behind it"
    events = " ".join(word for word in options.only if word != taken)
    return (
        f"{missing}: --only takes all the words behind it, {taken!r} too; put that first: "
        f"eventloop replay {taken} --to {options.to}{f' --only {events}' if events else ''}"
    )


@contextmanager
def _finding_modules_here() -> Iterator[None]:
    """Import from the current directory only for --import: an untrusted run may hold a tensorboard.py."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove("")


def _import(name: str) -> None:
    """Import a module, for what it declares.

    Raises:
        ImportError: that fails, however it does.
    """
    try:
        import_module(name)
    except (Exception, SystemExit) as error:
        why = error_text(error)
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            why = "there is no such module here, nor among those that are installed"
        if name.endswith(".py"):
            why = f"give its name as an import has it, {name[:-3].replace(os.sep, '.')}"
        raise ImportError(f"--import {name} failed: {why}") from error


def _check_events(log: Path, names: list[str]) -> None:
    """Refuse names nobody declares; what the log has of them is told.

    Raises:
        ValueError: an unknown event.
    """
    from eventloop.events.base import ALIASES, event_name
    from eventloop.events.catalogue import declared_events, find_event
    from eventloop.util.suggest import suggest

    declared = [event_name(event) for event in declared_events()]
    for name in names:
        if name in declared or name in ALIASES:
            find_event(name)  # which two modules may have declared
        elif name != "*":
            held = _undeclared_in(log)
            if name in held:
                raise ValueError(f"unknown event {name!r}, of which the log has {held[name]:,}: {IMPORT} it")
            raise ValueError(f"unknown event {name!r}{suggest(name, [*declared, *ALIASES, *held])}")


def _undeclared_in(log: Path) -> dict[str, int]:
    """The events of a log that nothing imported declares: name and count."""
    from eventloop.eventlog.reader import read_events

    reader = read_events(log, on_torn="ignore")
    for _ in reader.blocks():
        pass
    return reader.unknown


def _made_by(writer: Sink, out: Path) -> Path | None:
    """The file or the folder that a writer makes, however it was named; None where only its author knows."""
    if _is_a("TensorBoardWriter", writer):
        log_dir: str | PathLike[str] | None = getattr(writer, "log_dir", None)
        return out / "tensorboard" if log_dir is None else Path(log_dir)
    for name, attribute in MADE.items():
        if _is_a(name, writer):
            within: str | PathLike[str] | None = getattr(writer, attribute, None)
            return None if within is None else out / within
    return None


def _is_a(name: str, writer: Sink) -> bool:
    from eventloop.registry import WRITERS

    cls = WRITERS.find(name)
    return cls is not None and isinstance(writer, cls)


def _make_writer(target: str, only: list[str] | None) -> Sink:
    from eventloop.events.base import event_name
    from eventloop.events.catalogue import find_event, several
    from eventloop.registry import WRITERS
    from eventloop.util.suggest import suggest

    cls: Any = WRITERS.find(TARGETS.get(target, target))
    if not isinstance(cls, type) or target == "Writer":
        raise ValueError(f"unknown target {target!r}{suggest(target, [*TARGETS, *WRITERS.names()])}")
    if target == "console":
        made: Sink = cls(progress=False)
    elif target == "jsonl" and only:
        made = cls(events=only)
    else:
        made = cls()
    events = several(made.events)
    if only and "*" not in (*only, *events):
        taken = {find_event(event) for event in events}
        if taken.isdisjoint(find_event(event) for event in only):
            names = ", ".join(sorted(event_name(event) for event in taken))
            raise ValueError(f"{cls.__name__} takes none of {', '.join(only)}: it takes {names}")
    return made
