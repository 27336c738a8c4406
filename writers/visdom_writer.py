"""Draw curves on a visdom server during the run.

The module `visdom_client` talks to the server.
"""

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

    If the server disappears later, the writer retries every `retry_seconds` seconds and at the end of the
    run. Up to `backlog` points wait and are drawn when the server is back. With more points, or if the server
    stays away, the writer fails with the number of points that were not drawn. Curves that a server lost by a
    restart are not drawn again. NaN and the infinities are gaps in a curve.

    Points that the server, or a proxy before it, refuses are left out: their curve is named once in the log,
    their events count as failed, and all other curves are drawn. Points that are too many for one request are
    drawn with several.

    By default the writer runs in a worker process, because each value is a request that takes some
    milliseconds of the interpreter. It runs on a thread if the process cannot import its class or the
    arguments do not pickle.

    When training begins, points of later steps that an earlier run left in the environment are removed. A
    curve has one point per step, the last one logged.

    Args:
        host: name of the server, or its URL without the port.
        port: port of the server.
        window_size: a training value is drawn as the median of the finite values in the last `window_size`
            iterations; 1 draws every value unchanged. Learning rates, and values of other modes, are never
            smoothed.
        interested_keys: the metrics to draw, as "loss" (in every mode) or "val/loss"; by default all.
        env: visdom's environment; by default the name of the run's work_dir, so that runs are separate.
        base_url, username, password: the server's base URL, user name and password, if it has them.
        timeout: seconds that one request may take.
        retry_seconds: seconds between two attempts to reach a server that disappeared.
        backlog: how many points may wait for the server.
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
        self._untaken = 0  # how many of the last events may have points that are not drawn
        self._refused: list[BadEvent] = []  # events with refused points that are not reported yet

    def open(self, run: Run) -> None:
        env = self.env or Path(run.work_dir).resolve().name
        self._panels = self._lib.Panels(env=env, **self._server)
        self._recent: dict[Name, deque[tuple[int, float]]] = {}
        self._pending: dict[Name, dict[int, float]] = {}
        # the last step drawn, only of curves that the server still has as they were drawn
        self._last: dict[Name, int] = {}
        self._start: int | None = None  # the iteration at which training began, or None
        self._cut: set[Name] = set()  # the curves from which an earlier run's later steps were removed
        self._missing = {*self.interested_keys} if self.interested_keys is not None else set()
        self._retry_at = 0.0
        self._error: ConnectionError | None = None
        self._untaken, self._refused = 0, []
        self._unsent: list[ScalarsLogged] = []  # the events whose points may not be drawn yet
        self._bad: dict[Name, set[int]] = {}  # by curve, the steps of points that the server has refused
        self._warned: set[Name] = set()  # the curves that the log has named as left out
        try:
            self._panels.check()
        except ConnectionError as error:
            raise UnavailableError(error) from None

    def write(self, event: Event) -> None:
        self.write_batch([event])

    def write_batch(self, events: list[Event]) -> None:
        self._untaken += len(events)
        for event in events:
            if isinstance(event, BeforeTrain):
                self._begin(event.iter)
            elif isinstance(event, ScalarsLogged):
                self._store(event)
                self._unsent.append(event)
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
        if self._missing:
            logger.warning(
                "VisdomWriter: interested_keys never logged: %s; expected names of metrics, or mode/name",
                ", ".join(map(repr, sorted(self._missing))),
            )
        self.flush()

    # --- receiving values ----------------------------------------------------------------------------------

    def _begin(self, completed: int) -> None:
        """Drop waiting points of steps after `completed`, the iteration at which training begins."""
        for points in self._pending.values():
            for step in [step for step in points if step > completed]:
                del points[step]
        self._start = completed
        self._cut.clear()
        self._last.clear()
        self._recent.clear()

    def _store(self, event: ScalarsLogged) -> None:
        for key, value in event.scalars.items():
            if self.interested_keys is not None:
                found = self.interested_keys & {key, f"{event.mode}/{key}"}
                if not found:
                    continue
                self._missing -= found
            smooth = event.mode == "train" and self.window_size > 1 and not is_rate(key)
            name = (key, event.mode)
            height = self._smoothed(name, event.step, value) if smooth else value
            self._pending.setdefault(name, {})[event.step] = height

    def _smoothed(self, name: Name, step: int, value: float) -> float:
        recent = self._recent.setdefault(name, deque())
        recent.append((step, value))
        while recent[0][0] <= step - self.window_size:
            recent.popleft()
        finite = [near for at, near in recent if math.isfinite(near) and at <= step]
        return median(finite) if math.isfinite(value) else value

    # --- drawing -------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> int:
        return sum(map(len, self._pending.values()))

    def _try_to_draw(self) -> None:
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
            self._last.clear()  # the server may have been restarted, without its curves
            self._retry_at = monotonic() + self.retry_seconds
        else:
            self._error = None
            self._resolve()

    def _draw_unless_refused(self, name: Name, points: dict[int, float]) -> None:
        try:
            self._draw(name, points)
        except self._lib.RefusedError as error:
            self._bad.setdefault(name, set()).update(points)
            self._last.pop(name, None)  # it is unknown which of the points the server has
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("VisdomWriter: left out are %s/%s: %s", name[1], name[0], error)

    def _resolve(self) -> None:
        """Record that no event waits any more, and which of the events had points that were refused."""
        for event in self._unsent if self._bad else ():
            bad = [key for key in event.scalars if event.step in self._bad.get((key, event.mode), ())]
            if bad:
                self._refused.append(BadEvent(event_name(ScalarsLogged), bad[0], "refused", reported=True))
        self._bad, self._unsent, self._untaken = {}, [], 0

    def _draw(self, name: Name, points: dict[int, float]) -> None:
        if not points:
            return
        last = self._last.get(name)
        if last is not None and last < min(points) and [*points] == sorted(points):
            self._panels.append(*name, points)
        else:
            self._merge(name, points)
        self._last[name] = max(last or 0, *points)

    def _merge(self, name: Name, points: dict[int, float]) -> None:
        """Read the curve from the server, merge `points` into it by step, and draw the merged curve."""
        there = self._panels.read(*name)
        kept = there
        if self._start is not None and name not in self._cut:
            kept = {step: value for step, value in there.items() if step <= self._start}
        merged = dict(sorted({**kept, **points}.items()))
        if there:
            self._panels.replace(*name, merged)
        else:
            self._panels.append(*name, merged)
        self._cut.add(name)

    def _lost(self) -> ConnectionError:
        error = ConnectionError(f"{self._waiting} points were not drawn: {self._error}")
        error.__cause__ = self._error
        return error


def _import_library() -> ModuleType:
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
    for name, text in texts.items():
        if not isinstance(text, str) and not (optional and text is None):
            raise TypeError(
                f"{name} must be a str{' or None' if optional else ''}, got {type(text).__name__}"
            )


def _check_keys(keys: Any) -> frozenset[str] | None:
    if keys is None:
        return None
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"interested_keys must be a list of names such as ['loss'], got {keys!r}")
    if not keys:
        raise ValueError(
            f"interested_keys must name at least one metric, got {keys!r}: leave it out to draw everything"
        )
    return frozenset(keys)
