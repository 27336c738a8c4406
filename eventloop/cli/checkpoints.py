"""The command `eventloop checkpoints`: what a run has saved, whether it is whole, and what of it may go."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.util.formatting import on_a_line
from eventloop.util.terminal import at_least_one, say

if TYPE_CHECKING:  # not for --help
    from eventloop.checkpoint.listing import Stock

EXIT_CODES = (
    "exit codes: 0 done, 1 something is damaged or was not removed, 2 bad input (one line), 130 ended by Ctrl-C. "
    "Whether a save is under way is told by its process, which only the machine it runs on knows: prune there."
)


def add_parser(commands: Any) -> None:
    """Add the command to those of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "checkpoints", help="list, verify and prune the checkpoints of a run", epilog=EXIT_CODES
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory that holds the checkpoints")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every file and compare it with its hash; without it sizes are compared",
    )
    parser.add_argument(
        "--prune", type=at_least_one, metavar="N",
        help="keep the newest N and of each metric the best that its run keeps, having verified them; remove the others, and what killed "
        "saves have left",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="prune without asking")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.add_argument("--traceback", action="store_true", help="show where an error was found")


def run(options: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    try:
        stock = _stock(options)
        if options.verify:
            stock.verify()
        return _list(options, stock) if options.prune is None else _prune(options, stock)
    except (OSError, ValueError) as error:
        if options.traceback:
            raise
        _complain(f"{error} (--traceback shows where)")
        return 2


def _stock(options: argparse.Namespace) -> Stock:
    """What there is to tell of.

    Raises:
        OSError, ValueError: bad input.
    """
    from eventloop.checkpoint.listing import Stock

    if options.yes and options.prune is None:
        raise ValueError("--yes goes with --prune N")
    if not options.run.is_dir():
        raise ValueError(f"no directory at {options.run}: give the one that holds the checkpoints")
    stock = Stock(options.run)
    _check_something(stock)
    return stock


def _check_something(stock: Stock) -> None:
    """Refuse a directory with nothing to tell of.

    Raises:
        ValueError: it is a checkpoint itself, or holds none.
    """
    from eventloop.checkpoint.directory import find_checkpoints, leftovers
    from eventloop.checkpoint.manifest import MANIFEST

    run = stock.directory
    if (run / MANIFEST).is_file():
        raise ValueError(f"{run} is a checkpoint: give the directory that holds it, {run.resolve().parent}")
    if stock.found.paths or stock.files or stock.found.damaged or leftovers(run):
        return
    inside = sorted(path.name for path in run.iterdir() if path.is_dir() and find_checkpoints(path))
    hint = f": there are some in {', '.join(inside)}" if inside else ""
    raise ValueError(f"{run} holds no checkpoint{hint}")


def _list(options: argparse.Namespace, stock: Stock) -> int:
    from eventloop.cli.listing_text import as_json, as_lines

    inventory = stock.inventory()
    say(as_json(inventory) if options.json else as_lines(inventory))
    if not inventory.checkpoints and not inventory.damaged:
        _complain(f"{stock.directory} holds no checkpoint")
        return 2
    return 1 if inventory.damaged else 0


def _prune(options: argparse.Namespace, stock: Stock) -> int:
    """Say what goes, ask, remove it."""
    from eventloop.checkpoint.prune import carry_out, make_plan
    from eventloop.cli.listing_text import as_json, as_lines, plan_lines

    plan = make_plan(stock, options.prune)  # it reads what stays: the list names what is damaged of it
    inventory = stock.inventory()
    shown = f"{as_lines(inventory)}\n{plan_lines(inventory, plan)}"
    if not options.json:
        say(shown)
    going = bool(plan.remove or plan.leftovers)
    agreed, code = _ask(options, shown) if going else (False, 0)
    failed = carry_out(stock, plan) if agreed else []
    for reason in failed:
        _complain(reason)
    if options.json:
        say(as_json(inventory, plan, removed=agreed, failed=failed))
    return code or (1 if inventory.damaged or failed or not plan.keep else 0)


def _ask(options: argparse.Namespace, shown: str) -> tuple[bool, int]:
    """Whether to remove it, and the exit code if that alone decides."""
    if options.yes:
        return True, 0
    if sys.stdin is None or sys.stderr is None or not sys.stdin.isatty():
        _complain("nothing was removed, nobody can be asked here: --yes removes it")
        return False, 2
    sys.stderr.write(f"{shown}\nRemove it? [y/N] " if options.json else "Remove it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True, 0
    _complain("nothing was removed")
    return False, 0


def _complain(text: str) -> None:
    """On one line, whatever paths have in them; where standard error is closed the exit code alone tells."""
    if sys.stderr is not None:
        sys.stderr.write(f"eventloop: {on_a_line(text)}\n")
