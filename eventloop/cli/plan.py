"""The command `eventloop plan`: print which subscribers run at each event, without running anything."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.util.formatting import on_a_line
from eventloop.util.terminal import say

if TYPE_CHECKING:  # --help does without these imports
    from eventloop.bus.event_order import EventPlan
    from eventloop.cli.plan_config import ConfigPlan
    from eventloop.cli.plan_script import RehearsalResult

DESCRIPTION = """\
Shows every event that has a subscriber, in the order of a run, and its subscribers: handlers on the training
thread in the order of their calls, then background subscribers, where they run, and how many events their
queues hold.

A script is run as Python would run it, until its trainer would begin to train, validate or test: nothing is
trained and no writer opens a file. A bus without a trainer stops the script at the first event that has a
subscriber; if the script ends before, the buses it made are shown. Everything that the script does before its
run is done here too, such as reading a checkpoint or starting processes.

A config is a .json, .toml or .yaml file, or a Python file that assigns one of default_hooks, custom_hooks,
hooks, writers, train_cfg, max_epochs, max_iters, and otherwise only imports, assigns and defines. If a Python
file begins a run, or makes a trainer or a bus, it is treated as a script. The hooks and writers of a config
are built with a model of one weight and an optimizer; its other names are ignored. JSON, TOML and YAML are
data: such a config names registered hooks and writers, and its _base_ files are of these kinds and in its own
folder; --trust lets it run code."""
EXIT_CODES = """\
exit codes: 0 done, 1 the script failed (with its traceback), 2 bad input, or the output cannot be written
(one line), 130 ended by Ctrl-C; a script that exits before its run gives its own code"""


def add_parser(commands: Any) -> None:
    """Add the command to those of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="show the subscribers of each event of a script or a config, without running it",
        description=DESCRIPTION, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--json] [--trust] [--traceback] CONFIG | SCRIPT [-- ARGUMENT ...]",
    )  # fmt: skip
    parser.add_argument(
        "file", type=Path, metavar="CONFIG | SCRIPT",
        help="a config or a training script; the arguments of a script follow after --",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON object, for programs; the output of a script goes to standard error",
    )  # fmt: skip
    parser.add_argument(
        "--trust", action="store_true",
        help="let a config in JSON, TOML or YAML import modules (custom_imports), and use any file as "
        "_base_, Python included",
    )  # fmt: skip
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error in the input"
    )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command's own arguments, and those of the script, which follow the first `--`.

    argparse would drop a second `--`.
    """
    given = list(arguments)
    if given[:1] != ["plan"] or "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


def script_hint(file: Path, unknown: Sequence[str]) -> str:
    """Return the hint for unknown arguments: those of a script follow after `--`."""
    return f"; those of a script follow after --: eventloop plan {shlex.join([str(file), '--', *unknown])}"


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from eventloop.cli.plan_config import ConfigPlan
    from eventloop.cli.plan_script import rehearse

    try:
        found = _config(options)
    except Exception as error:
        if options.traceback:
            raise
        _print_error(f"{error} (--traceback shows where)")
        return 2
    if isinstance(found, ConfigPlan):
        return _show_config(options, found)
    return _show_script(options, found or rehearse(options.file, options.arguments, quiet=options.json))


def _config(options: argparse.Namespace) -> ConfigPlan | RehearsalResult | None:
    """Return the plan of a config, or of a script that looks like one; None for another script."""
    from eventloop.cli.plan_config import is_config, plan_config

    if not options.file.is_file():
        raise FileNotFoundError(f"no file at {options.file}: give a training script or a config")
    if not is_config(options.file):
        return None
    return plan_config(options.file, options.arguments, quiet=options.json, trust=options.trust)


def _show_config(options: argparse.Namespace, found: ConfigPlan) -> int:
    head = f"{options.file}: {_length(found.max_epochs, found.max_iters)}"
    _show(options, head, [found.plan], max_epochs=found.max_epochs, max_iters=found.max_iters)
    return 0


def _show_script(options: argparse.Namespace, done: RehearsalResult) -> int:
    for path in done.left:
        held = ", ".join(sorted(inside.name for inside in path.iterdir()))
        _print_error(f"{path} was created and stays: the script has put {held} there")
    reached = done.reached
    if reached is None and (done.code or not done.has_buses):
        return done.code or _nothing(options.file)
    if reached is None:
        _show(options, f"{options.file} ends without a run", done.plans)
        return 0
    what = (
        f"emit {reached.event}"
        if reached.event
        else f"begin {_length(reached.max_epochs, reached.max_iters)}"
    )
    _show(
        options, f"{reached.where or options.file} would {what}", done.plans, where=reached.where,
        event=reached.event, max_epochs=reached.max_epochs, max_iters=reached.max_iters,
    )  # fmt: skip
    return 0


def _nothing(path: Path) -> int:
    _print_error(f"{path} ended without a run, and has made neither a Trainer nor a Bus")
    return 2


def _print_error(text: str) -> None:
    """Print an error on one line, whatever paths and messages contain."""
    sys.stderr.write(f"eventloop: {on_a_line(text)}\n")


def _length(max_epochs: int | None, max_iters: int | None) -> str:
    iters = f"{max_iters:,} iteration{'s' * (max_iters != 1)}" if max_iters is not None else ""
    if max_epochs is None:
        return f"a run of {iters}"
    return f"a run of {max_epochs:,} epoch{'s' * (max_epochs != 1)}{f', {iters}' if iters else ''}"


def _show(
    options: argparse.Namespace,
    head: str,
    plans: list[list[EventPlan]],
    *,
    where: str = "",
    event: str = "",
    max_epochs: int | None = None,
    max_iters: int | None = None,
) -> None:
    """Print the plans of the buses."""
    import msgspec

    from eventloop.bus.event_order import plan_table

    if options.json:
        found = {
            "file": str(options.file), "where": where, "event": event, "max_epochs": max_epochs,
            "max_iters": max_iters, "buses": msgspec.to_builtins(plans),
        }  # fmt: skip
        say(json.dumps(found, indent=2))
        return
    several = [f"bus {i} of {len(plans)}\n" if len(plans) > 1 else "" for i in range(1, len(plans) + 1)]
    tables = [f"{title}{plan_table(plan)}" for title, plan in zip(several, plans, strict=True)]
    say("\n\n".join([on_a_line(head), *(tables or [plan_table([])])]))
