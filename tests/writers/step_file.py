"""Writers of a user, in a module that imports no torch: a worker process imports it."""

from __future__ import annotations

import os
from pathlib import Path

from eventloop.events import AfterTrainIter, Event
from eventloop.events.run import Run
from eventloop.writers import Writer


class StepFile(Writer):
    """A user's writer, with arguments, and with a handle that does not pickle."""

    events = (AfterTrainIter,)

    def __init__(self, filename: str, *, prefix: str = "") -> None:
        self.filename = filename
        self.prefix = prefix
        self.handle = (number for number in range(3))

    def open(self, run: Run) -> None:
        self._file = open(Path(run.work_dir, self.filename), "a", encoding="utf-8")  # noqa: SIM115
        print(f"open {run.start_iter}", file=self._file)

    def write(self, event: Event) -> None:
        assert isinstance(event, AfterTrainIter)
        print(f"{self.prefix}{event.iter}", file=self._file)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        print(f"close in another process: {os.getpid() != os.getppid()}", file=self._file)
        self._file.close()


class Longer(StepFile):
    """One whose constructor calls its base's."""

    def __init__(self) -> None:
        super().__init__("longer.txt", prefix="step ")
