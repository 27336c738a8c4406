"""Define the errors that several packages raise."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit what it is loaded into."""
