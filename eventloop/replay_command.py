"""The command `eventloop replay`: any writer, driven from a run's event log."""

from __future__ import annotations

import argparse
import sys
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.terminal import drop_output

if TYPE_CHECKING:  # not for --help
    from eventloop.replay import Sink

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
    "exit codes: 0 done, 1 a file could not be written, 2 bad input (one line each), 130 ended by Ctrl-C"
)


def add_parser(commands: Any) -> None:
    """Add the command to those of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay", help="write what a run's event log holds with another writer", epilog=EXIT_CODES
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory, or its event log")
    parser.add_argument(
        "--to", required=True, metavar="TARGET",
        help=f"{', '.join(TARGETS)}, or the class name of another writer that needs no arguments",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="EVENT", help='names of events, e.g. scalars_logged; "*" for all'
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where files go (default: replay, in the run's directory)"
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was found")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    try:
        writer, out, made = _prepare(options)
    except (ImportError, OSError, ValueError, TypeError) as error:
        return _failed(options, error, 2)
    from eventloop.replay import replay

    try:
        report = replay(options.run, writer, only=options.only, on_torn="ignore", work_dir=out)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as in `eventloop replay ... --to console | head`
        drop_output()
        return 0
    except OSError as error:
        return _failed(options, error, 1)
    where = "" if options.to == "console" else f" into {made or out}"
    sys.stderr.write(f"eventloop: {report}{where}\n")
    return 0


def _failed(options: argparse.Namespace, error: Exception, code: int) -> int:
    if options.traceback:
        raise error
    sys.stderr.write(f"eventloop: {error} (--traceback shows where)\n")
    return code


def _prepare(options: argparse.Namespace) -> tuple[Sink, Path, Path | None]:
    """The writer, where it writes, and what it makes there, if that is known: all that can be wrong with what the user
    asked for is found here.

    Raises:
        ImportError, OSError, ValueError, TypeError: see the message.
    """
    from eventloop.event_log import find_log, read_events
    from eventloop.replay import FOLDER

    log = find_log(options.run)
    read_events(log, only=options.only)
    writer = _make_writer(options.to, options.only)
    if options.to == "console" and options.out is not None:
        raise ValueError("--out is for targets that write files: the console has none")
    out: Path = options.out or log.parent / FOLDER
    made = _made_by(writer, out)
    if _is_a("EventLogWriter", writer) and out.resolve() == log.resolve().parent:
        raise ValueError(f"{out} is the run itself, and {log.name} what is replayed: choose another --out")
    if made is not None and made.exists():
        raise ValueError(f"{made} exists already: choose another --out, or remove it")
    return writer, out, made


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
    from eventloop.catalogue import event_name, find_event, suggest
    from eventloop.registry import WRITERS

    cls: Any = WRITERS.find(TARGETS.get(target, target))
    if not isinstance(cls, type) or target == "Writer":
        known = [
            *TARGETS,
            *(name for name in WRITERS.names() if name.endswith("Writer") and name != "Writer"),
        ]
        raise ValueError(f"unknown target {target!r}{suggest(target, known)}")
    if target == "console":
        made: Sink = cls(progress=False)
    elif target == "jsonl" and only:
        made = cls(events=only)
    else:
        made = cls()
    if only and "*" not in (*only, *made.events):
        taken = {find_event(event) for event in made.events}
        if taken.isdisjoint(find_event(event) for event in only):
            names = ", ".join(sorted(event_name(event) for event in taken))
            raise ValueError(f"{cls.__name__} takes none of {', '.join(only)}: it takes {names}")
    return made
