"""The Weights & Biases writer: numbers, images, histograms, texts, settings and checkpoints of a run."""

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
from eventloop.writers.wandb_files import has_files, is_whole, read_history

MODES = ("online", "offline", "disabled")
_SECRET = ("KEY", "TOKEN", "HEADER", "PROX", "PASSWORD", "SECRET")
"""Parts of the names of environment variables whose values no message may contain."""
BINS = 64
WHOLE_SECONDS = 5.0
"""How long to wait for wandb to write the end of its file."""
FINISH_SECONDS = 1700.0
"""How long wandb may upload at the end of a run, if the bus waits so long; `wandb sync` sends the rest."""


class WandbWriter(TrackerWriter):
    """Send a run to Weights & Biases: `{mode}/{name}` over the axis `step`.

        WandbWriter(project="digits", config={"lr": 0.1}, best={"val/accuracy": "max"}, mode="offline")

    Numbers, images, histograms and texts are in the history of the run, the facts of the run and `config` in
    its config. The axis is a metric of its own, `step`, because W&B drops values whose own step goes back.

    A resumed run continues the run whose id is in `<work_dir>/wandb_run.json`. W&B cannot remove steps, so
    those that are run again keep their first values. A kill loses up to 32 KB that wandb held in memory. They
    are read from the run's event log, if the run has an `EventLogWriter`. Online the server may have received
    them, and then has these rows twice.

    The writer logs in as wandb does: with `wandb login` or WANDB_API_KEY. It takes no key as an argument. It
    turns off wandb's error reports to its makers in this process, unless WANDB_ERROR_REPORTING is set.

    Args:
        project: by default WANDB_PROJECT.
        entity: the user or team, by default your own.
        run_name: the name of the run in W&B, by default `name`, else that of the work dir.
        mode: "online", "offline", or "disabled", in which wandb writes and sends nothing. `wandb sync
            <work_dir>/wandb/offline-run-*` sends an offline run later. By default WANDB_MODE, else "online".
        config: settings of the run.
        tags: tags of the run.
        group: the group of the run.
        best: metrics of which the run's summary holds the best value and its step, each with "min" or "max",
            as `best/val/accuracy` and `best/val/accuracy_step`.
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
        self.project = _check_project(*setting("project", project, "WANDB_PROJECT", "WandbWriter"))
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
        self._run_name = run_name or name
        _check_entity("entity", entity)
        options = {"entity": entity, "group": group, "tags": _check_tags(tags)}
        self._options = without_surrogates(options)
        self._lib, _ = self.import_library("wandb", "eventloop.writers.pixels")
        _check_environment(self._lib)
        if entity is None:
            _check_entity("WANDB_ENTITY", os.environ.get("WANDB_ENTITY"))
        if (mode or os.environ.get("WANDB_MODE") or "online") in ("online", "run"):
            _check_key()
        self._run: Any = None
        self._best: dict[str, float] = {}
        self._axes: set[str] = set()
        self._resume_at: int | None = None  # W&B's own number of the next row

    def connect(self, run: Run, known: Known) -> Known:
        lib, folder = self._lib, Path(run.work_dir)
        self._continues = bool(known.id)
        run_id = known.id or token_hex(4)
        last = self._read_back(folder, run_id)
        while [*folder.glob(f"wandb/*run-{strftime('%Y%m%d_%H%M%S')}-{run_id}")]:
            sleep(0.1)  # wandb would write into the folder of the run's former part, of the same second
        # wandb reports its own errors to its makers by OpenTelemetry, and logs each report that fails
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
        drain_first()  # else wandb's service would end at exit before a writer on a thread has closed
        self._axes = set()
        if not self._run.offline:  # the server numbers the rows; offline they would begin with 0 again
            self._resume_at = None
        return Known(run_id, known.last if last is None else {**checkpoints_of(known.last), **last})

    def _save_state(self) -> None:
        """Save the state, unless the run is disabled: W&B has none of its steps, a resumed run sends them."""
        if not self._run.disabled:
            super()._save_state()
        elif not self._continues:
            self._state_path.unlink(missing_ok=True)  # of an earlier run, which this one does not continue

    def begin_in_worker(self, facts: Run, *, restarts: int, first: Event) -> None:
        """Silence wandb in the worker process, because this writer logs errors itself."""
        os.environ.setdefault("WANDB_SILENT", "true")
        super().begin_in_worker(facts, restarts=restarts, first=first)

    def send(self, events: list[Timed]) -> None:
        done = 0
        try:
            for when, event in events:
                self._send(when, event)
                done += 1
        finally:
            del events[:done]  # W&B would have a second row of each

    def _send(self, when: float, event: Event) -> None:
        match event:
            case ScalarsLogged():
                row = values_of(event)
                self._log(when, event.mode, event.step, row)
                self._update_best(row, event.step)
            case TextLogged():
                self._log(when, event.mode, event.step, {key_of(event): event.text})
            case ImageLogged() | HistogramLogged():
                self._log_media(when, event)
            case RunInfo():
                given = {key: value for key, value in event.config.items() if key not in self.config}
                own = {"eventloop": {**event.info, **event.options}}
                self._run.config.update({**given, **own}, allow_val_change=True)
            case CheckpointSaved() if self.checkpoints:
                self._send_checkpoint(event)

    def end(self, status: str) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.finish(exit_code=0 if status == "FINISHED" else 1)
        until = monotonic() + WHOLE_SECONDS
        while not is_whole(self._work_dir, self._known.id) and monotonic() < until:
            sleep(0.02)

    def where(self) -> str:
        url = os.environ.get("WANDB_BASE_URL", "")
        log = Path(self._get_run().work_dir, "wandb", "debug-internal.log")
        return f"{' at ' * bool(url)}{masked(url, secrets_of(url))}, whose log is {log}"

    def secrets(self) -> list[str]:
        """Return the API key, plain and as the HTTP header has it.

        It is in the environment, or in the file in which `wandb login` stored it.
        """
        keys = super().secrets()
        with suppress(ImportError):
            find_login: Any = import_module("requests.utils").get_netrc_auth
            login = find_login(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
            keys += [login[1]] if login else []
        return [*keys, *(basic_login("api", key) for key in keys)]

    def _log(self, when: float, mode: str, step: int, row: dict[str, Any]) -> None:
        if mode not in self._axes:
            self._axes.add(mode)
            self._run.define_metric(f"{mode}/*", step_metric="step")
        at, self._resume_at = self._resume_at, None
        self._run.log({**row, "step": step, "_timestamp": when}, step=at, commit=True)

    def _log_media(self, when: float, event: ImageLogged | HistogramLogged) -> None:
        lib, key = self._lib, key_of(event)
        try:
            if isinstance(event, HistogramLogged):
                self._log(when, event.mode, event.step, {key: lib.Histogram(np_histogram=_histogram(event))})
                return
            if (png := self.png_of(event)) is None:
                return
            with TemporaryDirectory() as folder:
                path = Path(folder, "image.png")
                path.write_bytes(png)
                self._log(when, event.mode, event.step, {key: lib.Image(str(path))})
        except (TypeError, ValueError, ImportError) as error:
            self.warn_once(key, f"{key} is left out: {error}")

    def _update_best(self, row: dict[str, float], step: int) -> None:
        for key in row.keys() & self._direction.keys():
            if self._is_best(key, row[key]):
                self._best[key] = row[key]
                self._run.summary.update({f"best/{key}": row[key], f"best/{key}_step": step})

    def _is_best(self, key: str, value: Any) -> bool:
        if not isinstance(value, int | float) or isnan(value):
            return False
        best, sign = self._best.get(key), 1 if self._direction[key] == "max" else -1
        return best is None or sign * value > sign * best

    def _read_back(self, folder: Path, run_id: str) -> dict[str, int] | None:
        """Return the last step of each name in the run's files, and note the best values.

        A kill loses what wandb held in memory, perhaps all of it, so only the files tell what wandb has.
        Returns None if there are none, as after `wandb sync --clean`.
        """
        self._resume_at = None
        if not has_files(folder, run_id):
            return None
        last: dict[str, int] = {}
        for row in read_history(folder, run_id):
            self._resume_at = row["_step"] + 1
            if not isinstance(step := row.pop("step", None), int):
                continue
            record_last(last, row, step)
            for key in row.keys() & self._direction.keys():
                if self._is_best(key, row[key]):
                    self._best[key] = row[key]
        return last

    def _send_checkpoint(self, event: CheckpointSaved) -> None:
        if (path := self.checkpoint_of(event)) is None:
            return
        artifact = self._lib.Artifact(f"checkpoint-{self._known.id}", "model", metadata={"step": event.iter})
        folder = path if path.is_dir() else path.parent
        for file in [*path.rglob("*")] if path.is_dir() else [path]:
            if file.is_file():  # add_dir would print a line
                artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
        self._run.log_artifact(artifact, aliases=["latest", path.name])
        self.record_sent(event)


def _settings(lib: Any) -> Any:
    """Return settings with which wandb prints nothing, asks nothing and waits for nothing without an end."""
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
    """Silence the line about the login, to which the settings of the run do not apply; errors are shown."""
    settings = lib.setup().settings
    lib.termsetup(settings.model_copy(update={"show_info": False}), None)
    try:
        yield
    finally:
        lib.termsetup(settings, None)


def _check_environment(lib: Any) -> None:
    """Refuse environment variables that wandb would refuse when the run begins.

    Raises:
        ValueError: naming the variable.
    """
    for name in [each for each in os.environ if each.startswith("WANDB_")]:
        value = os.environ[name]
        try:
            lib.Settings().update_from_env_vars({name: value})
        except Exception as error:
            reason = error.errors()[0]["msg"] if hasattr(error, "errors") else error  # of pydantic
            shown = "***" if any(word in name for word in _SECRET) else _without_secrets(value)
            text = f"{name} must be a value that wandb takes, got {shown!r}"
            raise ValueError(text if value in str(reason) else f"{text}: {reason}") from None


def _without_secrets(value: str) -> str:
    """Return a value without the parts that are a login or a key in a URL, also if it is no whole URL."""
    address, query, _ = value.rpartition("@")[2].partition("?")
    return "***@" * ("@" in value) + address + "?***" * bool(query)


def _check_key() -> None:
    """Refuse a WANDB_API_KEY of a wrong form; whether the key is valid, only the server can say.

    Raises:
        ValueError: with wandb's reason.
    """
    key = os.environ.get("WANDB_API_KEY")
    with suppress(ImportError):  # another version of wandb, which checks it when the run begins
        validation: Any = import_module("wandb.sdk.lib.wbauth.validation")
        if key and (reason := validation.check_api_key(key)):
            raise ValueError(f"WANDB_API_KEY must be a key of W&B, got *** (in wandb's words: {reason})")


def _check_project(project: str, source: str) -> str:
    """Refuse a name that W&B refuses.

    Args:
        source: the argument or variable with the name, for the message.

    Raises:
        ValueError: the name is too long, or has one of W&B's own characters.
    """
    if len(project) > 128 or any(character in "/\\#?%:" for character in project):
        raise ValueError(
            f"{source} must have at most 128 characters, none of them / \\ # ? % or :, got {project!r}"
        )
    return project


def _check_entity(source: str, entity: str | None) -> None:
    """Refuse a text that names no user and no team, such as "team/project".

    Args:
        source: the argument or variable with the entity, for the messages.

    Raises:
        TypeError, ValueError: naming the entity.
    """
    check_texts(**{source: entity})
    if entity and ("/" in entity or not entity.strip()):
        raise ValueError(f"{source} must be the name of a user or a team, without /, got {entity!r}")


def _check_tags(tags: Any) -> list[str]:
    is_list = isinstance(tags, Sequence) and not isinstance(tags, str)
    if not is_list or not all(isinstance(tag, str) and 1 <= len(tag) <= 64 for tag in tags):
        raise TypeError(f"tags must be a list of texts of 1 to 64 characters, got {tags!r}")
    return list(tags)


def _histogram(event: HistogramLogged) -> Any:
    import numpy as np

    from eventloop.writers.pixels import values

    array = values(event).astype(np.float64).ravel()
    return np.histogram(array[np.isfinite(array)], bins=BINS)
