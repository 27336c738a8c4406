"""Record from which checkpoint a trainer has resumed, and in which directories it saves its own.

The trainer has one `TrainerState`. `gathering` makes a checkpoint of the trainer, and `restoring` loads one.
Both are imported at the first save or load, because a run without checkpoints needs neither of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eventloop.commands.messages import Applied
from eventloop.resume.protocols import ResumableTrainer
from eventloop.resume.settings import Settings
from eventloop.util.anchored_path import Anchored

if TYPE_CHECKING:
    from eventloop.resume.choice import Resumed


class TrainerState:
    """Hold the directories of a trainer's checkpoints, its settings, and the checkpoint loaded last."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer
        self.settings = Settings(trainer)
        self.went_back_to: Path | None = None
        """The checkpoint of the last resume or rollback, if it may not be the newest one.

        None otherwise, and once a checkpoint hook has recorded that newer checkpoints are left behind.
        """
        self.resumed_from: Path | None = None
        """The checkpoint that was resumed from last; None after weights were loaded without a resume."""
        self.loads = 0
        """The number of times that a checkpoint's weights were loaded into the model."""
        self._resumed: Resumed | None = None  # the last resume, until the first pass after it begins
        self._directories: list[Anchored] = []  # those in which hooks save
        self.watched: list[str] = []
        """The metrics whose best checkpoints the hooks keep."""
        self._finish_saves: list[Callable[[], None]] = []

    def saves_in(
        self, directory: Path, watched: Sequence[str] = (), finish: Callable[[], None] = lambda: None
    ) -> None:
        """Register a directory in which a hook saves checkpoints.

        A resume searches all registered directories; the first one becomes `checkpoint_dir`.

        Args:
            watched: the metrics whose best checkpoints the hook keeps in that directory.
            finish: waits for the hook's running saves, so that a load within a training finds them.
        """
        if not self._directories:
            self.trainer.checkpoint_dir = directory
        self._directories.append(Anchored(directory))
        self.watched += watched
        self._finish_saves.append(finish)

    def finish_saves(self) -> None:
        """Wait for the running saves of all hooks, and report them."""
        for finish in self._finish_saves:
            finish()

    @property
    def directories(self) -> list[Path]:
        """Return the directories with the run's checkpoints, `checkpoint_dir` first."""
        by_resolved: dict[Path, Path] = {}  # each directory once, although links may give it several paths
        for directory in (self.trainer.checkpoint_dir, *[each.path for each in self._directories]):
            by_resolved.setdefault(directory.resolve(), directory)
        return list(by_resolved.values())

    def record_resumed(self, resumed: Resumed, *, by_name: bool) -> None:
        """Record a resume, once the state of its checkpoint is loaded.

        Args:
            by_name: whether the checkpoint may not be the newest one, because the user has named it.
        """
        self._resumed = resumed
        self.resumed_from = resumed.path.absolute()
        self.trainer.applied_commands = msgspec.convert(resumed.meta.get("commands", []), list[Applied])
        self.went_back_to = resumed.path if by_name else None
        self.loads += 1

    def record_weights(self) -> None:
        """Record that the weights of a checkpoint, and no more of it, were loaded."""
        self.resumed_from = None
        self.loads += 1

    def resumed_with_another(self, loader: Iterable[Any]) -> Resumed | None:
        """Return the last resume if it has compared another loader than `loader`, else None.

        Only the first call after a resume returns it: that for the loader of the first pass.
        """
        resumed, self._resumed = self._resumed, None
        return None if resumed is None or resumed.loader is loader else resumed
