"""Send numbers, images, histograms, texts, settings and checkpoints of a run to Weights & Biases (W&B)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from math import isnan
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from time import monotonic, sleep, strftime
from typing import Any, ClassVar

from eventloop.bus.process_exit import drain_first
from eventloop.events import (
    CheckpointSaved,
    Event,
    HistogramLogged,
    ImageLogged,
    RunInfo,
    ScalarsLogged,
    TextLogged,
)
from eventloop.events.deferred import Timed
from eventloop.events.run import Run
from eventloop.util.checks import check_bools, check_choice
from eventloop.util.surrogates import without_surrogates
from eventloop.writers.tracker import RUN_EVENTS, TrackerWriter
from eventloop.writers.tracker_arguments import (
    basic_login,
    check_config,
    check_mapping,
    check_texts,
    masked,
    secrets_of,
    setting,
)
from eventloop.writers.tracker_state import Known
from eventloop.writers.tracker_values import checkpoints_of, key_of, record_last, run_name_of, values_of
from eventloop.writers.wandb_arguments import (
    check_entity,
    check_environment,
    check_key,
    check_project,
    check_tags,
)
from eventloop.writers.wandb_files import has_files, is_whole, read_history

MODES = ("online", "offline", "disabled")
"""The modes that the argument `mode` may name."""
BINS = 64
"""The number of bins of a histogram."""
WHOLE_SECONDS = 5.0
"""The most seconds to wait until wandb has written the end of its file."""
FINISH_SECONDS = 1700.0
"""The most seconds of wandb's upload at the end of a run; `wandb sync` sends the rest."""


