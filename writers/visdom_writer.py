"""Draw curves on a visdom server during the run; the module `visdom_client` sends the requests."""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import monotonic
from types import ModuleType
from typing import Any

from eventloop.events import BeforeTrain, Event, ScalarsLogged
from eventloop.events.base import event_name
from eventloop.events.encoding_errors import BadEvent, Unencodable
from eventloop.events.run import Run
from eventloop.migration.names import knowing_others
from eventloop.util.checks import check_choice, check_seconds, positive
from eventloop.util.text import UnavailableError
from eventloop.writers.checks import OFFLOADS
from eventloop.writers.lines import is_rate
from eventloop.writers.writer import Writer

logger = logging.getLogger("eventloop")

Name = tuple[str, str]
"""The name of a metric and its mode."""


class VisdomWriter(Writer):
    """Draw a panel per metric on a visdom server, with a curve per mode and `step` on the x axis.

        VisdomWriter("localhost", 8097, interested_keys=["loss", "val/accuracy"])

    If no server answers when the run begins (`python -m visdom.server` starts one), the writer is disabled
    with a warning. The run continues, and its summary counts the writer's events as failed or dropped.

    If the server cannot be reached later, the writer retries every `retry_seconds` seconds and at the end of
    the run. Up to `backlog` points wait until it answers. With more points, or if it does not answer until
    the end, the writer fails with the number of points that were not drawn. A server that is restarted loses
    its curves, which are not drawn again. NaN and the infinities are gaps in a curve.

    Points that the server, or a proxy before it, refuses are left out: the log names their curve once, their
    events count as failed, and all other curves are drawn. Points that are too many for one request are sent
    in several requests.

    By default the writer runs in a worker process, because each value is a request that takes some
    milliseconds of the interpreter. It runs on a thread if the process cannot import its class or the
    arguments do not pickle.

    When training begins, points of later steps are removed from the environment, because an earlier run has
    drawn them. A curve has one point per step, the last value logged.

    Args:
        host: name of the server, or its URL without the port.
        port: port of the server.
        window_size: a training value is drawn as the median of the finite values in the last `window_size`
            iterations. 1 draws every value unchanged. Learning rates, validation values and test values are
            never smoothed.
        interested_keys: the metrics to draw, as "loss" (in every mode) or "val/loss"; by default all.
        env: visdom's environment; by default the name of the run's work_dir, so that runs are separate.
        base_url, username, password: the server's base URL, user name and password, if it has them.
        timeout: the most seconds of a request.
        retry_seconds: the least seconds between two attempts to reach a server that does not answer.
        backlog: the most points that wait for a server that does not answer.
        name: the writer's name in reports; needed if a bus has two writers of this class.
        offload: "process", "thread", or "auto", the default.

    Raises:
        ImportError: visdom is not installed.
        TypeError, ValueError: an argument has a wrong type or value.
    """

    events = (ScalarsLogged, BeforeTrain)
    batch = True
    offload = "auto"

    @knowing_others
    def __init__(
        self,
        host: str = "localhost",
        port: int = 8097,
        window_size: int = 20,
        interested_keys: Sequence[str] | None = None,
        *,
        env: str | None = None,
        base_url: str = "/",
        username: str | None = None,
        password: str | None = None,
        timeout: float = 5.0,
        retry_seconds: float = 10.0,
        backlog: int = 100_000,
        name: str | None = None,
        offload: str | None = None,
    ) -> None:
        if offload is not None:
            check_choice("offload", offload, OFFLOADS)
            self.offload = offload
        positive("port", port)
        positive("window_size", window_size)
        positive("backlog", backlog)
        check_seconds("timeout", timeout, zero=False)
        check_seconds("retry_seconds", retry_seconds, zero=True)
        _check_texts(host=host, base_url=base_url)
        _check_texts(optional=True, env=env, username=username, password=password)
        self.window_size = window_size
        self.interested_keys = _check_keys(interested_keys)
        self.env = env
        self.retry_seconds = retry_seconds
        self.backlog = backlog
        self.name = name
        self._server: dict[str, Any] = {
            "host": host,
            "port": port,
            "timeout": timeout,
            "base_url": base_url,
            "username": username,
            "password": password,
        }
        self._lib = _import_library()
        self._untaken = 0  # how many of the last delivered events may have points that are not drawn
        self._refused: list[BadEvent] = []  # events with refused points that are not reported yet

    def open(self, run: Run) -> None:
        """Prepare for a run, and check that the server answers.

        Raises:
            UnavailableError: it does not answer.
        """
        env = self.env or Path(run.work_dir).resolve().name
        self._panels = self._lib.Panels(env=env, **self._server)
        self._recent: dict[Name, deque[tuple[int, float]]] = {}  # steps and values in the smoothing window
        self._pending: dict[Name, dict[int, float]] = {}  # the points to draw: step -> value
        # the last step drawn, for curves that the server has as this writer drew them
        self._last_drawn: dict[Name, int] = {}
        self._training_start: int | None = None  # the iteration at which training began; None before
        self._trimmed: set[Name] = set()  # the curves without the later steps of an earlier run
        self._missing = {*self.interested_keys} if self.interested_keys is not None else set()
        self._retry_at = 0.0  # the `monotonic()` before which a failed request is not repeated
        self._error: ConnectionError | None = None
        self._untaken, self._refused = 0, []
        self._undrawn: list[ScalarsLogged] = []  # the events whose points may not be drawn yet
        self._refused_steps: dict[Name, set[int]] = {}  # the steps of points that the server has refused
        self._warned: set[Name] = set()  # the curves whose refusal was logged
        try:
            self._panels.check()
        except ConnectionError as error:
            raise UnavailableError(error) from None

    def write(self, event: Event) -> None:
        self.write_batch([event])

    def write_batch(self, events: list[Event]) -> None:
        """Add the points of events, and draw all pending points unless it is too soon for a retry.

        Raises:
            ConnectionError: more than `backlog` points wait for the server.
            Unencodable: the server has refused points of some events.
        """
        self._untaken += len(events)
        for event in events:
            if isinstance(event, BeforeTrain):
                self._begin_training(event.iter)
            elif isinstance(event, ScalarsLogged):
                self._add_points(event)
                self._undrawn.append(event)
        if self._error is None or monotonic() >= self._retry_at:
            self._try_to_draw()
        if self._error is not None and self._waiting > self.backlog:
            self._untaken -= len(events)  # this delivery has failed
            raise self._lost()
        refused, self._refused = self._refused[: len(events)], self._refused[len(events) :]
        if refused:
            raise Unencodable(refused, of=len(events))

    @property
    def untaken(self) -> int:
        """Return how many of the last delivered events may not be drawn; they count as queued."""
        return self._untaken + len(self._refused)

    def flush(self) -> None:
        self._try_to_draw()
        if self._error is not None and self._waiting:
            raise self._lost()

    def close(self) -> None:
        """Warn of keys that were never logged, and send the last points."""
        if self._missing:
            logger.warning(
                "VisdomWriter: interested_keys never logged: %s; expected names of metrics, or mode/name",
                ", ".join(map(repr, sorted(self._missing))),
            )
        self.flush()

    # --- receiving values ----------------------------------------------------------------------------------

    def _begin_training(self, start: int) -> None:
        """Drop the points of steps after `start`, the iteration at which a training begins.

        Pending points are dropped here, and the points on the server at the next draw of each curve.
        """
        for points in self._pending.values():
            for step in [step for step in points if step > start]:
                del points[step]
        self._training_start = start
        self._trimmed.clear()
        self._last_drawn.clear()
        self._recent.clear()

    def _add_points(self, event: ScalarsLogged) -> None:
        """Add a point to the curve of each scalar in `interested_keys`; training values are smoothed."""
        for key, value in event.scalars.items():
            if self.interested_keys is not None:
                matching_keys = self.interested_keys & {key, f"{event.mode}/{key}"}
                if not matching_keys:
                    continue
                self._missing -= matching_keys
            is_smoothed = event.mode == "train" and self.window_size > 1 and not is_rate(key)
            name = (key, event.mode)
            drawn_value = self._smoothed(name, event.step, value) if is_smoothed else value
            self._pending.setdefault(name, {})[event.step] = drawn_value

    def _smoothed(self, name: Name, step: int, value: float) -> float:
        """Return the median of the finite values in the last `window_size` steps; or NaN and infinity."""
        recent = self._recent.setdefault(name, deque())
        recent.append((step, value))
        while recent[0][0] <= step - self.window_size:
            recent.popleft()
        if not math.isfinite(value):
            return value
        until_step = [recent_value for recent_step, recent_value in recent if recent_step <= step]
        return median(filter(math.isfinite, until_step))

    # --- drawing -------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> int:
        """Return the number of pending points."""
        return sum(map(len, self._pending.values()))

    def _try_to_draw(self) -> None:
        """Draw the pending points; an error is stored, and logged unless the try before failed too."""
        try:
            if self._waiting:
                self._panels.check()
            for name in [*self._pending]:
                self._draw_unless_refused(name, self._pending[name])
                del self._pending[name]
        except ConnectionError as error:
            if self._error is None:
                logger.warning("%s; points wait until it is back", error)
            self._error = error
            self._last_drawn.clear()  # the server may have been restarted, and then has lost its curves
            self._retry_at = monotonic() + self.retry_seconds
        else:
            self._error = None
            self._finish_events()

    def _draw_unless_refused(self, name: Name, points: dict[int, float]) -> None:
        """Draw points of a curve; if the server refuses them, record their steps and log a warning."""
        try:
            self._draw(name, points)
        except self._lib.RefusedError as error:
            self._refused_steps.setdefault(name, set()).update(points)
            self._last_drawn.pop(name, None)  # the server may have some of the points
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("VisdomWriter: left out are %s/%s: %s", name[1], name[0], error)

    def _finish_events(self) -> None:
        """Record that no event has undrawn points, and which events had points that were refused."""
        for event in self._undrawn if self._refused_steps else ():
            for key in event.scalars:
                if event.step in self._refused_steps.get((key, event.mode), ()):
                    self._refused.append(BadEvent(event_name(ScalarsLogged), key, "refused", reported=True))
                    break
        self._refused_steps, self._undrawn, self._untaken = {}, [], 0

    def _draw(self, name: Name, points: dict[int, float]) -> None:
        """Append points to a curve, or merge them into it if their steps are not all after its last step."""
        if not points:
            return
        last_step = self._last_drawn.get(name)
        if last_step is not None and last_step < min(points) and [*points] == sorted(points):
            self._panels.append(*name, points)
        else:
            self._merge(name, points)
        self._last_drawn[name] = max(last_step or 0, *points)

    def _merge(self, name: Name, points: dict[int, float]) -> None:
        """Read the curve from the server, merge `points` into it by step, and draw the merged curve.

        The first merge of a curve in a training removes the points of later steps of an earlier run.
        """
        server_points = self._panels.read(*name)
        earlier_points = server_points
        if self._training_start is not None and name not in self._trimmed:
            start = self._training_start
            earlier_points = {step: value for step, value in server_points.items() if step <= start}
        merged = dict(sorted({**earlier_points, **points}.items()))
        if server_points:
            self._panels.replace(*name, merged)
        else:
            self._panels.append(*name, merged)
        self._trimmed.add(name)

    def _lost(self) -> ConnectionError:
        """Return the error about the points that are not drawn, with their number."""
        error = ConnectionError(f"{self._waiting} points were not drawn: {self._error}")
        error.__cause__ = self._error
        return error


