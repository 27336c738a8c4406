"""Run a training script as Python would, up to the moment when its run would begin.

`plan` uses it for scripts, and `plan_config` for Python files that may be scripts.
"""

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


class RehearsalResult(NamedTuple):
    """The result of a script that was run up to its training."""

    reached: Reached | None
    plans: list[list[EventPlan]]
    has_buses: bool
    code: int
    """The exit code of a script that exited by itself, 1 after an error, which was shown."""
    left: list[Path]
    """Directories of trainers that were created, and stay because the script has put something there."""


def rehearse(path: Path, arguments: Sequence[str], *, quiet: bool = False) -> RehearsalResult:
    """Run a script until it would begin a run, or ends.

    Args:
        quiet: redirect its output to standard error.
    """
    rehearsal, code = Rehearsal(), 0
    try:
        with rehearsal, as_script(path, arguments), stdout_to_stderr(quiet):
            code = _run(path)
    finally:
        left = rehearsal.remove_directories()
    return result_of(rehearsal, code, left)


def result_of(rehearsal: Rehearsal, code: int, left: list[Path]) -> RehearsalResult:
    """Return the result of a rehearsal that has ended."""
    reached = rehearsal.reached
    plans = rehearsal.plans() if reached is None else reached.plans
    return RehearsalResult(reached, plans, rehearsal.has_buses, code, left)


def exit_code(ended: SystemExit) -> int:
    """Return the code of a `sys.exit`; a message is printed, as Python does, and gives 1."""
    if not isinstance(ended.code, int | None):
        sys.stderr.write(f"{ended.code}\n")
        return 1
    return ended.code or 0


def stdout_to_stderr(quiet: bool) -> AbstractContextManager[object]:
    """Redirect standard output to standard error, if `quiet`."""
    return redirect_stdout(sys.stderr) if quiet else nullcontext()


def _run(path: Path) -> int:
    """Run a script; return its exit code, without errors after the run was reached."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except RunReached:
        pass
    except SystemExit as ended:
        return exit_code(ended)
    except Exception as error:
        if not _after_reached_run(error):
            _show(error, path)
        return 1
    return 0


def _after_reached_run(error: BaseException | None) -> bool:
    """Return whether an error comes from a clean-up after a run that did not begin."""
    while error is not None:
        if isinstance(error, RunReached):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def as_script(path: Path, arguments: Sequence[str], *also: str) -> Iterator[None]:
    """Set the interpreter as for a script: its arguments and its module path, to which `also` is added.

    No bytecode is written.
    """
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
    """Print the traceback that Python would print: it begins in the script."""
    began: TracebackType | None = error.__traceback__
    while began is not None and began.tb_frame.f_code.co_filename != str(path):
        began = began.tb_next
    if began is None and not isinstance(error, SyntaxError):
        began = error.__traceback__
    traceback.print_exception(type(error), error, began)
