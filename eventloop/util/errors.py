"""Define the errors that several packages raise."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit what it is loaded into."""


class WorkDirInUseError(RuntimeError):
    """Another live run owns a directory in which this one would write, so that both would mix their files.

    try:
        trainer.train()
    except WorkDirInUseError as error:
        print(error)  # names the directory, and the machine, process and start of the run that owns it

    Nothing has been written in the directory.
    """
