"""Implement `eventloop checkpoints`, which lists, verifies, consolidates and prunes a run's checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.output_file import failed, print_stderr
from eventloop.util.errors import CheckpointError, WorkDirInUseError
from eventloop.util.terminal import at_least_one, print_line

if TYPE_CHECKING:  # slow imports, which --help does not need
    from eventloop.checkpoint.listing import Stock
    from eventloop.checkpoint.prune import Plan

EXIT_CODES = (
    "exit codes: 0 done, 1 something is damaged, was not removed or does not fit the format, 2 bad input, "
    "130 ended by Ctrl-C. A run that is under way removes its own checkpoints, so nothing is "
    "pruned during it."
)
REMEDY = (
    "prune once it has ended; a run keeps as many checkpoints as its CheckpointHook(max_keep_ckpts=...) says"
)


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "checkpoints", help="list, verify, consolidate and prune the checkpoints of a run", epilog=EXIT_CODES
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory that holds the checkpoints")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every file and compare it with its hash; without --verify the sizes are compared",
    )
    parser.add_argument(
        "--prune",
        type=at_least_one,
        metavar="N",
        help="verify and keep the newest N checkpoints, and of each metric the best ones that its run keeps; "
        "remove the others, and the leftovers of killed saves",
    )
    parser.add_argument(
        "--consolidate",
        nargs="?",
        const="auto",
        metavar="auto|best|NAME",
        help="verify a checkpoint and write it as one file next to it, also one that several ranks have "
        "written: the newest one (auto, also without a value), the best one, or the one with a name, such as "
        "epoch_3",
    )
    parser.add_argument(
        "--format",
        choices=("pth", "safetensors"),
        help="of --consolidate: pth for the whole state (default), safetensors for the weights",
    )
    parser.add_argument("--yes", action="store_true", help="prune without asking")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    try:
        stock = _stock(options)
        if options.consolidate is not None:
            return _consolidate(options, stock)
        if options.prune is not None:
            _refuse_live_owner(options.run)
        if options.verify:
            stock.verify()
        return _list(options, stock) if options.prune is None else _prune(options, stock)
    except CheckpointError as error:
        return failed(options, error, 1)
    except (ImportError, OSError, ValueError, WorkDirInUseError) as error:
        return failed(options, error, 2)


def _stock(options: argparse.Namespace) -> Stock:
    """Check the options, and return the checkpoints in the directory.

    Raises:
        OSError, ValueError: the options are inconsistent, or the directory has no checkpoints.
    """
    from eventloop.checkpoint.listing import Stock

    if options.yes and options.prune is None:
        raise ValueError("--yes needs --prune N: without it nothing is removed")
    _check_consolidate(options)
    if not options.run.is_dir():
        raise ValueError(f"no directory at {options.run}: give the directory that holds the checkpoints")
    stock = Stock(options.run, owned=options.prune is not None)
    _check_not_empty(stock)
    return stock


def _check_not_empty(stock: Stock) -> None:
    """Refuse a directory without any checkpoint, damaged checkpoint or leftover of a killed save."""
    from eventloop.checkpoint.commit import MANIFEST
    from eventloop.checkpoint.directory import find_checkpoints
    from eventloop.temporary.leftovers import leftovers

    run = stock.directory
    if (run / MANIFEST).is_file():
        raise ValueError(f"{run} is a checkpoint: give the directory that holds it, {run.resolve().parent}")
    if stock.found.paths or stock.files or stock.found.damaged or leftovers(run):
        return
    folders = sorted(path.name for path in run.iterdir() if path.is_dir() and find_checkpoints(path))
    hint = f": there are some in {', '.join(folders)}" if folders else ""
    raise ValueError(f"{run} holds no checkpoint{hint}")


def _check_consolidate(options: argparse.Namespace) -> None:
    """Refuse options that contradict `--consolidate`, and `--format` without it."""
    if options.consolidate is None:
        if options.format is not None:
            raise ValueError(f"--format {options.format} needs --consolidate: without it no file is written")
        return
    excluded = {"--verify": options.verify, "--prune": options.prune is not None, "--json": options.json}
    if given := [name for name, is_given in excluded.items() if is_given]:
        raise ValueError(
            f"--consolidate verifies one checkpoint, writes one file and prints its path: expected no "
            f"{given[0]} with it"
        )


def _consolidate(options: argparse.Namespace, stock: Stock) -> int:
    """Write one file from the chosen checkpoint, and print its path.

    Raises:
        CheckpointError: the checkpoint is damaged, or its state_dict does not fit the format.
        ImportError, OSError, ValueError: there is no such checkpoint, or the file cannot be written.
    """
    from eventloop.checkpoint.saving.consolidate import consolidate  # it imports torch

    print_line(str(consolidate(_chosen(options.consolidate, stock), options.format or "pth")))
    return 0


def _chosen(name: str, stock: Stock) -> Path:
    """Return the path of the newest checkpoint ("auto"), the best ("best"), or the one with this name.

    If the run keeps the best checkpoints of several metrics, the first metric decides.

    Raises:
        ValueError: there is no such checkpoint, or the name is a path.
    """
    from eventloop.util.file_names import is_plain_name

    found = stock.found
    if name == "best":
        if not (metrics := found.watched()):
            raise ValueError(
                f"{stock.directory} has no best checkpoint: CheckpointHook(save_best=...) saves one"
            )
        return found.ranking(metrics[0])[0]
    if name == "auto":
        if not found.manifests:
            raise ValueError(f"{stock.directory} holds no checkpoint: give the name of a single file")
        return found.newest_first()[0]
    if not is_plain_name(name):
        raise ValueError(f"--consolidate takes auto, best or the name of a checkpoint in RUN, got {name!r}")
    return stock.directory / name


def _list(options: argparse.Namespace, stock: Stock) -> int:
    """Print the checkpoints; return the exit code."""
    from eventloop.cli.listing_text import as_json, as_lines

    inventory = stock.inventory()
    print_line(as_json(inventory) if options.json else as_lines(inventory))
    if not inventory.checkpoints and not inventory.damaged:
        print_stderr(f"{stock.directory} holds no checkpoint")
        return 2
    return 1 if inventory.damaged else 0


def _prune(options: argparse.Namespace, stock: Stock) -> int:
    """Show the checkpoints to remove, ask for confirmation, remove them, and return the exit code."""
    from eventloop.checkpoint.prune import make_plan
    from eventloop.cli.listing_text import as_json, as_lines, plan_lines

    plan = make_plan(stock, options.prune)  # verifies checkpoints to keep, so the listing shows damaged ones
    inventory = stock.inventory()
    listing = f"{as_lines(inventory)}\n{plan_lines(inventory, plan)}"
    if not options.json:
        print_line(listing)
    has_removals = bool(plan.remove or plan.leftovers)
    confirmed, code = _confirm(options, listing) if has_removals else (False, 0)
    failures = _carry_out(stock, plan) if confirmed else []
    for failure in failures:
        print_stderr(failure)
    if options.json:
        print_line(as_json(inventory, plan, removed=confirmed, failed=failures))
    if code:
        return code
    return 1 if inventory.damaged or failures or not plan.keep else 0


def _carry_out(stock: Stock, plan: Plan) -> list[str]:
    """Remove the files of the plan while owning the directory; return a sentence for each failure."""
    from eventloop.checkpoint.prune import carry_out
    from eventloop.ownership.acquiring import owning

    with owning(stock.directory, "pruning", REMEDY):
        return carry_out(stock, plan)


def _refuse_live_owner(run: Path) -> None:
    """Refuse to prune the directory of a run that is under way.

    Raises:
        WorkDirInUseError: the directory has a live owner.
    """
    from eventloop.ownership import read_owner
    from eventloop.ownership.acquiring import describe

    owner = read_owner(run)
    if owner is not None and owner.lives is not False:
        raise WorkDirInUseError(f"{describe(owner)}: {REMEDY}")


def _confirm(options: argparse.Namespace, listing: str) -> tuple[bool, int]:
    """Ask whether to remove the checkpoints; return the answer and an exit code.

    The code is 2 if there is no terminal to ask on, else 0.
    """
    if options.yes:
        return True, 0
    if sys.stdin is None or sys.stderr is None or not sys.stdin.isatty():
        print_stderr(
            "nothing was removed, because there is no terminal to ask on: --yes removes without asking"
        )
        return False, 2
    sys.stderr.write(f"{listing}\nRemove it? [y/N] " if options.json else "Remove it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True, 0
    print_stderr("nothing was removed")
    return False, 0
