"""Define the errors that several packages raise."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or its values do not fit the objects that they are loaded into."""


class WorkDirInUseError(RuntimeError):
    """Another live run owns the directory in which this run would write, and their files would mix.

    try:
        trainer.train()
    except WorkDirInUseError as error:
        print(error)  # names the directory, and the machine, process and start of the run that owns it

    The run that raises this error has written nothing in the directory.
    """
