"""Which checkpoint is meant by a name or a path; and where none is, which there are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from eventloop.checkpoint.directory import PAYLOAD, SUFFIXES, find_checkpoints
from eventloop.checkpoint.manifest import MANIFEST
from eventloop.util.suggest import near

_FEW = 5  # of the newest are named
_NEWEST = frozenset({"last", "latest", "newest", "recent", "most_recent", "last_checkpoint", "true", "yes"})
"""What others call what is "auto" here."""
_NUMBERED = re.compile(r"^(?P<what>.*?)(?P<number>\d+)$")


def place_of(path: object, places: Sequence[Path]) -> Path:
    """Where a checkpoint is that is named as a path, or by its name alone where the run's are, in `places`.

    Raises:
        TypeError, ValueError: that is no path.
        FileNotFoundError: there is none (with the name that was meant, or the newest there are), or several.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f'expected "auto", "best", or the path or name of a checkpoint, got {path!r}{_AUTO}')
    if not str(path):
        raise ValueError(f'expected "auto", "best", or the path or name of a checkpoint, got ""{_AUTO}')
    path = Path(path)
    names = [path.name, path.stem] if path.suffix in SUFFIXES else [path.name]
    if any((path.parent / name).exists() for name in names):
        return _one(path, places)
    beside = places if len(path.parts) == 1 else [path.parent]
    there = [place / name for place in beside for name in names if (place / name).exists()]
    if there:
        return _one(there[0], places)
    known = [*dict.fromkeys(each.name for place in beside for each in reversed(find_checkpoints(place)))]
    if known:
        hint = _hint(path, known)
    else:
        hint = ", which holds none" if beside is places else f": {path.parent} holds no checkpoint"
    looked = f", nor one of that name in {' or '.join(map(str, places))}" if beside is places else ""
    raise FileNotFoundError(f"no checkpoint at {path}{looked}{hint}")


def what_else(place: Path) -> str:
    """Of a checkpoint that was asked for and cannot be read: what can be done."""
    return f'; the newest that is whole is "auto", and `eventloop checkpoints {place.parent} --verify` reads each'


_AUTO = ': the newest one is "auto"'


def _one(path: Path, places: Sequence[Path]) -> Path:
    """A directory of checkpoints is none."""
    if not path.is_dir() or any(os.path.lexists(path / name) for name in (MANIFEST, PAYLOAD)):
        return path
    known = [each.name for each in reversed(find_checkpoints(path))]
    if not known:
        raise FileNotFoundError(
            f"{path} is a directory that holds no checkpoint, and is none: it has no {MANIFEST}"
        )
    run = any(path.resolve() == place.resolve() for place in places)
    auto = (
        _AUTO
        if run
        else f'; a trainer with this work_dir takes the newest by "auto", here it is {path / known[0]}'
    )
    raise FileNotFoundError(f"{path} is no checkpoint, but a directory of them: {_newest(known)}{auto}")


def _hint(path: Path, known: Sequence[str]) -> str:
    name = path.stem if path.suffix in SUFFIXES else path.name
    if name.lower() in _NEWEST:
        return f"{_AUTO}, {known[0]}"
    # one with a smaller number than there is was probably removed, and is no misspelled one
    gone = (own := _NUMBERED.match(name)) and any(
        (other := _NUMBERED.match(each))
        and other["what"] == own["what"]
        and int(other["number"]) > int(own["number"])
        for each in known
    )
    return (
        not gone and near(name, known)
    ) or f": there {'is' if len(known) == 1 else 'are'} {_newest(known)}"


def _newest(known: Sequence[str]) -> str:
    more = f" and {len(known) - _FEW} more" if len(known) > _FEW else ""
    return f"{', '.join(known[:_FEW])}{more}{', the newest first' if len(known) > 1 else ''}"
