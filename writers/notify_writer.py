"""Send a message when a run ends, fails or needs a person, to any of the services that apprise knows."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from time import monotonic

from eventloop.background.threads import BackgroundThread
from eventloop.events import (
    AfterPredictIter,
    AfterRun,
    AfterTestIter,
    AfterTrainIter,
    AfterValIter,
    BeforeRun,
    CheckpointFailed,
    CommandApplied,
    Event,
    InvalidLoss,
    PreemptionRequested,
    RolledBack,
)
from eventloop.events.base import event_name
from eventloop.events.catalogue import find_event, several
from eventloop.events.deferred import Timed
from eventloop.events.encoding_errors import BadEvent, NotTaken
from eventloop.events.run import Run
from eventloop.util.checks import check_seconds, number, positive
from eventloop.writers.notify_addresses import (
    Address,
    Message,
    check_urls,
    load_services,
    open_addresses,
    send_to_all,
)
from eventloop.writers.notify_messages import Progress, Texts
from eventloop.writers.tracker_arguments import check_texts
from eventloop.writers.writer import TimedWriter

logger = logging.getLogger("eventloop")

EVENTS: tuple[type[Event], ...] = (AfterRun, PreemptionRequested, InvalidLoss, RolledBack, CheckpointFailed)
"""The events of which a message is sent by default."""
MOVING = (AfterTrainIter, AfterValIter, AfterTestIter, AfterPredictIter, CommandApplied)
"""The events that show that a run does not hang."""
TICKS = 10
"""The number of parts of `hang_after`; the message of a hang comes one of them late."""
AT_LEAST = TICKS + 1
"""The number of ticks in which all of `hang_after` has passed; the first one may come at once."""


class NotifyWriter(TimedWriter):
    """Send a message when a run ends or fails, is preempted, diverges, or cannot save.

        Trainer(..., writers=[NotifyWriter("slack://T1/B1/KEY", "mailto://me:KEY@example.org")])

        digits: training stopped: early stopping: accuracy has not become better in 5 validations ...
            iterations: 12,000 of 20,000, epochs: 12
            time: 42.1 min
            accuracy: last 0.9812, best 0.9834

    Addresses are those of the library apprise, which knows more than a hundred services, such as
    `slack://`, `mailto://`, `tgram://`, `discord://`, `ntfy://` and `json://host/path`. Keep their keys out
    of scripts and configs: without an address, the writer takes those in the environment variable
    EVENTLOOP_NOTIFY, separated by spaces. No key gets into a file, a log, an error or the output of a run.

    One message is sent for each event to every address, from rank 0. An address that refuses it, or does not
    answer in time, is named once in the log, and the event counts as failed for this writer; the other
    addresses have the message.

    No more than `limit` messages are sent within `period` seconds. The next message counts the events that
    had none, by their names. The end of a training is sent in any case.

    Args:
        urls: addresses of apprise.
        events: the events of which a message is sent, names or classes. By default `after_run` (with the
            reason, which names early stopping, a signal and so on), `preemption_requested`, `invalid_loss`,
            `rolled_back` and `checkpoint_failed`. Further ones are `stop_requested`, `handler_failed`,
            `events_dropped`, `loader_stall`, `slow_handler`, `slow_rank`, `checkpoint_saved` and events of
            your own.
        hang_after: seconds without the end of an iteration, be it of training, validation, test or
            prediction, after which a message is sent, once for each such time; None sends none. A pause by a
            command is not counted. Choose more than the longest time between two iterations, such
            as that of compiling. A program whose code keeps Python's lock while it hangs sends nothing.
        limit: the most messages within `period`.
        period: seconds.
        timeout: seconds that all addresses together may take for a message.
        name: the writer's name in reports; needed if a bus has two writers of this class.

    Raises:
        ImportError: apprise is not installed.
        TypeError, ValueError: there is no address, apprise does not take one, an event is unknown, or
            another argument is wrong.
    """

    batch = 64
    secret_arguments = ("urls",)

    def __init__(
        self,
        *urls: str,
        events: str | type[Event] | Sequence[str | type[Event]] | None = None,
        hang_after: float | None = None,
        limit: int = 5,
        period: float = 600.0,
        timeout: float = 10.0,
        name: str | None = None,
    ) -> None:
        check_texts(name=name)
        positive("limit", limit)
        check_seconds("period", period, zero=False)
        number("timeout", timeout, above=0)
        if hang_after is not None:
            number("hang_after", hang_after, above=0)
        self.name = name
        self._chosen = EVENTS if events is None else tuple(find_event(event) for event in several(events))
        watched = MOVING if hang_after is not None else ()
        self.events = tuple(dict.fromkeys((*Progress.NEEDED, AfterRun, *self._chosen, *watched)))
        self._hang_after, self._limit, self._period, self._timeout = hang_after, limit, period, timeout
        self.stall_timeout = 60.0 + 2 * limit * timeout
        self._urls = check_urls(urls)
        load_services()
        open_addresses(self._urls)  # to refuse wrong ones now

    def open(self, run: Run) -> None:
        self._addresses = open_addresses(self._urls)
        self._texts, self._progress = Texts(run), Progress()
        self._sent: deque[float] = deque(maxlen=self._limit)  # when the last messages were sent
        self._held_back = Counter[str]()
        self._warned = set[Address]()
        self._lock = threading.Lock()  # held while a message is sent
        self._moves = False  # whether iterations are to come: the run has begun, and is not paused
        self._idle_ticks = 0  # ticks of `_watch` since the last event or message, without pauses
        self._closed = threading.Event()
        if self._hang_after is not None:
            BackgroundThread(
                target=self._watch,
                args=(self._hang_after,),
                name=f"eventloop {self._called} watch",
                daemon=True,
            ).start()

    def write_timed(self, events: list[Timed]) -> None:
        failed = []
        for when, event in events:
            with self._lock:
                if why := self._handle(when, event):
                    failed.append(BadEvent(event_name(type(event)), field="", why=why, reported=True))
        if failed:
            raise NotTaken(failed, of=len(events))

    def _handle(self, when: float, event: Event) -> str:
        """Send the message of an event, if it has one; return why addresses have not taken it."""
        self._idle_ticks = 0
        self._progress.receive(when, event)
        match event:
            case BeforeRun() | AfterTrainIter() | CommandApplied(command="go"):
                self._moves = True
            case AfterRun() | CommandApplied(command="pause"):
                self._moves = False
        if not isinstance(event, self._chosen):
            return ""
        is_end = isinstance(event, AfterRun) and self._progress.trains
        if not is_end and self._hold_back(event_name(type(event))):
            return ""
        return self._send(self._texts.of_event(event, self._progress, self._held_back))

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._held_back:
                self._send(self._texts.of_held_back(self._held_back))

    def _hold_back(self, what: str) -> bool:
        """Count a message instead of sending it, if `limit` were sent within `period`."""
        if len(self._sent) < self._limit or monotonic() - self._sent[0] >= self._period:
            return False
        self._held_back[what] += 1
        return True

    def _send(self, message: Message) -> str:
        """Send a message to all addresses; return what has failed, "" if all have taken it."""
        self._sent.append(monotonic())
        failed = send_to_all(self._addresses, message, self._timeout)
        self._held_back.clear()
        self._idle_ticks = 0  # the iterations that ended meanwhile are still in the queue
        for address, why in failed:
            if address not in self._warned:
                self._warned.add(address)
                logger.warning(
                    "%s: %s did not take the message %r: %s. Further failures of it are only counted",
                    self._called,
                    address.label,
                    message.title,
                    why,
                )
        return "; ".join(f"{address.label} did not take the message: {why}" for address, why in failed)

    def _watch(self, hang_after: float) -> None:
        """Send a message once the run has stood still for `hang_after` seconds.

        Ticks are counted instead of seconds, so that a program that was stopped, or a machine that slept, has
        not stood still.
        """
        while not self._closed.wait(hang_after / TICKS):
            with self._lock:
                self._idle_ticks += self._moves
                if self._idle_ticks == AT_LEAST and not self._hold_back("no_progress"):
                    self._send(self._texts.of_hang(hang_after, self._held_back))
                    self._idle_ticks = AT_LEAST  # one message, until an event comes
