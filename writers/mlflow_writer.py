"""Send metrics, parameters, images, texts and checkpoints of a run to MLflow."""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from typing import Any, ClassVar
from urllib.parse import urlsplit

from eventloop.description.plain_values import flat
from eventloop.events import CheckpointSaved, Event, ImageLogged, RunInfo, ScalarsLogged, TextLogged
from eventloop.events.deferred import Timed
from eventloop.events.run import Run
from eventloop.util.checks import check_bools
from eventloop.util.file_names import safe_name
from eventloop.util.surrogates import escaped
from eventloop.util.text import error_text
from eventloop.writers.tracker import RUN_EVENTS, TrackerWriter
from eventloop.writers.tracker_arguments import (
    basic_login,
    check_mapping,
    check_texts,
    masked,
    refuse_password,
    secrets_of,
    setting,
)
from eventloop.writers.tracker_state import Known
from eventloop.writers.tracker_values import run_name_of, values_of

_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
TAG_LENGTH = 5000
"""The most characters of a tag that every MLflow server accepts; newer servers accept 8,000."""
PARAM_LENGTH, PARAMS = 6000, 100
"""The most characters of a parameter, and the most parameters of a request."""
NAME_LENGTH = 500
"""The most characters of an experiment's name."""
_DATABASES = ("mssql", "mysql", "postgresql", "sqlite")
_DATABRICKS = ("databricks", "databricks-uc", "uc")
"""Tracking URIs without a colon that MLflow takes for a server, not for a folder."""
_SCHEMES = (
    f"MLflow takes the schemes http, https, {', '.join(_DATABASES)}, file, databricks and those of plugins"
)
_URLLIB3 = ("urllib3.connection", "urllib3.connectionpool", "urllib3.util.retry")
_REFUSED = re.compile(r"[^\w\-. :/]")
"""Matches a character that MLflow refuses in the names of metrics, parameters and tags."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the log records of MLflow and urllib3 on this thread, because the writer logs their errors."""
    thread = get_ident()

    def is_logged(record: logging.LogRecord) -> bool:
        return record.thread != thread or not record.name.startswith(("mlflow", "urllib3"))

    filtered = [*logging.getLogger("mlflow").handlers, *map(logging.getLogger, _URLLIB3)]
    for handler_or_logger in filtered:
        handler_or_logger.addFilter(is_logged)
    try:
        yield
    finally:
        for handler_or_logger in filtered:
            handler_or_logger.removeFilter(is_logged)


