"""Remove superfluous checkpoints, and the temporary paths of killed saves, from a directory.

The command `eventloop checkpoints --prune` uses it: `make_plan` first, then `carry_out`. Damaged checkpoints,
links and single files are never removed. The caller owns the directory. This module imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import msgspec

from eventloop.checkpoint.commit import remove_checkpoint
from eventloop.checkpoint.listing import Stock, list_leftovers
from eventloop.temporary.leftovers import is_alive, remove


class Plan(msgspec.Struct):
    """The names of the checkpoints to keep and to remove, and of temporary paths of killed saves to remove.

    Damaged checkpoints, links and single files are in no list.
    """

    keep: list[str]
    remove: list[str]
    leftovers: list[str]


def make_plan(stock: Stock, count: int) -> Plan:
    """Decide which checkpoints are kept: the newest, the best, and at least one to resume from.

    For each metric the plan keeps as many best checkpoints as the run does. Every file of a checkpoint to
    keep is read first. A damaged checkpoint does not count, and the next one takes its place. If all are
    damaged, nothing is removed.

    Args:
        stock: the checkpoints of a directory.
        count: the number of newest checkpoints to keep.
    """
    found = stock.found
    candidates = [path for path in found.newest_first() if not path.is_symlink()]
    keep = set(_whole(stock, candidates, count))
    for metric in found.watched():
        ranked = [path for path in found.ranking(metric) if path in candidates]
        keep.update(_whole(stock, ranked, found.best_kept(metric)))
    resumable = (path for path in candidates if stock.could_be_whole(path) and not stock.missing(path))
    keep.update(_whole(stock, resumable, 1))
    oldest_first = candidates[::-1]
    superfluous = [path for path in oldest_first if path not in keep and stock.could_be_whole(path)]
    temporary = list_leftovers(stock.directory, owned=stock.owned)
    return Plan(
        keep=[path.name for path in oldest_first if path in keep],
        remove=[path.name for path in superfluous] if keep else [],
        leftovers=[path.name for path in temporary if not path.alive] if keep else [],
    )


def _whole(stock: Stock, paths: Iterable[Path], count: int) -> Iterable[Path]:
    """Return the first `count` paths whose checkpoints are intact; no other checkpoints are read."""
    whole = (path for path in paths if stock.damage_of(path) is None)
    return islice(whole, min(count, sys.maxsize))  # `islice` refuses greater numbers


def carry_out(stock: Stock, plan: Plan) -> list[str]:
    """Remove the paths that a plan lists; return a sentence for each removal that failed.

    The run may have saved since the plan was made. Nothing is removed unless every checkpoint to keep is
    unchanged, and a checkpoint is removed only if it is unchanged itself.
    """
    changed = [name for name in plan.keep if not stock.is_same(stock.directory / name)]
    if changed:
        return [f"nothing was removed: {', '.join(changed)} changed meanwhile; run the command again"]
    errors = []
    for name in plan.remove:
        path = stock.directory / name
        try:
            if stock.is_same(path):
                remove_checkpoint(path)
            elif path.exists():
                errors.append(f"{path} was not removed: it changed meanwhile")
        except FileNotFoundError:  # removed by the run itself
            continue
        except OSError as error:
            errors.append(f"{path} was not removed: {error}")
    return [*errors, *_remove_leftovers(stock, plan.leftovers)]


def _remove_leftovers(stock: Stock, names: Iterable[str]) -> list[str]:
    """Remove what killed processes have left, and return a sentence for each failure."""
    errors = []
    for path in (stock.directory / name for name in names):
        if is_alive(path, owned=stock.owned):  # since the plan, a new process may have got the id in the name
            continue
        try:
            remove(path)
        except OSError as error:
            errors.append(f"{path} was not removed: {error}")
    return errors
