"""A training script, run as Python would run it, up to the moment its run would begin."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from eventloop.bus.dry_run import Reached, Rehearsal, RunReached
from eventloop.bus.event_order import EventPlan


class Rehearsed(NamedTuple):
    """What became of a script."""

    reached: Reached | None
    plans: list[list[EventPlan]]
    has_buses: bool
    code: int
    """The exit code of a script that ended itself, 1 after an error, which was shown."""
    left: list[Path]
    """Directories of trainers' files that were made, and stay because the script has put something there."""


def rehearse(path: Path, arguments: Sequence[str], *, quiet: bool = False) -> Rehearsed:
    """Run a script until it would begin a run, or ends.

    Args:
        quiet: what it prints goes to standard error.
    """
    rehearsal, code = Rehearsal(), 0
    try:
        with rehearsal, as_python_runs(path, arguments), hushed(quiet):
            code = _run(path)
    finally:
        left = rehearsal.remove_directories()
    return what_became(rehearsal, code, left)


def what_became(rehearsal: Rehearsal, code: int, left: list[Path]) -> Rehearsed:
    """The account of a rehearsal that is over."""
    reached = rehearsal.reached
    plans = rehearsal.plans() if reached is None else reached.plans
    return Rehearsed(reached, plans, rehearsal.has_buses, code, left)


def exit_code(ended: SystemExit) -> int:
    """What `sys.exit` was given; a message is shown, as Python does."""
    if not isinstance(ended.code, int | None):
        sys.stderr.write(f"{ended.code}\n")
        return 1
    return ended.code or 0


def hushed(quiet: bool) -> AbstractContextManager[object]:
    """Have what is printed go to standard error, if it must not be in the output."""
    return redirect_stdout(sys.stderr) if quiet else nullcontext()


def _run(path: Path) -> int:
    """Run it, and return its exit code; what it does after a run was reached, on its way out, does not count."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except RunReached:
        pass
    except SystemExit as ended:
        return exit_code(ended)
    except Exception as error:
        if not _on_its_way_out(error):
            _show(error, path)
        return 1
    return 0


def _on_its_way_out(error: BaseException | None) -> bool:
    """True for an error of a clean-up that met a run which never began."""
    while error is not None:
        if isinstance(error, RunReached):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def as_python_runs(path: Path, arguments: Sequence[str], *also: str) -> Iterator[None]:
    """Set what a script sees of the interpreter, and have it leave no bytecode; modules are found in `also` too."""
    argv, first, bytecode = sys.argv, sys.path[:1], sys.dont_write_bytecode
    places = [str(path.resolve().parent), *also]
    sys.argv = [str(path), *arguments]
    sys.path[:1] = places
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.argv, sys.dont_write_bytecode = argv, bytecode
        for place in places:
            if place in sys.path:
                sys.path.remove(place)
        sys.path[:0] = first


def _show(error: BaseException, path: Path) -> None:
    """Print the traceback Python would: it begins in the script."""
    began: TracebackType | None = error.__traceback__
    while began is not None and began.tb_frame.f_code.co_filename != str(path):
        began = began.tb_next
    if began is None and not isinstance(error, SyntaxError):
        began = error.__traceback__
    traceback.print_exception(type(error), error, began)
