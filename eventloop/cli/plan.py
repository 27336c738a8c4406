"""The command `eventloop plan`: who runs when, before anything runs."""

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

if TYPE_CHECKING:  # not for --help
    from eventloop.bus.event_order import EventPlan
    from eventloop.cli.plan_config import ConfigPlan
    from eventloop.cli.plan_script import Rehearsed

DESCRIPTION = """\
Shows every event somebody listens to, in the order of a run, and who hears it: handlers on the training thread in the
order they run, then background subscribers, where they run, and how many events may wait for them.

A script is run as Python would run it, until its trainer would begin to train, validate or test: nothing is trained and
no writer opens a file. A bus without a trainer begins with the first event that somebody would hear; of a script that
ends before, the buses it made are shown. What the script does before its run it does here too, reading a checkpoint
included; what it starts in other processes is not held back.

A config is a .json, .toml or .yaml file, or a Python file that assigns one of default_hooks, custom_hooks, hooks,
writers, train_cfg, max_epochs, max_iters and besides only imports, assigns and defines; one that in doing so begins a
run, or makes a trainer or a bus, is the script it is. Its hooks and writers are built with a model of one weight and an
optimizer; nothing else of it is looked at. JSON, TOML and YAML are data: such a config names registered hooks and
writers, and as its _base_ files of these kinds in its own folder; --trust lets it run code."""
EXIT_CODES = (
    "exit codes: 0 done, 1 the script failed (with its traceback), 2 bad input, or an output that takes nothing (one line), 130 ended by Ctrl-C; "
    "a script that ends itself with another code before its run gives that one"
)


def add_parser(commands: Any) -> None:
    """Add the command to those of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="show who runs when in a training script or a config, before anything runs",
        description=DESCRIPTION, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--json] [--trust] [--traceback] CONFIG | SCRIPT [-- ARGUMENT ...]",
    )  # fmt: skip
    parser.add_argument(
        "file", type=Path, metavar="CONFIG | SCRIPT", help="what to look at; a script's arguments follow after --"
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="for programs: one JSON object; what a script prints goes to standard error"
    )  # fmt: skip
    parser.add_argument(
        "--trust", action="store_true",
        help="let a config in JSON, TOML or YAML import modules (custom_imports), and be based on any file, Python included",
    )  # fmt: skip
    parser.add_argument("--traceback", action="store_true", help="show where bad input was found")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and those of the script, after the first `--`: argparse would lose a second one."""
    given = list(arguments)
    if given[:1] != ["plan"] or "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


def meant(file: Path, unknown: Sequence[str]) -> str:
    """What the error adds of arguments that are not the command's own: after the name of a script they are the script's,
    everywhere else."""
    return f"; those of a script follow after --: eventloop plan {shlex.join([str(file), '--', *unknown])}"


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    from eventloop.cli.plan_config import ConfigPlan
    from eventloop.cli.plan_script import rehearse

    try:
        found = _config(options)
    except Exception as error:
        if options.traceback:
            raise
        _complain(f"{error} (--traceback shows where)")
        return 2
    if isinstance(found, ConfigPlan):
        return _show_config(options, found)
    return _show_script(options, found or rehearse(options.file, options.arguments, quiet=options.json))


def _config(options: argparse.Namespace) -> ConfigPlan | Rehearsed | None:
    """The plan of a config, or of a script that looked like one; None for one that does not, and is still to be run."""
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


def _show_script(options: argparse.Namespace, done: Rehearsed) -> int:
    for path in done.left:
        held = ", ".join(sorted(inside.name for inside in path.iterdir()))
        _complain(f"{path} was made and stays: the script has put {held} there")
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
    _complain(f"{path} ended without a run, and has made neither a Trainer nor a Bus")
    return 2


def _complain(text: str) -> None:
    """On one line, whatever paths and messages of others have in them."""
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
    """Print the plans of one bus, or of several."""
    import msgspec

    from eventloop.bus.table import plan_table

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
