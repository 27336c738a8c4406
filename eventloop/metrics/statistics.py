"""Compute configured statistics of logged values in the background, like MMEngine's `custom_cfg`.

`LoggerHook` wraps each packet by `LogStatistics`; without statistics a logged value is the mean of its
interval.
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
"""The interval in seconds at which `state_dict` checks whether the ranks have answered."""
_KEYS = ["data_src", "method_name", "window_size", "log_name"]


class Statistic:
    """One entry of a `custom_cfg`: a statistic of one scalar.

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
        """Add the values of the source in `rows` to the window; return False if `rows` has no such values."""
        return _add_values(self.source, self.window, rows)

    def number(self, result: Result) -> float | None:
        """Compute the statistic; return None if the user's function fails, which is logged once."""
        try:
            return float(result())
        except Exception:
            if not self._failed:
                logger.exception("the statistic %s of custom_cfg failed, and is not logged", self.name)
            self._failed = True
            return None

    def state_dict(self, pending: Iterable[Row]) -> dict[str, Any]:
        """Return the state of the window, with the values of the `pending` rows added."""
        window = self.new_window()
        window.load_state_dict(self.window.state_dict())
        _add_values(self.source, window, pending)
        return {"source": self.source, "window": window.kind, **window.state_dict()}

    def load(self, state: Mapping[str, Any] | None) -> bool:
        """Load the values of `state`; return False if the state has another source or kind of window."""
        if state is None or (state.get("source"), state.get("window")) != (self.source, self.window.kind):
            return False
        self.window.load_state_dict(state)
        return True


class LogStatistics:
    """The statistics of a `custom_cfg`, computed in the background in the order of the packets.

    Raises:
        TypeError, ValueError: an entry is wrong (see `Statistic`), two statistics have one name, or a
            statistic has the name of another scalar.
    """

    def __init__(self, custom_cfg: Iterable[object]) -> None:
        self.entries = [Statistic(config) for config in custom_cfg]
        names = [entry.name for entry in self.entries]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"custom_cfg has two statistics that are logged as {twice!r}: give one a log_name"
            )
        sources = {entry.source for entry in self.entries}
        if clash := next((e for e in self.entries if e.name in sources and e.name != e.source), None):
            raise ValueError(
                f"log_name={clash.name!r} of custom_cfg is the name of a logged scalar: choose another"
            )
        self._posted: deque[PacketWithStatistics] = deque()  # packets not yet added to the windows
        self._turn = threading.Lock()

    def wrap(self, packet: Packet | Reduced) -> PacketWithStatistics:
        """Wrap a packet so that its events have the statistics; wrap packets in the order of the run."""
        wrapped = PacketWithStatistics(packet, self)
        self._posted.append(wrapped)
        return wrapped

    def add_posted(self, last: PacketWithStatistics | None = None) -> None:
        """Add the values of posted packets, up to `last` or all, to the windows; may wait for the device."""
        with self._turn:  # `state_dict` runs on the training thread, `events` in the background
            while self._posted and (last is None or not last.added):
                self._posted.popleft().add_to(self.entries)

    def state_dict(self, pending: Sequence[Row]) -> dict[str, Any]:
        """Return the state of each statistic, including values that are not logged yet.

        If posted packets are reduced, it waits for them, and uses their means over the ranks. The `pending`
        rows, which were not posted, count with the values of this rank.
        """
        for packet in [*self._posted]:
            packet.wait_for_ranks()
        self.add_posted()
        return {entry.name: entry.state_dict(pending) for entry in self.entries}

    def loaded(self, state: Mapping[str, Any]) -> LogStatistics:
        """Return new statistics with the values of a state; packets posted before still use these statistics.

        A statistic that the state lacks starts without values, with a warning.

        Raises:
            CheckpointError: `state` is not the state of statistics.
        """
        saved = read_as(dict[str, dict[str, Any]], state, "LoggerHook cannot take its state")
        statistics = LogStatistics([entry.config for entry in self.entries])
        if missing := [each.name for each in statistics.entries if not each.load(saved.get(each.name))]:
            logger.warning(
                "statistics of custom_cfg start without values: %s; the checkpoint has none of that "
                "name, source and window",
                ", ".join(missing),
            )
        return statistics


def _add_values(source: str, window: Window, rows: Iterable[Row]) -> bool:
    """Add the training values of `source` in `rows` to a window; return False if there are none."""
    own = [row for row in rows if source in row.name_set.names and row.phase.mode == "train"]
    for row in own:
        window.add(row.scalars()[source], row.phase.epoch)
    return bool(own)


class PacketWithStatistics:
    """A packet whose events contain the statistics; a `Deferred`, handled in the background."""

    def __init__(self, packet: Packet | Reduced, statistics: LogStatistics) -> None:
        self._packet, self._statistics = packet, statistics
        self._results: list[tuple[Statistic, Result]] = []
        self.added = False

    def ready(self) -> bool:
        """Return whether the packet is ready: its values are on the host, and do not wait for a rank."""
        return self._packet.ready()

    def wait_for_ranks(self) -> None:
        """Wait until the values are reduced over the ranks, at most `WAIT_SECONDS`."""
        if isinstance(self._packet, Reduced):
            end = monotonic() + WAIT_SECONDS
            while not self._packet.ready() and monotonic() < end:
                sleep(POLL_SECONDS)

    def add_to(self, entries: Iterable[Statistic]) -> None:
        """Add the packet's values to the statistics, and keep a function for the result of each.

        `events` calls these functions without the lock, because they may run the user's code.
        """
        self.added = True
        rows = self._packet.resolve()
        self._results = [(entry, entry.window.result()) for entry in entries if entry.add(rows)]

    def events(self) -> list[Event]:
        """Return the packet's events, with each statistic in the last event that contains its source.

        A statistic with the name of its source replaces the source in all events.
        """
        events: list[Event] = self._packet.events()
        self._statistics.add_posted(self)
        logged = [event for event in events if isinstance(event, ScalarsLogged) and event.mode == "train"]
        scalars = {id(event): dict(event.scalars) for event in logged}
        for entry, result in self._results:
            if (number := entry.number(result)) is None:
                continue
            own = [event for event in logged if entry.source in event.scalars]
            for event in own if entry.name == entry.source else ():
                del scalars[id(event)][entry.name]
            scalars[id(own[-1])][entry.name] = number
        changed = [replace(e, scalars=scalars[id(e)]) if id(e) in scalars else e for e in events]
        return [event for event in changed if not isinstance(event, ScalarsLogged) or event.scalars]


def refuse_epochs(entries: Iterable[Statistic], *, by_epoch: bool) -> None:
    """Refuse windows of an epoch in a run that is measured in iterations."""
    if not by_epoch and any(entry.size == "epoch" for entry in entries):
        raise ValueError(
            'custom_cfg has window_size="epoch", and a run measured in iterations has no epochs: give an int '
            'or "global"'
        )
