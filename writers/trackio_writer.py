"""Write numbers, histograms, texts and settings of a run to trackio's local database."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

from eventloop.events import HistogramLogged, RunInfo, ScalarsLogged, TextLogged
from eventloop.events.deferred import Timed
from eventloop.events.run import Run
from eventloop.writers.tracker import RUN_EVENTS, TrackerWriter
from eventloop.writers.tracker_arguments import check_config, check_texts, setting
from eventloop.writers.tracker_state import Known
from eventloop.writers.tracker_values import key_of, record_last, run_name_of, values_of

FILE_NAME_BYTES = 255
"""The most bytes that a file's name may have on most file systems, such as ext4."""


class TrackioWriter(TrackerWriter):
    """Write a run to trackio's local database, as metrics `{mode}/{name}` at each step.

        TrackioWriter("digits", config={"lr": 0.1})   # `trackio show --project digits` opens the dashboard

    The writer inserts up to 256 events at once into the database itself. trackio's own thread would drop rows
    that it cannot write, and lose queued rows when the program is killed. `trackio sync` sends a project to a
    Hugging Face Space. Histograms and texts are written too, images are not.

    A resumed run continues the run whose id is in `<work_dir>/trackio_run.json`. Steps that are run again
    keep the values that the database has. Events that a kill lost are read from the run's event log, if the
    run has an `EventLogWriter`.

    Args:
        project: the project's name, by default that in TRACKIO_PROJECT. TRACKIO_DIR is the folder of the
            databases. trackio removes all characters but letters, digits, - and _ from the name: "my.model"
            is the project "mymodel".
        run_name: the name of the run in trackio; by default `name`, or else that of the work dir.
        config: settings of the run.
        name: the writer's name in reports; needed if a bus has two writers of this class.
        offload: "process", "thread", or "auto", the default: a process if possible.

    Raises:
        ImportError: trackio is not installed.
        TypeError, ValueError: there is no project, trackio refuses its name, or another argument is wrong.
    """

    events = (*RUN_EVENTS, ScalarsLogged, HistogramLogged, TextLogged, RunInfo)
    service: ClassVar[str] = "trackio"
    target: ClassVar[str] = "trackio"

    def __init__(
        self,
        project: str | None = None,
        *,
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
        offload: str | None = None,
    ) -> None:
        super().__init__(name, offload)
        self.project, source = setting("project", project, "TRACKIO_PROJECT", "TrackioWriter")
        check_texts(run_name=run_name)
        self.run_name = run_name or name  # None: `run_name_of` takes the name of the work dir
        self.config = check_config(config)
        # `pixels` too, so that a missing numpy raises an error here and not at the first image
        modules = ("trackio", "trackio.sqlite_storage", "eventloop.writers.pixels")
        self._lib, storage, _ = self.import_library(*modules)
        self._storage = storage.SQLiteStorage
        _check_project(self._storage, self.project, source)
        self._unwritten_config: dict[str, Any] | None = None  # the settings for the first rows; then None

    def connect(self, run: Run, known: Known) -> Known:
        """Create the project's database if needed, and read the last steps of the run in `known`."""
        self._storage.init_db(self.project)
        self._run_name = run_name_of(run, self.run_name)
        last_steps: dict[str, int] = {}
        if known.id:
            for row in self._storage.get_logs(self.project, run_id=known.id):
                record_last(last_steps, row.keys() - {"step", "timestamp"}, row["step"])
        self._unwritten_config = None
        if not last_steps:  # the run's first rows have its settings, too
            self._unwritten_config = {**self.config, "_Created": datetime.now(UTC).isoformat()}
        return Known(known.id or token_hex(8), last_steps)

    def send(self, events: list[Timed]) -> None:
        """Insert a row for each event with values; the first rows also have the settings of the run."""
        rows = []
        for timestamp, event in events:
            if isinstance(event, RunInfo) and self._unwritten_config is not None:
                facts = {"eventloop": {**event.info, **event.options}}
                self._unwritten_config = {**event.config, **self._unwritten_config, **facts}
            elif isinstance(event, ScalarsLogged | HistogramLogged | TextLogged):
                time = datetime.fromtimestamp(timestamp, UTC).isoformat()
                rows.append((event.step, time, self._row(event)))
        if not rows:
            return
        steps, times, metrics = zip(*rows, strict=True)
        self._storage.bulk_log(
            self.project,
            self._run_name,
            list(metrics),
            list(steps),
            list(times),
            self._unwritten_config,
            run_id=self._known.id,
        )
        self._unwritten_config = None

    def _row(self, event: ScalarsLogged | HistogramLogged | TextLogged) -> dict[str, Any]:
        """Return the values of an event by name, as trackio stores them."""
        if isinstance(event, ScalarsLogged):
            return {**values_of(event)}
        if isinstance(event, TextLogged):
            text: dict[str, Any] = self._lib.Markdown(event.text)._to_dict()
            return {key_of(event): text}
        from eventloop.writers.pixels import values

        try:
            return {key_of(event): self._lib.Histogram(values(event))._to_dict()}
        except (TypeError, ValueError) as error:
            self.warn_once(key_of(event), f"{key_of(event)} is left out: {error}")
            return {}


def _check_project(storage: Any, project: str, source: str) -> None:
    """Check that trackio accepts the name of a project, and can name a database file after it.

    Args:
        storage: trackio's class of databases.
        project: the name.
        source: the argument or environment variable that has the name, for the message.

    Raises:
        ValueError: trackio refuses the name, it has no character that trackio keeps, or the name of its
            database file would be too long.
    """
    if not re.search(r"[\w-]", project):  # trackio would use the project "default" instead
        raise ValueError(
            f"{source} must have a letter, a digit, - or _, which trackio keeps, got {project!r}"
        )
    try:
        storage.validate_project_name(project)
    except ValueError as error:
        raise ValueError(f"{source} must be a project that trackio allows: {error}") from None
    file_name = storage.get_project_db_filename(project)
    suffix = Path(file_name).suffix
    # SQLite creates a second file, whose name ends in "-journal"
    limit = FILE_NAME_BYTES - len(suffix) - len("-journal")
    if (length := len(file_name.encode()) - len(suffix)) > limit:
        raise ValueError(f"{source} must have at most {limit} bytes, got {length}: {project!r}")
