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
"""The largest number of scores of a validation in one line."""
HEAD = ("checkpoint", "epoch", "iter", "size", "saved at", "")


def as_json(
    inventory: Inventory, plan: Plan | None = None, *, removed: bool = False, failed: Sequence[str] = ()
) -> str:
    """Return the fields of `Inventory` as JSON.

    With a plan, `prune` holds the fields of `Plan`, whether the removal was done (`removed`), and a sentence
    for each removal that failed (`failed`). Undecodable bytes of a file name become escapes, such as
    `\\udcff`.
    """
    fields = msgspec.to_builtins(inventory)
    if plan is not None:
        fields["prune"] = {**msgspec.to_builtins(plan), "removed": removed, "failed": [*failed]}
    return msgspec.json.format(msgspec.json.encode(without_surrogates(fields))).decode()


def as_lines(inventory: Inventory) -> str:
    """Return a table of the checkpoints, the newest last, followed by damaged checkpoints and leftovers.

    Each has one line, even if its name contains line breaks.
    """
    lines = table([HEAD, *map(_row, inventory.checkpoints)]) if inventory.checkpoints else []
    lines += [f"damaged: {reason}" for reason in inventory.damaged]
    lines += [_leftover(left) for left in inventory.leftovers]
    return "\n".join(map(on_a_line, lines))


def plan_lines(inventory: Inventory, plan: Plan) -> str:
    """Return the lines that name the checkpoints to keep and to remove."""
    if not plan.keep:
        return "Nothing is removed: there is no checkpoint here that is whole."
    sizes = {item.name: item.bytes for item in inventory.checkpoints}
    sizes |= {left.name: left.bytes for left in inventory.leftovers}
    going = [*plan.remove, *plan.leftovers]
    keeps = on_a_line(f"Verified, and kept: {', '.join(plan.keep)}")
    if not going:
        return f"{keeps}\nThere is nothing to remove."
    size = size_text(sum(sizes[name] for name in going))
    goes = on_a_line(f"To be removed, {size}: {', '.join(going)}")
    return f"{keeps}\n{goes}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines; the first and the last two columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cells(row, widths)).rstrip() for row in rows]


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    left = {0, len(row) - 2, len(row) - 1}
    return [
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _row(item: Item) -> tuple[str, ...]:
    epoch, iteration = ("" if number is None else str(number) for number in (item.epoch, item.iter))
    return item.name, epoch, iteration, size_text(item.bytes), _time(item.time), "; ".join(_notes(item))


def _notes(item: Item) -> list[str]:
    """Return the notes on a checkpoint, the most important first."""
    verdict = [] if item.whole is None else ["whole" if item.whole else "DAMAGED"]
    if item.epoch is None:
        how = "named by its hash" if published_digits(item.name) else "without a manifest"
        return [f"a single file, {how}", *verdict]
    behind = "of an earlier run" if item.foreign else "left behind"
    notes = ["newest"] if item.newest else [behind] if item.abandoned else []
    for metric, score in item.best.items():
        kept = "one of the best" if metric in item.best_kept else "was best"
        notes.append(f"{'best' if metric in item.best_now else kept} {metric} {_score(score)}")
    if item.batch_idx:
        notes.append(f"{item.batch_idx} batches into epoch {item.epoch + 1}")
    if item.ranks is not None:
        notes.append(f"of {item.ranks} ranks")
    if item.missing:
        notes.append(f"cannot be resumed from, without {', '.join(item.missing)}")
    notes += [
        f"{name} {wrote}"
        for name, wrote, here in (
            ("eventloop", item.eventloop, __version__),
            ("torch", item.torch, torch_version()),
        )
        if _public(wrote) != _public(here)
    ]
    return [*notes, *_scores(item), *verdict]


def _scores(item: Item) -> list[str]:
    """Return at most one note, with the scores of the last validation.

    Scores for which the checkpoint is or was best are left out, as they have a note of their own. The note
    names the iteration of the validation if the checkpoint was saved later.
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
    """Return a version without its build part: "2.13.0+cu130" is the same code as "2.13.0"."""
    return (version or "").partition("+")[0]


def _leftover(left: Leftover) -> str:
    why = "is under way" if left.alive else "was killed"
    return f"leftover: {left.name}, {size_text(left.bytes)}, of a save that {why}: process {left.process}"


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
