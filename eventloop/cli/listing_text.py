"""Format the listing of checkpoints as text and as JSON, for `eventloop checkpoints`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from datetime import datetime

import msgspec

from eventloop._version import __version__
from eventloop.checkpoint.listing import Inventory, Item, Leftover
from eventloop.checkpoint.manifest import published_digits
from eventloop.checkpoint.prune import Plan
from eventloop.util.formatting import on_a_line
from eventloop.util.surrogates import without_surrogates

SCORES = 4
"""The largest number of a validation's scores in the line of a checkpoint."""
HEAD = ("checkpoint", "epoch", "iter", "size", "saved at", "")


def as_json(
    inventory: Inventory, plan: Plan | None = None, *, removed: bool = False, failed: Sequence[str] = ()
) -> str:
    """Return the fields of `Inventory` as JSON.

    With a plan, the key `prune` has the fields of `Plan`, with `removed` and `failed`. Bytes of a file name
    that are not UTF-8 become escapes, such as `\\udcff`.

    Args:
        removed: whether the checkpoints of the plan were removed.
        failed: a sentence for each removal that failed.
    """
    fields = msgspec.to_builtins(inventory)
    if plan is not None:
        fields["prune"] = {**msgspec.to_builtins(plan), "removed": removed, "failed": [*failed]}
    return msgspec.json.format(msgspec.json.encode(without_surrogates(fields))).decode()


def as_lines(inventory: Inventory) -> str:
    """Return a table of the checkpoints, the newest last, and lines on damaged checkpoints and leftovers.

    Each checkpoint has one line, even if its name contains line breaks.
    """
    lines = table([HEAD, *map(_row, inventory.checkpoints)]) if inventory.checkpoints else []
    lines += [f"damaged: {reason}" for reason in inventory.damaged]
    lines += [_leftover(leftover) for leftover in inventory.leftovers]
    return "\n".join(map(on_a_line, lines))


def plan_lines(inventory: Inventory, plan: Plan) -> str:
    """Return the lines that name the checkpoints to keep and to remove."""
    if not plan.keep:
        return "Nothing is removed: there is no checkpoint here that is whole."
    sizes = {item.name: item.bytes for item in inventory.checkpoints}
    sizes |= {leftover.name: leftover.bytes for leftover in inventory.leftovers}
    removals = [*plan.remove, *plan.leftovers]
    kept_line = on_a_line(f"Verified, and kept: {', '.join(plan.keep)}")
    if not removals:
        return f"{kept_line}\nThere is nothing to remove."
    size = size_text(sum(sizes[name] for name in removals))
    removed_line = on_a_line(f"To be removed, {size}: {', '.join(removals)}")
    return f"{kept_line}\n{removed_line}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines; the first and the last two columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Return the cells padded to the widths of their columns; the first and the last two hold text."""
    left_aligned = {0, len(row) - 2, len(row) - 1}
    return [
        cell.ljust(width) if i in left_aligned else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _row(item: Item) -> tuple[str, ...]:
    epoch, iteration = ("" if number is None else str(number) for number in (item.epoch, item.iter))
    return item.name, epoch, iteration, size_text(item.bytes), _time(item.time), "; ".join(_notes(item))


def _notes(item: Item) -> list[str]:
    """Return the notes on a checkpoint, the most important first."""
    verification = [] if item.whole is None else ["whole" if item.whole else "DAMAGED"]
    if item.epoch is None:
        kind = "named by its hash" if published_digits(item.name) else "without a manifest"
        return [f"a single file, {kind}", *verification]
    notes = []
    if item.newest:
        notes.append("newest")
    elif item.abandoned:
        notes.append("of an earlier run" if item.foreign else "left behind")
    for metric, score in item.best.items():
        former_rank = "one of the best" if metric in item.best_kept else "was best"
        rank = "best" if metric in item.best_now else former_rank
        notes.append(f"{rank} {metric} {_score(score)}")
    if item.batch_idx:
        notes.append(f"{item.batch_idx} batches into epoch {item.epoch + 1}")
    if item.ranks is not None:
        notes.append(f"of {item.ranks} ranks")
    if item.missing:
        notes.append(f"cannot be resumed from, without {', '.join(item.missing)}")
    versions = ("eventloop", item.eventloop, __version__), ("torch", item.torch, torch_version())
    notes += [
        f"{package} {saved_by}"
        for package, saved_by, installed in versions
        if _public(saved_by) != _public(installed)
    ]
    return [*notes, *_scores(item), *verification]


def _scores(item: Item) -> list[str]:
    """Return a list with a note on the scores of the last validation, or [] without scores.

    Scores for which the checkpoint is or was the best one are left out, because `_notes` has a note on each.
    The iteration of the validation is named if the checkpoint was saved at another one.
    """
    others = [f"{name} {_score(value)}" for name, value in item.metrics.items() if name not in item.best]
    if not others:
        return []
    more = f" and {len(others) - SCORES} more" if len(others) > SCORES else ""
    at = "" if item.validated_at in (None, item.iter) else f" at iter {item.validated_at}"
    return [f"{', '.join(others[:SCORES])}{more}{at}"]


def _score(score: float | str) -> str:
    return score if isinstance(score, str) else format(score, ".6g")


def torch_version() -> str:
    """Return the version of the installed torch, without importing it; "" if torch is not installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _public(version: str | None) -> str:
    """Return a version without its build part: "2.13.0+cu130" becomes "2.13.0"."""
    return (version or "").partition("+")[0]


def _leftover(leftover: Leftover) -> str:
    state = "is under way" if leftover.alive else "was killed"
    size = size_text(leftover.bytes)
    return f"leftover: {leftover.name}, {size}, of a save that {state}: process {leftover.process}"


def size_text(count: int) -> str:
    """Return a number of bytes in readable units: `812 B`, `1.2 MB`."""
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def _time(text: str) -> str:
    """Return a time converted to the local time zone, or unchanged if it cannot be parsed."""
    try:
        return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text
