"""Implement `eventloop plan`, which lists the subscribers of each event of a script or config.

It runs a script until its training would begin. `config` builds the hooks of a config. May import every
package.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.output_file import failed
from eventloop.processes.dry_run import PLAN_FILE
from eventloop.util.formatting import on_a_line
from eventloop.util.terminal import print_line

if TYPE_CHECKING:  # slow imports, which --help does not need
    from eventloop.bus.dry_run import ProgramPlan

DESCRIPTION = """\
Shows every event that has a subscriber, in the order of a run, and its subscribers: handlers on the training
thread in the order of their calls, then background subscribers, where they run, and how many events their
queues hold.

A script is run by Python until its trainer would begin to train, validate or test: nothing is trained, no
writer opens a file, and a work_dir that does not exist is replaced by a temporary one. A bus without a
trainer stops the script at the first event that has a subscriber; if the script ends before, the buses it
made are shown. Everything that the script does before its run is done here too, such as reading a checkpoint
or starting processes.

A config is a .json, .toml or .yaml file, or a Python file that makes neither a trainer nor a bus and assigns
one of default_hooks, custom_hooks, hooks, writers, train_cfg, max_epochs, max_iters. Its hooks and writers
are built with a model of one weight and an optimizer; its other names are ignored. JSON, TOML and YAML are
data: such a config names registered hooks and writers. Python configs with _base_, custom_imports or
read_base are read by MMEngine, if it is installed."""
EXIT_CODES = """\
exit codes: 0 done, 1 the script failed (with its traceback), 2 bad input, or the output cannot be written,
130 ended by Ctrl-C; a script that exits before its run gives its own code"""


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="show the subscribers of each event of a script or a config, without running it",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--json] [--traceback] CONFIG | SCRIPT [-- ARGUMENT ...]",
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="CONFIG | SCRIPT",
        help="a config or a training script; the arguments of a script follow after --",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, for programs; the output of a script goes to standard error",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error in the input"
    )


def script_hint(file: Path, unknown: Sequence[str]) -> str:
    """Return the end of an error on unknown arguments: those for the script must follow `--`."""
    return f"; those of a script follow after --: eventloop plan {shlex.join([str(file), '--', *unknown])}"


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    with tempfile.TemporaryDirectory(prefix="eventloop-plan-") as folder:
        plan_file = Path(folder, "plan.json")
        try:
            return _plan(options, plan_file)
        except (ImportError, OSError, TypeError, ValueError) as error:
            return failed(options, error, 2)


def _plan(options: argparse.Namespace, plan_file: Path) -> int:
    """Show the plan of a config, or of a script; a Python file that begins no run is tried as a config."""
    from eventloop.cli.plan.config import DOCUMENTS, is_config

    path: Path = options.file
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}: give a training script or a config")
    if path.suffix not in (".py", *DOCUMENTS):
        raise ValueError(f"{path} is neither a Python file nor a config ({', '.join(DOCUMENTS)})")
    if is_config(path):
        return _show_config(options, plan_file)
    code, plan = _run_script(options, plan_file)
    if plan is not None and not plan.ended:
        begins = f"emit {plan.event}" if plan.event else f"begin {_length(plan.max_epochs, plan.max_iters)}"
        _show(options, f"{plan.where or path} would {begins}", plan)
        return 0
    if code:
        return code
    if plan is None:
        return _show_config(options, plan_file)
    _show(options, f"{path} ends without a run", plan)
    return 0


def _run_script(options: argparse.Namespace, plan_file: Path) -> tuple[int, ProgramPlan | None]:
    """Run the script in a dry run; return its exit code, and the plan that it has written, or None."""
    import msgspec

    from eventloop.bus.dry_run import ProgramPlan

    if sys.stdout is not None:  # None if standard output is closed
        sys.stdout.flush()
    code = subprocess.call(
        [sys.executable, str(options.file), *options.arguments],
        env={**os.environ, PLAN_FILE: str(plan_file), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=2 if options.json else None,  # standard error
    )
    plan = msgspec.json.decode(plan_file.read_bytes(), type=ProgramPlan) if plan_file.exists() else None
    return code if code >= 0 else 128 - code, plan


def _show_config(options: argparse.Namespace, plan_file: Path) -> int:
    """Print the plan of a config; return the exit code."""
    from eventloop.bus.dry_run import ProgramPlan
    from eventloop.cli.plan.config import plan_config

    path: Path = options.file
    if options.arguments:
        raise ValueError(f"{path} is a config, which takes no arguments, got {shlex.join(options.arguments)}")
    with _dry_run(plan_file), redirect_stdout(sys.stderr if options.json else sys.stdout):
        config = plan_config(path)
    plan = ProgramPlan(False, "", "", config.max_epochs, config.max_iters, [config.plan])
    _show(options, f"{path}: {_length(config.max_epochs, config.max_iters)}", plan)
    return 0


@contextmanager
def _dry_run(plan_file: Path) -> Iterator[None]:
    """Make this process a dry run within the block, so that hooks and writers start nothing."""
    os.environ[PLAN_FILE] = str(plan_file)
    try:
        yield
    finally:
        del os.environ[PLAN_FILE]


def _length(max_epochs: int | None, max_iters: int | None) -> str:
    """Return the length of a run as text, such as "a run of 3 epochs, 300 iterations"."""
    iters = f"{max_iters:,} iteration{'s' * (max_iters != 1)}" if max_iters is not None else ""
    if max_epochs is None:
        return f"a run of {iters}"
    return f"a run of {max_epochs:,} epoch{'s' * (max_epochs != 1)}{f', {iters}' if iters else ''}"


def _show(options: argparse.Namespace, head: str, plan: ProgramPlan) -> None:
    """Print the plan of each bus, as text or as JSON."""
    import msgspec

    from eventloop.bus.event_order import plan_table

    if options.json:
        document = {"file": str(options.file), **msgspec.to_builtins(plan)}
        print_line(json.dumps(document, indent=2))
        return
    tables = [plan_table(rows) for rows in plan.buses or [[]]]  # without a bus, one table without rows
    if len(tables) > 1:
        tables = [f"bus {n} of {len(tables)}\n{table}" for n, table in enumerate(tables, start=1)]
    print_line("\n\n".join([on_a_line(head), *tables]))
