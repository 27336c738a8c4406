"""Send messages about the end and the failures of a run to the chat and mail services of apprise."""

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
"""The events about which a message is sent by default."""
ACTIVITY = (AfterTrainIter, AfterValIter, AfterTestIter, AfterPredictIter, CommandApplied)
"""The events that show that a run does not hang."""
TICKS = 10
"""The number of ticks in `hang_after` seconds; `_watch` counts ticks, not seconds."""
HANG_TICKS = TICKS + 1
"""The number of ticks after which a message about a hang is sent.

One more than in `hang_after`, because the first tick may come directly after an event.
"""


class NotifyWriter(TimedWriter):
    """Send a message when a run ends or fails, is preempted, diverges, or cannot save.

        Trainer(..., writers=[NotifyWriter("slack://T1/B1/KEY", "mailto://me:KEY@example.org")])

        digits: training stopped: early stopping: accuracy has not become better in 5 validations ...
            iterations: 12,000 of 20,000, epochs: 12
            time: 42.1 min
            accuracy: last 0.9812, best 0.9834

    An address is a URL of the library apprise, which supports more than a hundred services, such as
    `slack://`, `mailto://`, `tgram://`, `discord://`, `ntfy://` and `json://host/path`. Keep their keys out
    of scripts and configs: without an address, the writer takes those in the environment variable
    EVENTLOOP_NOTIFY, separated by spaces. No key gets into a file, a log, an error or the output of a run.

    Rank 0 sends a message about each event to every address. If an address refuses a message, or does not
    answer in time, the log names it once, and the event counts as failed for this writer; the other addresses
    receive the message.

    At most `limit` messages are sent within `period` seconds, except that the end of a training is always
    sent. The next message counts the events without a message, by name.

    Args:
        urls: addresses of apprise.
        events: the names or classes of the events about which a message is sent. By default `after_run`
            (with the reason, such as early stopping or a signal), `preemption_requested`, `invalid_loss`,
            `rolled_back` and `checkpoint_failed`. You may also choose `stop_requested`, `handler_failed`,
            `events_dropped`, `loader_stall`, `slow_handler`, `slow_rank`, `checkpoint_saved` and events of
            your own.
        hang_after: send a message once if no iteration of a training, validation, test or prediction has
            ended for so many seconds; None sends none. A pause by a command is not counted. Choose more than
            the longest time between two iterations, for example for compiling. A program that hangs in code
            that holds Python's interpreter lock sends nothing.
        limit: the most messages within `period`.
        period: the seconds of the limit.
        timeout: the seconds to wait until all addresses have accepted a message.
        name: the writer's name in reports; needed if a bus has two writers of this class.

    Raises:
        ImportError: apprise is not installed.
        TypeError, ValueError: there is no address, apprise refuses an address, an event is unknown, or
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
        activity = ACTIVITY if hang_after is not None else ()
        self.events = tuple(dict.fromkeys((*Progress.NEEDED, AfterRun, *self._chosen, *activity)))
        self._hang_after, self._limit, self._period, self._timeout = hang_after, limit, period, timeout
        # longer than a call that sends `limit` messages to addresses that do not answer
        self.stall_timeout = 60.0 + 2 * limit * timeout
        self._urls = check_urls(urls)
        load_services()
        open_addresses(self._urls)  # raises if an address is wrong

    def open(self, run: Run) -> None:
        """Prepare for a run; with `hang_after`, start the thread that watches for a hang."""
        self._addresses = open_addresses(self._urls)
        self._texts, self._progress = Texts(run), Progress()
        self._send_times: deque[float] = deque(maxlen=self._limit)  # when the last messages were sent
        self._unsent = Counter[str]()  # by name, how many events since the last message were not sent
        self._warned = set[Address]()  # the addresses whose failure was logged
        self._lock = threading.Lock()  # held while the thread of `_watch` or of the writer sends a message
        self._is_active = False  # whether iterations are expected: the run has begun, and is not paused
        self._idle_ticks = 0  # ticks of `_watch` in an active run since the last event or message
        self._closed = threading.Event()
        if self._hang_after is not None:
            BackgroundThread(
                target=self._watch,
                args=(self._hang_after,),
                name=f"eventloop {self._called} watch",
                daemon=True,
            ).start()

    def write_timed(self, events: list[Timed]) -> None:
        """Send the messages about events; raise `NotTaken` if a message was not accepted by all addresses."""
        failed = []
        for timestamp, event in events:
            with self._lock:
                if error := self._handle(timestamp, event):
                    failed.append(BadEvent(event_name(type(event)), field="", why=error, reported=True))
        if failed:
            raise NotTaken(failed, of=len(events))

    def _handle(self, timestamp: float, event: Event) -> str:
        """Send a message about an event if it is chosen and the limit allows it.

        Returns:
            the errors of addresses that have not accepted the message, or "".
        """
        self._idle_ticks = 0
        self._progress.receive(timestamp, event)
        match event:
            case BeforeRun() | AfterTrainIter() | CommandApplied(command="go"):
                self._is_active = True
            case AfterRun() | CommandApplied(command="pause"):
                self._is_active = False
        if not isinstance(event, self._chosen):
            return ""
        is_training_end = isinstance(event, AfterRun) and self._progress.trains
        if not is_training_end and self._exceeds_limit():
            self._unsent[event_name(type(event))] += 1
            return ""
        return self._send(self._texts.of_event(event, self._progress, self._unsent))

    def close(self) -> None:
        """End the thread that watches for a hang, and send the messages that are left."""
        self._closed.set()
        with self._lock:
            if self._unsent:
                self._send(self._texts.of_unsent(self._unsent))

    def _exceeds_limit(self) -> bool:
        """Return whether `limit` messages were sent within the last `period` seconds."""
        return len(self._send_times) == self._limit and monotonic() - self._send_times[0] < self._period

    def _send(self, message: Message) -> str:
        """Send a message to all addresses; return the errors of addresses that do not accept it, or ""."""
        self._send_times.append(monotonic())
        failed = send_to_all(self._addresses, message, self._timeout)
        self._unsent.clear()
        self._idle_ticks = 0  # iterations that ended during the send are still in the queue
        for address, error in failed:
            if address not in self._warned:
                self._warned.add(address)
                logger.warning(
                    "%s: %s did not take the message %r: %s. Further failures of it are only counted",
                    self._called,
                    address.label,
                    message.title,
                    error,
                )
        return "; ".join(f"{address.label} did not take the message: {error}" for address, error in failed)

    def _watch(self, hang_after: float) -> None:
        """Send a message once no event has come for `hang_after` seconds of an active run; runs on a thread.

        It counts ticks instead of seconds, so that time in which the program was suspended, or the machine
        slept, does not count.
        """
        while not self._closed.wait(hang_after / TICKS):
            with self._lock:
                self._idle_ticks += self._is_active
                if self._idle_ticks != HANG_TICKS:
                    continue
                if self._exceeds_limit():
                    self._unsent["no_progress"] += 1
                    continue
                self._send(self._texts.of_hang(hang_after, self._unsent))
                self._idle_ticks = HANG_TICKS  # no second message until an event resets the count
