"""Hold the options of `eventloop run`, and pass them to the processes that the script starts."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import msgspec

VARIABLE = "EVENTLOOP_RUN"
"""The environment variable that passes the options, as JSON, to rank processes."""


class RunOptions(msgspec.Struct, frozen=True):
    """Hold the options of the bridges that `eventloop run` attaches.

    Args:
        writers: class names of writers.
        work_dir: directory of the first trainer's files; None means the directory that its engine uses.
        measure: whether the time of each callback of the engine is measured.
        summaries: folder to which other processes write the summaries of their runs, for the command.
        pid: the process id of the command.
    """

    writers: tuple[str, ...] = ("JSONLWriter",)
    work_dir: str | None = None
    measure: bool = True
    summaries: str | None = None
    pid: int = msgspec.field(default_factory=os.getpid)

    def put(self, environment: MutableMapping[str, str]) -> None:
        """Put the options into a mapping of environment variables, with an absolute `work_dir`."""
        work_dir = self.work_dir and os.path.abspath(self.work_dir)
        environment[VARIABLE] = msgspec.json.encode(msgspec.structs.replace(self, work_dir=work_dir)).decode()


def options_of(environment: MutableMapping[str, str]) -> RunOptions | None:
    """Return the options in an environment, or None if `eventloop run` has not put any there."""
    text = environment.get(VARIABLE)
    return msgspec.json.decode(text, type=RunOptions) if text else None
