"""Send metrics, parameters, images, texts and checkpoints of a run to MLflow."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from typing import Any, ClassVar

from eventloop.description.plain_values import flat
from eventloop.events import CheckpointSaved, Event, ImageLogged, RunInfo, ScalarsLogged, TextLogged
from eventloop.events.deferred import Timed
from eventloop.events.run import Run
from eventloop.util.checks import check_bools
from eventloop.util.file_names import safe_name
from eventloop.util.surrogates import escaped
from eventloop.writers.mlflow_arguments import (
    ALLOWED,
    EXPERIMENT_VARIABLE,
    check_experiment,
    check_names,
    check_requests,
    check_uri,
    is_refused,
)
from eventloop.writers.tracker import RUN_EVENTS, TrackerWriter
from eventloop.writers.tracker_arguments import (
    basic_login,
    check_texts,
    masked,
    refuse_password,
    secrets_of,
    setting,
)
from eventloop.writers.tracker_state import Known
from eventloop.writers.tracker_values import run_name_of, values_of

TAG_LENGTH = 5000
"""The most characters of a tag that every MLflow server accepts; newer servers accept 8,000."""
PARAM_LENGTH, PARAMS = 6000, 100
"""The most characters of a parameter, and the most parameters of a request."""
_URLLIB3 = ("urllib3.connection", "urllib3.connectionpool", "urllib3.util.retry")
"""The loggers of urllib3 that report failed requests."""


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
        check_experiment(experiment)
        self.experiment = experiment
        self.run_name = run_name or name  # None: `run_name_of` takes the name of the work dir
        self.params = check_names("params", params)
        self.tags = check_names("tags", tags)
        self.checkpoints = checkpoints
        # `pixels` too, so that a missing numpy raises an error here and not at the first image
        modules = ("mlflow", "mlflow.entities", "eventloop.writers.pixels")
        self._lib, self._entities, _ = self.import_library(*modules)
        check_requests(self._lib)
        check_uri(self._lib, self._uri, source)
        self._client: Any = None
        self._sent_params: set[str] = set()  # the names of the parameters that the run has

    @_quiet()
    def connect(self, run: Run, known: Known) -> Known:
        """Create a run in MLflow or continue the run that `known` names, and send parameters and tags.

        Returns:
            the run's id, and the last step of each metric, image, text and checkpoint.
        """
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
        return Known(run_id, {**known.last, **last_steps})

    def begin_process(self) -> None:
        """Let a failing request raise after one retry, because this writer retries itself.

        It is called only in processes that run writers, so MLflow calls of the program are not affected.
        """
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

    @_quiet()
    def send(self, events: list[Timed]) -> None:
        """Send all scalars with one call, then the other events one by one; remove them from the list."""
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
        """Return the passwords of MLflow's server, which come from the environment or the URI."""
        user = os.environ.get("MLFLOW_TRACKING_USERNAME", "")
        password = os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
        login = [basic_login(user, password)] if password else []
        return [*super().secrets(), *secrets_of(self._uri), *login]

    def _experiment_id(self) -> str:
        """Return the id of the chosen experiment, which is created if MLflow does not have it."""
        name = self.experiment or os.environ.get(EXPERIMENT_VARIABLE)
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
            if is_refused(key):
                self.warn_once(key, f"{key!r} is left out: expected {ALLOWED}")
            else:
                yield self._entities.Metric(key, value, int(timestamp * 1000), event.step)

    def _send_tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Send tags; a value that is too long is cut, a name that MLflow refuses is logged instead."""
        accepted = []
        for key, value in tags.items():
            text = escaped(str(value))
            if is_refused(key):
                self.warn_once(key, f"the tag {key!r} is left out: expected {ALLOWED}")
                continue
            if len(text) > TAG_LENGTH:
                self.warn_once(
                    key, f"the tag {key!r} of {len(text):,} characters is cut after {TAG_LENGTH:,}"
                )
            accepted.append(self._entities.RunTag(key, text[:TAG_LENGTH]))
        self._client.log_batch(run_id, tags=accepted)

    def _send_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Send the parameters that the run does not have yet; MLflow refuses to change a parameter."""
        new_params = {}
        for key, value in params.items():
            if is_refused(key):
                self.warn_once(key, f"the parameter {key!r} is left out: expected {ALLOWED}")
            elif key not in self._sent_params:
                text = escaped(str(value))
                if len(text) > PARAM_LENGTH:
                    self.warn_once(
                        key,
                        f"the parameter {key!r} of {len(text):,} characters is cut after {PARAM_LENGTH:,}",
                    )
                new_params[key] = self._entities.Param(key, text[:PARAM_LENGTH])
        names = [*new_params]
        for start in range(0, len(names), PARAMS):
            request_names = names[start : start + PARAMS]
            self._client.log_batch(run_id, params=[new_params[name] for name in request_names])
            self._sent_params.update(request_names)

    def _send_image(self, event: ImageLogged) -> None:
        """Send an image by a temporary file, because MLflow's client takes a path."""
        if (png := self.png_of(event)) is None:
            return
        with TemporaryDirectory() as folder:
            path = Path(folder, f"{event.step}.png")
            path.write_bytes(png)
            self._client.log_artifact(self._known.id, str(path), _file(event).rpartition("/")[0])

    def _send_checkpoint(self, event: CheckpointSaved) -> None:
        """Send a checkpoint, a folder or a file, as an artifact."""
        if (path := self.checkpoint_of(event)) is None:
            return
        if path.is_dir():
            self._client.log_artifacts(self._known.id, str(path), f"checkpoints/{path.name}")
        else:
            self._client.log_artifact(self._known.id, str(path), "checkpoints")
        self.record_sent(event)


def _file(event: ImageLogged | TextLogged) -> str:
    """Return the path of an artifact without its suffix, such as "train/samples/40"."""
    return "/".join(map(safe_name, (event.mode, *event.name.split("/"), str(event.step))))
