"""Compute configured statistics of logged values in the background, like MMEngine's `custom_cfg`.

`LoggerHook` wraps each packet by `LogStatistics.wrap` if it has a `custom_cfg`. Without one, the mean of an
interval is logged.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

from msgspec.structs import replace

from eventloop.events import Event, ScalarsLogged
from eventloop.metrics.packet import Packet
from eventloop.metrics.reduce import WAIT_SECONDS, Reduced
from eventloop.metrics.rows import Row
from eventloop.metrics.statistics_windows import Result, Window, window_of
from eventloop.state.schema import read_as
from eventloop.util.checks import check_keys

logger = logging.getLogger("eventloop")

POLL_SECONDS = 0.001
"""Seconds between two checks of `state_dict` whether the values of a packet are reduced over the ranks."""
_KEYS = ["data_src", "method_name", "window_size", "log_name"]
"""The keys that an entry of a `custom_cfg` may have."""


class Statistic:
    """Compute the statistic of one scalar that an entry of a `custom_cfg` describes.

    Args:
        config: the entry, a mapping with `data_src` and perhaps `method_name`, `window_size` and `log_name`.

    Raises:
        TypeError, ValueError: `config` is not a mapping, lacks `data_src`, or has an unknown key, method or
            window.
    """

    def __init__(self, config: object) -> None:
        if not isinstance(config, Mapping):
            raise TypeError(f"an entry of custom_cfg must be a dict(data_src=..., ...), got {config!r}")
        check_keys("an entry of custom_cfg", config, _KEYS)
        if "data_src" not in config:
            raise ValueError(
                f"an entry of custom_cfg needs data_src, the name of a logged scalar, got {dict(config)!r}"
            )
        if not isinstance(config["data_src"], str):
            raise TypeError(f"data_src of custom_cfg must be a name, got {config['data_src']!r}")
        self.config = config
        self.source: str = config["data_src"]
        self.name: str = config.get("log_name") or self.source
        self.size = config.get("window_size", "global")
        self._failed = False
        self._method = config.get("method_name", "mean")
        self.window = self.new_window()

    def new_window(self) -> Window:
        """Return an empty window for the configured method and size."""
        return window_of(self._method, self.size)

    def add(self, rows: Iterable[Row]) -> bool:
        """Add the values of the scalar in `rows` to the window; return whether there are any."""
        return _add_values(self.source, self.window, rows)

    def number(self, result: Result) -> float | None:
        """Return the number that `result()` computes, or None if the user's function raises an error.

        The first error is logged.
        """
        try:
            return float(result())
        except Exception:
            if not self._failed:
                logger.exception("the statistic %s of custom_cfg failed, and is not logged", self.name)
            self._failed = True
            return None

    def state_dict(self, pending: Iterable[Row]) -> dict[str, Any]:
        """Return the state that the window would have if the values of the `pending` rows were added."""
        window = self.new_window()
        window.load_state_dict(self.window.state_dict())
        _add_values(self.source, window, pending)
        return {"source": self.source, "window": window.kind, **window.state_dict()}

    def load(self, state: Mapping[str, Any] | None) -> bool:
        """Load a state; return False if it is missing, or of another scalar or kind of window."""
        if state is None or (state.get("source"), state.get("window")) != (self.source, self.window.kind):
            return False
        self.window.load_state_dict(state)
        return True


class LogStatistics:
    """Compute the statistics of a `custom_cfg` in the background, in the order of the packets.

    Raises:
        TypeError, ValueError: `Statistic` refuses an entry, two statistics have the same name, or a statistic
            has the name of another statistic's scalar.
    """

    def __init__(self, custom_cfg: Iterable[object]) -> None:
        self.entries = [Statistic(config) for config in custom_cfg]
        names = [entry.name for entry in self.entries]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"custom_cfg has two statistics that are logged as {twice!r}: give one a log_name"
            )
        sources = {entry.source for entry in self.entries}
        for entry in self.entries:
            if entry.name in sources and entry.name != entry.source:
                raise ValueError(
                    f"log_name={entry.name!r} of custom_cfg is the name of a logged scalar: choose another"
                )
        # wrapped packets whose values are not in the windows yet, oldest first; `LoggerHook` posts each
        self._posted: deque[PacketWithStatistics] = deque()
        self._adding = threading.Lock()

    def wrap(self, packet: Packet | Reduced) -> PacketWithStatistics:
        """Return a packet whose events will contain the statistics of the `custom_cfg` too.

        The background computes them when it creates the events. The training thread wraps the packets in the
        order in which their values were logged, and the windows receive the values in this order.
        """
        wrapped = PacketWithStatistics(packet, self)
        self._posted.append(wrapped)
        return wrapped

    def add_posted(self, last: PacketWithStatistics | None = None) -> None:
        """Add the values of all posted packets, or those up to `last`, to the windows.

        It waits for the device if necessary.
        """
        with self._adding:  # called by `state_dict` on the training thread, and in the background
            while self._posted and (last is None or not last.added):
                self._posted.popleft().add_to(self.entries)

    def state_dict(self, pending: Sequence[Row]) -> dict[str, Any]:
        """Return the state of each statistic by name, including values that are not logged yet.

        It waits until the values of posted packets are reduced over the ranks.

        Args:
            pending: rows that were not posted, with the values of this rank.
        """
        for packet in [*self._posted]:
            packet.wait_for_ranks()
        self.add_posted()
        return {entry.name: entry.state_dict(pending) for entry in self.entries}

    def loaded(self, state: Mapping[str, Any]) -> LogStatistics:
        """Return new statistics with the values of a state.

        Packets that were posted before still use the old statistics. A statistic that the state does not have
        starts without values, with a warning.

        Raises:
            CheckpointError: `state` is not the state of statistics.
        """
        saved = read_as(dict[str, dict[str, Any]], state, "LoggerHook cannot take its state")
        statistics = LogStatistics([entry.config for entry in self.entries])
        if missing := [entry.name for entry in statistics.entries if not entry.load(saved.get(entry.name))]:
            logger.warning(
                "statistics of custom_cfg start without values: %s; the checkpoint has none of that "
                "name, source and window",
                ", ".join(missing),
            )
        return statistics


def _add_values(source: str, window: Window, rows: Iterable[Row]) -> bool:
    """Add the training values of the scalar `source` in `rows` to a window; return whether there are any."""
    source_rows = [row for row in rows if source in row.name_set.names and row.phase.mode == "train"]
    for row in source_rows:
        window.add(row.scalars()[source], row.phase.epoch)
    return bool(source_rows)


class PacketWithStatistics:
    """Wrap a packet so that its events contain statistics; a `Deferred`, handled in the background."""

    def __init__(self, packet: Packet | Reduced, statistics: LogStatistics) -> None:
        self._packet, self._statistics = packet, statistics
        self._results: list[tuple[Statistic, Result]] = []
        self.added = False
        """Whether `add_to` was called."""

    def ready(self) -> bool:
        """Return whether the values are on the host, and reduced if there are several ranks."""
        return self._packet.ready()

    def wait_for_ranks(self) -> None:
        """Wait at most `WAIT_SECONDS` until the values are reduced over the ranks."""
        if isinstance(self._packet, Reduced):
            deadline = monotonic() + WAIT_SECONDS
            while not self._packet.ready() and monotonic() < deadline:
                sleep(POLL_SECONDS)

    def add_to(self, entries: Iterable[Statistic]) -> None:
        """Add the packet's values to statistics, and store a function that computes the result of each.

        `events` calls the functions later, because they may run the user's code, and a lock is held here.
        """
        self.added = True
        rows = self._packet.resolve()
        self._results = [(entry, entry.window.result()) for entry in entries if entry.add(rows)]

    def events(self) -> list[Event]:
        """Return the packet's events, with each statistic in the last event that contains its scalar.

        A statistic with the name of its scalar replaces the scalar in all events.
        """
        events: list[Event] = self._packet.events()
        self._statistics.add_posted(self)
        training_events = [e for e in events if isinstance(e, ScalarsLogged) and e.mode == "train"]
        # by `id`, because an event with a dict is not hashable
        scalars = {id(event): dict(event.scalars) for event in training_events}
        for entry, result in self._results:
            if (number := entry.number(result)) is None:
                continue
            source_events = [event for event in training_events if entry.source in event.scalars]
            if entry.name == entry.source:
                for event in source_events:
                    del scalars[id(event)][entry.name]
            scalars[id(source_events[-1])][entry.name] = number
        new_events = [replace(e, scalars=scalars[id(e)]) if id(e) in scalars else e for e in events]
        # an event without scalars is left out: a statistic has replaced its only scalar in a later event
        return [event for event in new_events if not isinstance(event, ScalarsLogged) or event.scalars]


def refuse_epochs(entries: Iterable[Statistic], *, by_epoch: bool) -> None:
    """Raise a ValueError if a window is an epoch and the run is measured in iterations.

    Args:
        entries: the statistics.
        by_epoch: whether the run is measured in epochs.
    """
    if not by_epoch and any(entry.size == "epoch" for entry in entries):
        raise ValueError(
            'custom_cfg has window_size="epoch", and a run measured in iterations has no epochs: give an int '
            'or "global"'
        )