class WandbWriter(TrackerWriter):
    """Send a run to Weights & Biases, as metrics `{mode}/{name}` over the axis `step`.

        WandbWriter(project="digits", config={"lr": 0.1}, best={"val/accuracy": "max"}, mode="offline")

    Numbers, images, histograms and texts are in the history of the run; the facts of the run and `config` are
    in its config. The axis `step` is a metric, because W&B drops values if its own step decreases.

    A resumed run continues the run whose id is in `<work_dir>/wandb_run.json`. W&B cannot remove steps, so
    steps that are run again keep their first values. A kill loses up to 32 KB of rows that wandb held in
    memory. They are read from the run's event log, if the run has an `EventLogWriter`. In the mode "online"
    the server may have received these rows before the kill, and then has them twice.

    The writer logs in as wandb does: with `wandb login` or WANDB_API_KEY. It accepts no key as an argument.
    Unless WANDB_ERROR_REPORTING is set, it turns off the error reports that wandb sends to its developers.

    Args:
        project: the project's name, by default that in WANDB_PROJECT.
        entity: the user or team, by default your own.
        run_name: the name of the run in W&B; by default `name`, or else that of the work dir.
        mode: "online", "offline", or "disabled", in which wandb writes and sends nothing; by default
            WANDB_MODE, or else "online". `wandb sync <work_dir>/wandb/offline-run-*` sends an offline run
            later.
        config: settings of the run.
        tags: tags of the run.
        group: the group of the run.
        best: a mapping of metrics to "min" or "max". The run's summary gets the best value of each metric
            and its step, for example as `best/val/accuracy` and `best/val/accuracy_step`.
        checkpoints: whether each saved checkpoint is sent as a version of an artifact.
        name: the writer's name in reports; needed if a bus has two writers of this class.
        offload: "process", "thread", or "auto", the default: a process if possible.

    Raises:
        ImportError: wandb is not installed.
        TypeError, ValueError: there is no project, or another argument or environment variable is wrong.
    """

    events = (*RUN_EVENTS, ScalarsLogged, ImageLogged, HistogramLogged, TextLogged, RunInfo, CheckpointSaved)
    service: ClassVar[str] = "W&B"
    target: ClassVar[str] = "wandb"
    secret_variables: ClassVar[tuple[str, ...]] = ("WANDB_API_KEY",)
    library_links: ClassVar[tuple[str, ...]] = ("wandb/*run-*/logs/*",)
    stall_timeout = FINISH_SECONDS + 100

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        *,
        run_name: str | None = None,
        mode: str | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        group: str | None = None,
        best: Mapping[str, str] | None = None,
        checkpoints: bool = False,
        name: str | None = None,
        offload: str | None = None,
    ) -> None:
        super().__init__(name, offload)
        self.project = check_project(*setting("project", project, "WANDB_PROJECT", "WandbWriter"))
        check_texts(run_name=run_name, group=group)
        if mode is not None:
            check_choice("mode", mode, MODES)
        check_bools(checkpoints=checkpoints)
        self.mode = mode
        self.config = check_config(config)
        self.checkpoints = checkpoints
        self._direction = check_mapping("best", best)
        for metric, direction in self._direction.items():
            check_choice(f"best[{metric!r}]", direction, ("min", "max"))
        self._run_name = run_name or name  # None: `run_name_of` takes the name of the work dir
        check_entity("entity", entity)
        options = {"entity": entity, "group": group, "tags": check_tags(tags)}
        self._options = without_surrogates(options)
        # `pixels` too, so that a missing numpy raises an error here and not at the first image
        self._lib, _ = self.import_library("wandb", "eventloop.writers.pixels")
        check_environment(self._lib)
        if entity is None:
            check_entity("WANDB_ENTITY", os.environ.get("WANDB_ENTITY"))
        if (mode or os.environ.get("WANDB_MODE") or "online") in ("online", "run"):
            check_key()
        self._run: Any = None
        self._best: dict[str, float] = {}
        self._modes_with_axis: set[str] = set()
        self._next_row: int | None = None  # W&B's number of the next row, if wandb does not know it

    def connect(self, run: Run, known: Known) -> Known:
        """Begin a run of W&B or continue the run that `known` names.

        Returns:
            the run's id, and the last step of each name in wandb's files and of each checkpoint.
        """
        lib, folder = self._lib, Path(run.work_dir)
        self._continues = bool(known.id)
        run_id = known.id or token_hex(4)
        last_steps = self._read_files(folder, run_id)
        # wandb names a folder by the second, and must not use the folder of the run before the resume
        while [*folder.glob(f"wandb/*run-{strftime('%Y%m%d_%H%M%S')}-{run_id}")]:
            sleep(0.1)
        # wandb would log a line for each error report that it cannot send
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        with _without_info(lib):
            self._run = lib.init(
                project=self.project,
                name=run_name_of(run, self._run_name),
                dir=str(folder),
                id=run_id,
                resume="allow",
                mode=self.mode,
                config=self.config,
                reinit="create_new",
                settings=_settings(lib),
                **self._options,
            )
        drain_first()  # at exit, close writers on threads before wandb's service ends
        self._modes_with_axis = set()
        if not self._run.offline:  # the server knows the number of the next row; offline it would be 0
            self._next_row = None
        if last_steps is None:
            return Known(run_id, known.last)
        return Known(run_id, {**checkpoints_of(known.last), **last_steps})

    def _save_state(self) -> None:
        """Save the state as `TrackerWriter` does, unless wandb is disabled and so receives no step."""
        if not self._run.disabled:
            super()._save_state()
        elif not self._continues:
            self._state_path.unlink(missing_ok=True)  # an earlier run's state, which must not be continued

    def begin_in_worker(self, facts: Run, *, restarts: int, first: Event) -> None:
        """Silence wandb in the worker process, because this writer logs errors itself."""
        os.environ.setdefault("WANDB_SILENT", "true")
        super().begin_in_worker(facts, restarts=restarts, first=first)

    def send(self, events: list[Timed]) -> None:
        """Send events one by one, and remove the sent ones from the list, also after an error."""
        sent = 0
        try:
            for timestamp, event in events:
                self._send(timestamp, event)
                sent += 1
        finally:
            del events[:sent]  # an event that is sent again would be a second row

    def _send(self, timestamp: float, event: Event) -> None:
        """Send one event, emitted at the Unix time `timestamp`."""
        match event:
            case ScalarsLogged():
                row = values_of(event)
                self._log(timestamp, event.mode, event.step, row)
                self._update_best(row, event.step)
            case TextLogged():
                self._log(timestamp, event.mode, event.step, {key_of(event): event.text})
            case ImageLogged() | HistogramLogged():
                self._log_media(timestamp, event)
            case RunInfo():
                settings = {key: value for key, value in event.config.items() if key not in self.config}
                facts = {"eventloop": {**event.info, **event.options}}
                self._run.config.update({**settings, **facts}, allow_val_change=True)
            case CheckpointSaved() if self.checkpoints:
                self._send_checkpoint(event)

    def end(self, status: str) -> None:
        """Finish the run, which uploads all remaining data, and wait until its file is complete."""
        run, self._run = self._run, None
        if run is None:
            return
        run.finish(exit_code=0 if status == "FINISHED" else 1)
        deadline = monotonic() + WHOLE_SECONDS
        while not is_whole(self._work_dir, self._known.id) and monotonic() < deadline:
            sleep(0.02)

    def where(self) -> str:
        """Return the address and the log for an error's text, without the password in the URL."""
        url = os.environ.get("WANDB_BASE_URL", "")
        log = Path(self._get_run().work_dir, "wandb", "debug-internal.log")
        at_url = f" at {masked(url, secrets_of(url))}" if url else ""
        return f"{at_url}, whose log is {log}"

    def secrets(self) -> list[str]:
        """Return the API key, from the environment or from `wandb login`, plain and as in HTTP headers."""
        keys = super().secrets()
        with suppress(ImportError):
            find_login: Any = import_module("requests.utils").get_netrc_auth
            login = find_login(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
            keys += [login[1]] if login else []
        return [*keys, *(basic_login("api", key) for key in keys)]

    def _log(self, timestamp: float, mode: str, step: int, row: dict[str, Any]) -> None:
        """Log a row of W&B's history."""
        if mode not in self._modes_with_axis:
            self._modes_with_axis.add(mode)
            self._run.define_metric(f"{mode}/*", step_metric="step")
        row_number, self._next_row = self._next_row, None
        self._run.log({**row, "step": step, "_timestamp": timestamp}, step=row_number, commit=True)

    def _log_media(self, timestamp: float, event: ImageLogged | HistogramLogged) -> None:
        """Log an image or a histogram; one that cannot be encoded is left out with a warning."""
        lib, key = self._lib, key_of(event)
        try:
            if isinstance(event, HistogramLogged):
                histogram = lib.Histogram(np_histogram=_histogram(event))
                self._log(timestamp, event.mode, event.step, {key: histogram})
                return
            if (png := self.png_of(event)) is None:
                return
            with TemporaryDirectory() as folder:
                path = Path(folder, "image.png")
                path.write_bytes(png)
                self._log(timestamp, event.mode, event.step, {key: lib.Image(str(path))})
        except (TypeError, ValueError, ImportError) as error:
            self.warn_once(key, f"{key} is left out: {error}")

    def _update_best(self, row: dict[str, float], step: int) -> None:
        """Update the run's summary if a row has the best value so far of a metric in `best`."""
        for key in row.keys() & self._direction.keys():
            if self._is_best(key, row[key]):
                self._best[key] = row[key]
                self._run.summary.update({f"best/{key}": row[key], f"best/{key}_step": step})

    def _is_best(self, key: str, value: Any) -> bool:
        """Return whether a value is a number that is better than the best so far of the metric `key`."""
        if not isinstance(value, int | float) or isnan(value):
            return False
        best = self._best.get(key)
        if best is None:
            return True
        return bool(value > best if self._direction[key] == "max" else value < best)

    def _read_files(self, folder: Path, run_id: str) -> dict[str, int] | None:
        """Read the run's files of wandb, which show the steps that a kill has not lost.

        It also sets the best values so far and the number of the next row.

        Returns:
            the last step of each name, or None if there are no files, as after `wandb sync --clean`.
        """
        self._next_row = None
        if not has_files(folder, run_id):
            return None
        last_steps: dict[str, int] = {}
        for row in read_history(folder, run_id):
            self._next_row = row["_step"] + 1
            if not isinstance(step := row.pop("step", None), int):
                continue
            record_last(last_steps, row, step)
            for key in row.keys() & self._direction.keys():
                if self._is_best(key, row[key]):
                    self._best[key] = row[key]
        return last_steps

    def _send_checkpoint(self, event: CheckpointSaved) -> None:
        """Send the files of a checkpoint as a version of an artifact."""
        if (path := self.checkpoint_of(event)) is None:
            return
        artifact = self._lib.Artifact(f"checkpoint-{self._known.id}", "model", metadata={"step": event.iter})
        folder = path if path.is_dir() else path.parent
        for file in [*path.rglob("*")] if path.is_dir() else [path]:
            if file.is_file():  # `artifact.add_dir` would do the same, but prints a line
                artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
        self._run.log_artifact(artifact, aliases=["latest", path.name])
        self.record_sent(event)


def _settings(lib: Any) -> Any:
    """Return settings with which wandb prints nothing, asks no question and has a limit for every wait."""
    return lib.Settings(
        console="off",
        silent=True,
        x_disable_stats=True,
        login_timeout=10,
        init_timeout=30,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
    )


@contextmanager
def _without_info(lib: Any) -> Iterator[None]:
    """Keep wandb from printing a line about the login, which the run's settings do not silence.

    Errors are still printed.
    """
    settings = lib.setup().settings
    lib.termsetup(settings.model_copy(update={"show_info": False}), None)
    try:
        yield
    finally:
        lib.termsetup(settings, None)


def _histogram(event: HistogramLogged) -> Any:
    """Return the counts and the edges of a histogram of the finite values of an event."""
    import numpy as np

    from eventloop.writers.pixels import values

    array = values(event).astype(np.float64).ravel()
    return np.histogram(array[np.isfinite(array)], bins=BINS)
