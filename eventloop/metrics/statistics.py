"""Other statistics of what is logged than the mean of an interval: MMEngine's `custom_cfg`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

from msgspec.structs import replace

from eventloop.events import Event, ScalarsLogged
from eventloop.metrics.reduce import WAIT_SECONDS, Reduced
from eventloop.metrics.rows import Packet, Row
from eventloop.metrics.statistics_windows import Result, Window, window_of
from eventloop.state.schema import read_as
from eventloop.util.suggest import suggest

logger = logging.getLogger("eventloop")

LOOK_SECONDS = 0.001
"""How often a checkpoint looks whether the ranks have answered."""
_KEYS = ["data_src", "method_name", "window_size", "log_name"]


class Statistic:
    """One entry of a `custom_cfg`.

    Raises:
        TypeError, ValueError: it is no mapping, lacks its `data_src`, has an unknown key, method or window.
    """

    def __init__(self, config: object) -> None:
        if not isinstance(config, Mapping):
            raise TypeError(f"an entry of custom_cfg must be a dict(data_src=..., ...), got {config!r}")
        if unknown := [key for key in config if key not in _KEYS]:
            raise ValueError(f"an entry of custom_cfg has no {unknown[0]!r}{suggest(str(unknown[0]), _KEYS)}")
        if "data_src" not in config:
            raise ValueError(
                f"an entry of custom_cfg needs data_src, the name of what is put, got {dict(config)!r}"
            )
        if not isinstance(config["data_src"], str):
            raise TypeError(f"data_src of custom_cfg must be a name, got {config['data_src']!r}")
        self.source: str = config["data_src"]
        self.name: str = config.get("log_name") or self.source
        self.size = config.get("window_size", "global")
        self._failed = False
        self._method = config.get("method_name", "mean")
        self.window = self.new_window()

    def new_window(self) -> Window:
        """One without values."""
        return window_of(self._method, self.size)

    def take(self, rows: Iterable[Row]) -> bool:
        """Take what these rows have of its source; False where they have nothing."""
        return _take(self.source, self.window, rows)

    def number(self, result: Result) -> float | None:
        """What a result of the window is; None where a function of the user's failed, which is told once."""
        try:
            return float(result())
        except Exception:
            if not self._failed:
                logger.exception(
                    "the statistic %s of custom_cfg failed, and is left out of the log", self.name
                )
            self._failed = True
            return None

    def state_dict(self, pending: Iterable[Row]) -> dict[str, Any]:
        """Its values, and those of rows that it has yet to take."""
        window = self.new_window()
        window.load_state_dict(self.window.state_dict())
        _take(self.source, window, pending)
        return {"source": self.source, "window": window.kind, **window.state_dict()}

    def window_of_state(self, state: Mapping[str, Any] | None) -> Window | None:
        """Build a window with the values of a state; None if the state has none for this source and window."""
        window = self.new_window()
        if state is None or (state.get("source"), state.get("window")) != (self.source, window.kind):
            return None
        window.load_state_dict(state)
        return window


