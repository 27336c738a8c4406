"""Find the checkpoint that a path or a name denotes; the error lists the existing checkpoints.

`TrainerState` uses it for `Trainer.resume` and `Trainer.load_checkpoint`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from eventloop.checkpoint.commit import MANIFEST, PAYLOAD
from eventloop.checkpoint.directory import SUFFIXES, find_checkpoints

_FEW = 5  # names of checkpoints in a message


def place_of(path: object, places: Sequence[Path]) -> Path:
    """Return the path of a checkpoint, given its path or its name in one of the run's directories.

    Args:
        path: the path or the name. A suffix such as ".pth" is dropped if only the name without it exists.
        places: the directories in which the run saves checkpoints.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        TypeError, ValueError: `path` is not a path or a name.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f'expected "auto", "best", or the path or name of a checkpoint, got {path!r}{_AUTO}')
    if not str(path):
        raise ValueError(f'expected "auto", "best", or the path or name of a checkpoint, got ""{_AUTO}')
    path = Path(path)
    names = [path.name, path.stem] if path.suffix in SUFFIXES else [path.name]
    if any((path.parent / name).exists() for name in names):
        return _one(path, places)
    folders = places if len(path.parts) == 1 else [path.parent]
    there = [place / name for place in folders for name in names if (place / name).exists()]
    if there:
        return _one(there[0], places)
    known = [*dict.fromkeys(each.name for place in folders for each in reversed(find_checkpoints(place)))]
    if known:
        there_is = "is" if len(known) == 1 else "are"
        hint = f": there {there_is} {_newest(known)}{_AUTO if folders is places else ''}"
    else:
        hint = ", which holds no checkpoint" if folders is places else f": {path.parent} holds no checkpoint"
    looked = f", nor one of that name in {' or '.join(map(str, places))}" if folders is places else ""
    raise FileNotFoundError(f"no checkpoint at {path}{looked}{hint}")


def what_else(place: Path) -> str:
    """Return the end of an error message about an unreadable checkpoint: the commands that may help."""
    command = f"eventloop checkpoints {place.parent} --verify"
    return f'; "auto" takes the newest intact checkpoint, and `{command}` checks each'


_AUTO = ': "auto" takes the newest one'


def _one(path: Path, places: Sequence[Path]) -> Path:
    """Return `path`, or raise FileNotFoundError if it is a directory that is not a checkpoint."""
    if not path.is_dir() or any(os.path.lexists(path / name) for name in (MANIFEST, PAYLOAD)):
        return path
    known = [each.name for each in reversed(find_checkpoints(path))]
    if not known:
        raise FileNotFoundError(
            f"{path} is not a checkpoint, as it has no {MANIFEST}, and it holds no checkpoints"
        )
    auto = _AUTO if any(path.resolve() == place.resolve() for place in places) else ""
    raise FileNotFoundError(f"{path} is not a checkpoint, but a directory of them: {_newest(known)}{auto}")


def _newest(known: Sequence[str]) -> str:
    more = f" and {len(known) - _FEW} more" if len(known) > _FEW else ""
    return f"{', '.join(known[:_FEW])}{more}{', the newest first' if len(known) > 1 else ''}"
