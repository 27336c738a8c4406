"""Curves on a visdom server, while the run goes on."""

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
from eventloop.events.run import Run
from eventloop.util.text import UnavailableError
from eventloop.writers.checks import check_place
from eventloop.writers.lines import is_rate
from eventloop.writers.writer import Writer

logger = logging.getLogger("eventloop")

Name = tuple[str, str]
"""A metric and its mode."""


class VisdomWriter(Writer):
    """Draws a panel per metric, with a curve per mode, `step` on the x axis.

        VisdomWriter("localhost", 8097, interested_keys=["loss", "val/accuracy"])

    A server that is not there when the run begins (`python -m visdom.server` starts one) is an error: a warning says so,
    the run goes on without this writer, and its summary has its events as failed or dropped. One that goes away later is tried again every `retry_interval` seconds, and at the end of the run;
    meanwhile up to `backlog` points wait, and are drawn when it is back. Beyond that, or if it does not come back, the
    writer fails with the number of points that were not drawn. What a server forgot when it was restarted is not
    drawn again. NaN and the infinities are gaps in the curve.

    It runs in a process where that can import its class and its arguments pickle, else on a thread: each value is a request
    of its own, some milliseconds of the interpreter. What it logs goes to that process's standard error.

    When training begins, points of later steps that an earlier run left in the environment are removed. A step has
    one point on a curve: the last one.

    Args:
        host: name of the server, or its URL without the port.
        port: of the server.
        window_size: a training value is drawn as the median of those logged in the last so many iterations, without
            NaN and the infinities; 1 draws every value as it is. Learning rates, and values of other modes, are
            never smoothed.
        interested_keys: the metrics to draw, as "loss" (in every mode) or "val/loss"; by default all of them.
        env: visdom's environment; the name of the run's work_dir by default, so that runs are apart.
        base_url, username, password: of the server, where it has them.
        timeout: seconds one request may take.
        retry_interval: seconds between two attempts to reach a server that went away.
        backlog: how many points may wait for it.
        name: what reports call the writer; needed for a second one.
        offload: "process", "thread", or "auto", the default.

    Raises:
        ImportError: visdom is not installed.
        TypeError, ValueError: see the message.
    """

    events = (ScalarsLogged, BeforeTrain)
    batch = True
    offload = "auto"

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
        retry_interval: float = 10.0,
        backlog: int = 100_000,
        name: str | None = None,
        offload: str | None = None,
    ) -> None:
        if offload is not None:
            self.offload = check_place(offload)
        _check(port=port, window_size=window_size, backlog=backlog)
        _check_seconds("timeout", timeout, zero=False)
        _check_seconds("retry_interval", retry_interval, zero=True)
        _check_texts(host=host, base_url=base_url)
        _check_texts(optional=True, env=env, username=username, password=password)
        self.window_size = window_size
        self.interested_keys = _check_keys(interested_keys)
        self.env = env
        self.retry_interval = retry_interval
        self.backlog = backlog
        self.name = name
        self._server: dict[str, Any] = {
            "host": host, "port": port, "timeout": timeout, "base_url": base_url, "username": username,
            "password": password,
        }  # fmt: skip
        self._lib = _import_library()

    def open(self, run: Run) -> None:
        env = self.env or Path(run.work_dir).resolve().name
        self._panels = self._lib.Panels(env=env, **self._server)
        self._recent: dict[Name, deque[tuple[int, float]]] = {}
        self._pending: dict[Name, dict[int, float]] = {}
        self._last: dict[
            Name, int
        ] = {}  # the last step drawn, of curves known to be on the server as we drew them
        self._start: int | None = None  # where training began, or None
        self._cut: set[Name] = (
            set()
        )  # the curves from which what an earlier run had of later steps was removed
        self._missing = {*self.interested_keys} if self.interested_keys is not None else set()
        self._retry_at = 0.0
        self._error: ConnectionError | None = None
        try:
            self._panels.check()
        except ConnectionError as error:
            raise UnavailableError(error) from None

    def write(self, event: Event) -> None:
        self.write_batch([event])

    def write_batch(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, BeforeTrain):
                self._begin(event.iter)
            elif isinstance(event, ScalarsLogged):
                self._take(event)
        if self._error is None or monotonic() >= self._retry_at:
            self._try_to_draw()
        if self._error is not None and self._waiting > self.backlog:
            raise self._lost()

    def flush(self) -> None:
        self._try_to_draw()
        if self._error is not None and self._waiting:
            raise self._lost()

    def close(self) -> None:
        if self._missing:
            logger.warning(
                "VisdomWriter: nothing was logged under %s; names of metrics, or mode/name, are expected",
                ", ".join(map(repr, sorted(self._missing))),
            )
        self.flush()

    # --- taking values in ----------------------------------------------------------------------------------

    def _begin(self, completed: int) -> None:
        """Training begins: curves go on from there."""
        for points in self._pending.values():
            for step in [step for step in points if step > completed]:
                del points[step]
        self._start = completed
        self._cut.clear()
        self._last.clear()
        self._recent.clear()

    def _take(self, event: ScalarsLogged) -> None:
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
        if not self._waiting:
            return
        try:
            self._panels.check()
            for name in [*self._pending]:
                self._draw(name, self._pending[name])
                del self._pending[name]
        except ConnectionError as error:
            if self._error is None:
                logger.warning("%s; points wait until it is back", error)
            self._error = error
            self._last.clear()  # who knows what the server has, and whether it is still the same one
            self._retry_at = monotonic() + self.retry_interval
        else:
            self._error = None

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
        """Points of a curve we do not know, or for earlier steps: put them in their places."""
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
            "VisdomWriter needs visdom: pip install 'torch-eventloop[visdom]', with PIP_CONSTRAINT naming a file that has "
            "setuptools<81 in it, by which visdom is built"
        ) from error
    from eventloop.writers import visdom_client  # imports numpy too

    return visdom_client


@contextmanager
def _no_torch_in_worker() -> Iterator[None]:
    """visdom imports torch, if there is one, to know a tensor when it is given one. This writer gives it none, and in a
    worker process that has no torch it would be two seconds of a processor and 200 MB. A program's own imports are
    left alone."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name != "eventloop.background.workers.worker" or "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it is an ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]


def _check(**counts: Any) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} must be an int, got {count!r}")
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def _check_seconds(name: str, seconds: Any, *, zero: bool) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {seconds!r}")
    if not (seconds > 0 or (zero and seconds == 0)):
        raise ValueError(f"{name} must be {'at least' if zero else 'above'} 0 seconds, got {seconds}")


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
            "interested_keys is empty, so nothing would be drawn: leave it out to draw everything"
        )
    return frozenset(keys)
