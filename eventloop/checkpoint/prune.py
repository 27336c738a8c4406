"""Removing checkpoints that are no longer wanted, and what killed saves have left. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import msgspec

from eventloop.checkpoint.directory import remove_checkpoint, writer_of
from eventloop.checkpoint.disk import DISK
from eventloop.checkpoint.listing import Stock, is_alive, list_leftovers


class Plan(msgspec.Struct):
    """What stays and what goes, by name. What is known to be damaged is in neither list, nor is a link or a single
    file: they are left as they are."""

    keep: list[str]
    remove: list[str]
    leftovers: list[str]


def make_plan(stock: Stock, count: int) -> Plan:
    """Keep the newest, of each metric the best so many that its run keeps, and at least one that can be resumed from. Every file of those is
    read first: one that is damaged does not count, and the next takes its place. Where none is whole nothing goes.

    Args:
        count: how many of the newest.
    """
    found = stock.found
    own = [path for path in found.newest_first() if not path.is_symlink()]
    keep = set(_whole(stock, own, count))
    for metric in found.watched():
        ranked = [path for path in found.ranking(metric) if path in own]
        keep.update(_whole(stock, ranked, found.best_kept(metric)))
    keep.update(
        _whole(stock, (path for path in own if stock.could_be_whole(path) and not stock.missing(path)), 1)
    )
    rest = [path for path in reversed(own) if path not in keep and stock.could_be_whole(path)]
    dead = [left.name for left in list_leftovers(stock.directory) if not left.alive]
    return Plan(
        keep=[path.name for path in reversed(own) if path in keep],
        remove=[path.name for path in rest] if keep else [],
        leftovers=dead if keep else [],
    )


def _whole(stock: Stock, paths: Iterable[Path], count: int) -> Iterable[Path]:
    whole = (path for path in paths if stock.damage_of(path) is None)
    return islice(whole, min(count, sys.maxsize))  # it takes no more than that


def carry_out(stock: Stock, plan: Plan) -> list[str]:
    """Remove what a plan says; return a sentence for each that was not removed.

    Between the plan and this the run may have gone on: unless everything that stays is still what it was, nothing is
    removed, and of what goes only what is still what it was.
    """
    changed = [name for name in plan.keep if not stock.is_same(stock.directory / name)]
    if changed:
        return [f"nothing was removed: {', '.join(changed)} changed meanwhile, look again"]
    failed = []
    for name in plan.remove:
        path = stock.directory / name
        try:
            if stock.is_same(path):
                remove_checkpoint(path)
            elif path.exists():
                failed.append(f"{path} was not removed: it changed meanwhile")
        except FileNotFoundError:  # the run itself has removed it
            continue
        except OSError as error:
            failed.append(f"{path} was not removed: {error}")
    return [*failed, *_remove_leftovers(stock.directory, plan.leftovers)]


def _remove_leftovers(directory: Path, names: Iterable[str]) -> list[str]:
    failed = []
    for name in names:
        process = writer_of(Path(name))
        if process is None or is_alive(process):  # the system has given the number to another one
            continue
        try:
            DISK.remove(directory / name)
        except OSError as error:
            failed.append(f"{directory / name} was not removed: {error}")
    return failed