class LogStatistics:
    """Reckons statistics of the numbers of a training, in the background, as their packets come.

    Raises:
        TypeError, ValueError: as `Statistic`; or two of one name.
    """

    def __init__(self, custom_cfg: Iterable[object]) -> None:
        self.entries = [Statistic(config) for config in custom_cfg]
        names = [entry.name for entry in self.entries]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(
                f"custom_cfg has two statistics that are logged as {twice!r}: give one a log_name"
            )
        sources = {entry.source for entry in self.entries}
        if taken := next((e for e in self.entries if e.name in sources and e.name != e.source), None):
            raise ValueError(
                f"log_name={taken.name!r} of custom_cfg is the name of what is put: choose another"
            )
        self._posted: deque[Reckoned] = deque()  # and not taken
        self._turn = threading.Lock()

    def reckon(self, packet: Packet | Reduced) -> Reckoned:
        """The packet, with them; packets are taken in this order."""
        reckoned = Reckoned(packet, self)
        self._posted.append(reckoned)
        return reckoned

    def take(self, last: Reckoned | None = None) -> None:
        """Take the packets up to this one, or all of them; waits for the device if need be."""
        with self._turn:  # a state is made on the training thread
            while self._posted and (last is None or not last.taken):
                self._posted.popleft().be_taken(self.entries)

    def state_dict(self, pending: Sequence[Row]) -> dict[str, Any]:
        """Of each its values up to now, those that are not logged yet among them: of what was posted the means over the
        ranks, where it is reduced, which they are waited for, and `pending`, which was not, as it is."""
        for reckoned in [*self._posted]:
            reckoned.wait_for_ranks()
        self.take()
        return {entry.name: entry.state_dict(pending) for entry in self.entries}

    def prepare_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Go on where the saved run was; what it did not have begins anew.

        Raises:
            CheckpointError: it is the state of something else.
        """
        saved = read_as(dict[str, dict[str, Any]], state, "LoggerHook cannot take its state")
        windows = [entry.window_of_state(saved.get(entry.name)) for entry in self.entries]
        self.take()  # what was posted before belongs to what is replaced

        def take() -> None:
            for entry, window in zip(self.entries, windows, strict=True):
                entry.window = entry.new_window() if window is None else window
            pairs = zip(self.entries, windows, strict=True)
            if anew := [entry.name for entry, window in pairs if window is None]:
                logger.warning(
                    "of custom_cfg %s begins anew: the checkpoint has no values of that name, source and window",
                    ", ".join(anew),
                )

        return take


def _take(source: str, window: Window, rows: Iterable[Row]) -> bool:
    """Let a window have what the rows have of its source; False where they have nothing."""
    own = [row for row in rows if source in row.shape.names and row.phase.mode == "train"]
    for row in own:
        window.take(row.scalars()[source], row.phase.epoch)
    return bool(own)


class Reckoned:
    """A packet whose events have statistics; a `Deferred` of the background loop."""

    def __init__(self, packet: Packet | Reduced, statistics: LogStatistics) -> None:
        self._packet, self._statistics = packet, statistics
        self._results: list[tuple[Statistic, Result]] = []
        self.taken = False

    def ready(self) -> bool:
        """True when the values are on the host."""
        return self._packet.ready()

    def wait_for_ranks(self) -> None:
        """Wait until the values are those of all ranks, or will not be."""
        if isinstance(self._packet, Reduced):
            end = monotonic() + WAIT_SECONDS
            while not self._packet.ready() and monotonic() < end:
                sleep(LOOK_SECONDS)

    def be_taken(self, entries: Iterable[Statistic]) -> None:
        """Let statistics take its values. What they are then is worked out later: it may be a function of the user's."""
        self.taken = True
        rows = self._packet.settled()
        self._results = [(entry, entry.window.result()) for entry in entries if entry.take(rows)]

    def events(self) -> list[Event]:
        """Those of the packet, with the statistics after it, each at the last iteration that has its source."""
        events: list[Event] = self._packet.events()
        self._statistics.take(self)
        told = [event for event in events if isinstance(event, ScalarsLogged) and event.mode == "train"]
        scalars = {id(event): dict(event.scalars) for event in told}
        for entry, result in self._results:
            if (number := entry.number(result)) is None:
                continue
            own = [event for event in told if entry.source in event.scalars]
            for event in own if entry.name == entry.source else ():
                del scalars[id(event)][entry.name]
            scalars[id(own[-1])][entry.name] = number
        changed = [replace(e, scalars=scalars[id(e)]) if id(e) in scalars else e for e in events]
        return [event for event in changed if not isinstance(event, ScalarsLogged) or event.scalars]


def refuse_epochs(entries: Iterable[Statistic], *, by_epoch: bool) -> None:
    """Refuse windows of an epoch in a run that has none.

    Raises:
        ValueError: there is one.
    """
    if not by_epoch and any(entry.size == "epoch" for entry in entries):
        raise ValueError(
            'custom_cfg has a window_size="epoch", and a run measured in iterations has no epochs: give an int or "global"'
        )