class MLflowWriter(TrackerWriter):
    """Send a run to an MLflow server or database, as metrics `{mode}/{name}`.

        MLflowWriter("sqlite:///mlflow.db", experiment="digits", params={"lr": 0.1})

    The values of up to 256 events are logged together; MLflow's client splits them by the limits of a
    server. The facts of the run are tags. Its settings, including those of `Trainer(config=...)`, are
    parameters, which keep their first values. The run ends as FINISHED, as FAILED after an error, and as
    KILLED after Ctrl-C or a preemption. After a kill of the program it ends as KILLED only if the writer runs
    in a worker process, which outlives the program. Images and texts are artifacts. MLflow has no histograms.

    A resumed run continues the run whose id is in `<work_dir>/mlflow_run.json`. MLflow cannot remove steps,
    so steps that are run again keep the values that MLflow has. A kill loses the events that waited for the
    server. They are read from the run's event log, if the run has an `EventLogWriter`.

    The writer logs in as MLflow does, for example with MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD.

    Args:
        tracking_uri: the server, database or folder; by default MLFLOW_TRACKING_URI. A URI with a password is
            accepted only there. A folder needs MLFLOW_ALLOW_FILE_STORE=true.
        experiment: the name of the experiment, which is created if needed; by default that in
            MLFLOW_EXPERIMENT_NAME, else the experiment with the id in MLFLOW_EXPERIMENT_ID, else MLflow's
            "Default".
        run_name: the name of the run in MLflow; by default `name`, or else that of the work dir.
        params: parameters of the run.
        tags: tags of the run.
        checkpoints: whether each saved checkpoint is sent as an artifact.
        name: the writer's name in reports; needed if a bus has two writers of this class.
        offload: "process", "thread", or "auto", the default: a process if possible.

    Raises:
        ImportError: mlflow, or the driver of the database, is not installed.
        TypeError, ValueError: there is no `tracking_uri`, it has a password, MLflow could not use it, or
            another argument or environment variable is wrong.
    """

    events = (*RUN_EVENTS, ScalarsLogged, ImageLogged, TextLogged, RunInfo, CheckpointSaved)
    service: ClassVar[str] = "MLflow"
    target: ClassVar[str] = "mlflow"
    secret_variables: ClassVar[tuple[str, ...]] = (
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_TOKEN",
        "DATABRICKS_TOKEN",
    )
    stall_timeout = 1800.0  # on a thread, MLflow itself sends a request up to 8 times, for 120 s each

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        *,
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        checkpoints: bool = False,
        name: str | None = None,
        offload: str | None = None,
    ) -> None:
        super().__init__(name, offload)
        refuse_password("tracking_uri", tracking_uri, "in MLFLOW_TRACKING_URI")
        self._uri, source = setting("tracking_uri", tracking_uri, "MLFLOW_TRACKING_URI", "MLflowWriter")
        check_texts(experiment=experiment, run_name=run_name)
        check_bools(checkpoints=checkpoints)
        _check_experiment(experiment)
        self.experiment = experiment
        self.run_name = run_name or name
        self.params = _check_names("params", params)
        self.tags = _check_names("tags", tags)
        self.checkpoints = checkpoints
        modules = ("mlflow", "mlflow.entities", "eventloop.writers.pixels")
        self._lib, self._entities, _ = self.import_library(*modules)
        _check_requests(self._lib)
        _check_uri(self._lib, self._uri, source)
        self._client: Any = None
        self._sent_params: set[str] = set()  # the names of the parameters that the run has

    @_quiet()
    def connect(self, run: Run, known: Known) -> Known:
        self._client = client = self._lib.MlflowClient(self._uri)
        last_steps: dict[str, int] = {}
        self._sent_params = set()
        if known.id:
            mlflow_run = client.get_run(known.id)
            client.update_run(known.id, status="RUNNING")
            # `data.metrics` has no steps
            last_steps = {metric.key: metric.step for metric in mlflow_run.data._metric_objs}
            self._sent_params = {*mlflow_run.data.params}
        else:
            mlflow_run = client.create_run(self._experiment_id(), run_name=run_name_of(run, self.run_name))
        run_id = mlflow_run.info.run_id
        self._send_params(run_id, self.params)
        self._send_tags(run_id, self.tags)
        return Known(run_id, {**known.last, **last_steps})  # only `known` has the steps of images and texts

    def begin_process(self) -> None:
        """Let a failing request raise after one retry, because this writer retries itself.

        It is called only in processes that run writers, so MLflow calls of the program are not affected.
        """
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

    @_quiet()
    def send(self, events: list[Timed]) -> None:
        metrics: list[Any] = []
        for timestamp, event in events:
            if isinstance(event, ScalarsLogged):
                metrics += self._metrics(timestamp, event)
        self._client.log_batch(self._known.id, metrics=metrics)
        # metrics are sent, and removed from the list, before artifacts, whose upload may fail
        events[:] = [item for item in events if not isinstance(item.event, ScalarsLogged)]
        while events:
            self._send_other(events[0].event)
            del events[0]

    def _send_other(self, event: Event) -> None:
        """Send an event that has no metrics."""
        match event:
            case RunInfo():
                # the plan of the handlers is a table that is longer than a tag may be
                facts = {f"eventloop.{key}": text for key, text in event.info.items() if key != "plan"}
                self._send_tags(self._known.id, facts)
                self._send_params(self._known.id, {**dict(flat(event.options)), **dict(flat(event.config))})
            case ImageLogged():
                self._send_image(event)
            case TextLogged():
                self._client.log_text(self._known.id, event.text, f"{_file(event)}.txt")
            case CheckpointSaved() if self.checkpoints:
                self._send_checkpoint(event)

    @_quiet()
    def end(self, status: str) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._known.id, status)

    def where(self) -> str:
        return f" at {masked(self._uri, secrets_of(self._uri))}"

    def secrets(self) -> list[str]:
        user = os.environ.get("MLFLOW_TRACKING_USERNAME", "")
        password = os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
        login = [basic_login(user, password)] if password else []
        return [*super().secrets(), *secrets_of(self._uri), *login]

    def _experiment_id(self) -> str:
        """Return the id of the chosen experiment, which is created if MLflow does not have it."""
        name = self.experiment or os.environ.get(_EXPERIMENT)
        if not name and (chosen_id := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return chosen_id
        name = name or "Default"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            new_id: str = self._client.create_experiment(name)
            return new_id
        known_id: str = experiment.experiment_id
        return known_id

    def _metrics(self, timestamp: float, event: ScalarsLogged) -> Iterator[Any]:
        """Yield MLflow's metric for each scalar of an event; a name that MLflow refuses is logged instead."""
        for key, value in values_of(event).items():
            if _is_refused(key):
                self.warn_once(key, f"{key!r} is left out: expected {_ALLOWED}")
            else:
                yield self._entities.Metric(key, value, int(timestamp * 1000), event.step)

    def _send_tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Send tags; a value that is too long is cut, a name that MLflow refuses is logged instead."""
        accepted = []
        for key, value in tags.items():
            text = escaped(str(value))
            if _is_refused(key):
                self.warn_once(key, f"the tag {key!r} is left out: expected {_ALLOWED}")
                continue
            if len(text) > TAG_LENGTH:
                self.warn_once(
                    key, f"the tag {key!r} of {len(text):,} characters is cut after {TAG_LENGTH:,}"
                )
            accepted.append(self._entities.RunTag(key, text[:TAG_LENGTH]))
        self._client.log_batch(run_id, tags=accepted)

    def _send_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Send the parameters that the run does not have yet; MLflow refuses to change a parameter."""
        new = {}
        for key, value in params.items():
            if _is_refused(key):
                self.warn_once(key, f"the parameter {key!r} is left out: expected {_ALLOWED}")
            elif key not in self._sent_params:
                text = escaped(str(value))
                if len(text) > PARAM_LENGTH:
                    self.warn_once(
                        key,
                        f"the parameter {key!r} of {len(text):,} characters is cut after {PARAM_LENGTH:,}",
                    )
                new[key] = self._entities.Param(key, text[:PARAM_LENGTH])
        names = [*new]
        for first in range(0, len(names), PARAMS):
            request_names = names[first : first + PARAMS]
            self._client.log_batch(run_id, params=[new[name] for name in request_names])
            self._sent_params.update(request_names)

    def _send_image(self, event: ImageLogged) -> None:
        if (png := self.png_of(event)) is None:
            return
        with TemporaryDirectory() as folder:
            path = Path(folder, f"{event.step}.png")
            path.write_bytes(png)
            self._client.log_artifact(self._known.id, str(path), _file(event).rpartition("/")[0])

    def _send_checkpoint(self, event: CheckpointSaved) -> None:
        if (path := self.checkpoint_of(event)) is None:
            return
        if path.is_dir():
            self._client.log_artifacts(self._known.id, str(path), f"checkpoints/{path.name}")
        else:
            self._client.log_artifact(self._known.id, str(path), "checkpoints")
        self.record_sent(event)


_ALLOWED = "at most 250 letters, digits and characters of _ - . : / and space, as MLflow does"


def _check_requests(lib: Any) -> None:
    """Refuse a timeout or number of retries in the environment with which every request would fail.

    Raises:
        ValueError: the message names the environment variable.
    """
    for name, least in {"MLFLOW_HTTP_REQUEST_TIMEOUT": 1, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": 0}.items():
        try:
            is_valid = getattr(lib.environment_variables, name).get() >= least
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {os.environ[name]!r}")


def _check_uri(lib: Any, uri: str, source: str) -> None:
    """Refuse a URI that MLflow cannot use; no request is sent and no file is created.

    Args:
        lib: the module `mlflow`.
        uri: the URI.
        source: the argument or environment variable that has the URI, for the message.

    Raises:
        ImportError: the database needs a package that is not installed.
        ValueError: MLflow or SQLAlchemy refuses the URI. The message has its reason, and no password.
    """
    secrets = secrets_of(uri)
    try:
        _try_uri(lib, uri)
    except ImportError as error:
        raise ImportError(f"{source} {masked(uri, secrets)!r} needs a package: {error}") from None
    except Exception as error:
        reason = str(error) if type(error) is ValueError else error_text(error)
        raise ValueError(
            f"{source} must be a server or a database, such as http://localhost:5000 or "
            f"sqlite:///mlflow.db, got {masked(uri, secrets)!r}: "
            f"{masked(' '.join(reason.split()), secrets)}"
        ) from None


def _try_uri(lib: Any, uri: str) -> None:
    """Raise the error of MLflow, SQLAlchemy or requests about a URI; connect to nothing."""
    parts = urlsplit(uri)
    scheme = uri if uri in _DATABRICKS else parts.scheme.partition("+")[0]
    if scheme in ("http", "https"):
        if parts.query or parts.fragment:
            raise ValueError("a server's URL has no ? and no #")
        importlib.import_module("requests").Request("GET", uri).prepare()
    if scheme in _DATABASES:
        importlib.import_module("sqlalchemy").create_engine(uri)
    elif scheme == "file" or len(scheme) < 2:  # a folder; one letter is a drive of Windows
        with TemporaryDirectory() as folder:
            lib.MlflowClient(folder)  # raises if this MLflow does not accept folders
    elif scheme in ("uc", "databricks-uc"):  # these servers store models, not runs
        raise ValueError(_SCHEMES)
    else:
        try:
            lib.MlflowClient(uri)
        except lib.exceptions.MlflowException as error:
            if "unsupported URI" not in str(error):
                raise
            raise ValueError(_SCHEMES) from None


def _is_refused(key: str) -> bool:
    """Return whether MLflow refuses the name of a metric, parameter or tag.

    A name may have at most 250 of certain characters; none of its parts between "/" may be "", "." or "..".
    """
    parts = key.split("/")
    return bool(_REFUSED.search(key)) or len(key) > 250 or any(part in ("", ".", "..") for part in parts)


def _check_experiment(experiment: str | None) -> None:
    """Refuse an experiment's name, from the argument or the environment, that is too long for MLflow.

    Raises:
        ValueError: the message names the argument or the environment variable.
    """
    name, source = experiment, "experiment"
    if not name:
        name, source = os.environ.get(_EXPERIMENT, ""), _EXPERIMENT
    if len(name) > NAME_LENGTH:
        raise ValueError(f"{source} must have at most {NAME_LENGTH} characters, got {len(name)}")


def _check_names(argument: str, value: object) -> dict[str, Any]:
    """Return an argument that is a mapping or None as a dict, after a check that MLflow accepts its keys."""
    mapping = check_mapping(argument, value)
    for key in mapping:
        if _is_refused(key):
            raise ValueError(f"the names in {argument} must have {_ALLOWED}, got {key!r}")
    return mapping


def _file(event: ImageLogged | TextLogged) -> str:
    """Return the path of an artifact without its suffix, such as "train/samples/40"."""
    return "/".join(map(safe_name, (event.mode, *event.name.split("/"), str(event.step))))
