"""Read the state file of a `TrackerWriter`: the tracker's run to continue, and the steps it has received."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Known(msgspec.Struct):
    """The state file's contents: the tracker's run to continue, and the steps it has received."""

    id: str = ""
    """The tracker's id of the run; "" for a new run."""
    last: dict[str, int] = {}
    """The last step sent for each name, such as "train/loss"."""
    trainer_id: str = ""
    """The id of the trainer whose events were sent last."""


def load_state(path: Path) -> Known:
    """Read a state file; return `Known()` if it does not exist, raise ValueError if it is not valid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Known)
    except FileNotFoundError:
        return Known()
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not the file of a run, remove it: {error}") from None