def _import_library() -> ModuleType:
    """Import visdom, and return the module `visdom_client`."""
    try:
        with _no_torch_in_worker():
            importlib.import_module("visdom")
    except ImportError as error:
        raise ImportError(
            "VisdomWriter needs visdom: pip install 'torch-eventloop[visdom]', with PIP_CONSTRAINT set to a "
            "file that contains setuptools<81, because visdom is built with it"
        ) from error
    import eventloop.writers.visdom_client as visdom_client  # imports numpy too

    return visdom_client


@contextmanager
def _no_torch_in_worker() -> Iterator[None]:
    """Make `import torch` fail inside the block, in a worker process that has not imported torch.

    visdom imports torch only to recognise tensors, which this writer never passes. The import would cost the
    process 2 s of CPU time and 200 MB. In any other process the block changes nothing.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name != "eventloop.background.workers.worker" or "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes an import of it raise ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]


def _check_texts(*, optional: bool = False, **texts: Any) -> None:
    """Raise a TypeError unless all arguments are a str, or with `optional` None."""
    for name, text in texts.items():
        if not isinstance(text, str) and not (optional and text is None):
            raise TypeError(
                f"{name} must be a str{' or None' if optional else ''}, got {type(text).__name__}"
            )


def _check_keys(keys: Any) -> frozenset[str] | None:
    """Return `interested_keys` as a set, or None; raise an error if it is empty or not of texts."""
    if keys is None:
        return None
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"interested_keys must be a list of names such as ['loss'], got {keys!r}")
    if not keys:
        raise ValueError(
            f"interested_keys must name at least one metric, got {keys!r}: leave it out to draw everything"
        )
    return frozenset(keys)
