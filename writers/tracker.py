"""Define `TrackerWriter`, the base class of the writers for experiment trackers.

It continues one run of the tracker over restarts, sends each step once, and retries after errors. A tracker
cannot remove a step, so a step that is run again after a resume is not sent again. The writers of W&B,
MLflow, trackio and OpenTelemetry derive from it.
"""

from __future__ import annotations

import importlib
import logging
import os
from abc import abstractmethod
from io import FileIO
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Any, ClassVar

import msgspec

from eventloop.eventlog.format import FILE_NAME
from eventloop.eventlog.reader import EventReader
from eventloop.eventlog.replay import FOLDER as REPLAY_FOLDER
from eventloop.eventlog.sinks import Written
from eventloop.events import (
    BeforeTrain,
    CheckpointSaved,
    Event,
    HistogramLogged,
    ImageLogged,
    ScalarsLogged,
    TextLogged,
)
from eventloop.events.base import step_of
from eventloop.events.deferred import Timed
from eventloop.events.encoding_errors import BadEvent, Unencodable
from eventloop.events.outcome import ENDING, RunOutcome
from eventloop.events.run import Run
from eventloop.util.append_file import replacing
from eventloop.util.checks import check_choice
from eventloop.util.file_names import safe_name
from eventloop.util.text import UnavailableError, error_text
from eventloop.writers.checks import OFFLOADS
from eventloop.writers.file_lock import lock_file
from eventloop.writers.tracker_arguments import check_texts, masked, set_options
from eventloop.writers.tracker_state import Known, load_state
from eventloop.writers.tracker_values import Tally, key_of, key_of_checkpoint, number_of, record_last
from eventloop.writers.writer import TimedWriter

logger = logging.getLogger("eventloop")

RETRY_SECONDS = 10.0
"""The least seconds between a failed attempt to send events and the next."""
LOCK_SECONDS = 30.0
"""The seconds to wait for the lock, which the worker process of a killed program holds for up to 10 s."""
SHORT = 60
"""How many characters of an error are repeated if the log has the whole error already."""
BACKLOG = 100_000
"""The number of unsent events above which the writer fails."""
RUN_EVENTS = (*ENDING, BeforeTrain)
"""The events that show where a training begins and how the run ended."""


class TrackerWriter(TimedWriter):
    """Send a run to an experiment tracker; a base class.

    A subclass continues the run whose id is in the file `<target>_run.json` of the work dir. If the tracker
    cannot be reached when the run begins, or later for more than `BACKLOG` events, the writer fails with one
    line in the log, and the training continues. Events that were not sent can be read from the run's event
    log, if it has one: a resumed run first sends those up to its checkpoint, and
    `eventloop replay RUN --to TRACKER --out RUN` sends the rest.
    """

    batch = 256
    linger = 1.0
    offload = "auto"
    stall_timeout = 120.0
    service: ClassVar[str]
    """The name of the tracker in messages."""
    target: ClassVar[str]
    """The tracker's name as pip extra, in `eventloop replay --to`, and in the name of the state file."""
    checkpoints = False
    """Whether each saved checkpoint is sent."""
    secret_variables: ClassVar[tuple[str, ...]] = ()
    """Names of the environment variables whose values no message may contain."""

    def __init__(self, name: str | None, offload: str | None) -> None:
        if offload is not None:
            check_choice("offload", offload, OFFLOADS)
            self.offload = offload
        check_texts(name=name)
        self.name = name
        self._known = Known()
        self._sent_before: dict[str, int] = {}  # by name, the last step sent before this training began
        self._tally = Tally({})  # counts the values that are new to the tracker
        self._pending: list[Timed] = []  # the events that the tracker may not have received
        self._untaken = 0  # how many of the last delivered events are not sent
        self._retry_at = 0.0  # the `monotonic()` before which a failed send is not repeated
        self._error = ""  # why the last send failed, or ""
        self._logged_error = ""  # the last error that is in the log
        self._warned: set[str] = set()  # the keys of `warn_once`
        self._refused: list[BadEvent] = []  # events with values that the tracker refused, not reported yet
        self._outcome = RunOutcome()
        self._lock: FileIO | None = None

    @property
    def _state_path(self) -> Path:
        """The file in the run's directory that has the id of the tracker's run, and the last sent steps."""
        suffix = "" if self.name is None else f"_{safe_name(self.name)}"
        return self._work_dir / f"{self.target}_run{suffix}.json"

    @abstractmethod
    def connect(self, run: Run, known: Known) -> Known:
        """Begin a run of the tracker, or continue the run that `known` names.

        Returns:
            the run's id, and the last step of each name that the tracker has.
        """

    def had_before(self, known: Known) -> dict[str, int]:
        """Return, for each name, the last step that the tracker had before `connect` returned `known`."""
        return known.last

    @abstractmethod
    def send(self, events: list[Timed]) -> None:
        """Send events to the tracker.

        If it raises an error, it has removed the events that were sent from the list. The rest is sent again.
        """

    def end(self, status: str) -> None:
        """End the run; `status` is "FINISHED", "FAILED" or "KILLED"."""

    def secrets(self) -> list[str]:
        """Return texts that no message may contain."""
        values = [os.environ.get(name, "") for name in self.secret_variables]
        return [text for value in values for text in (value, value.strip()) if text]

    def where(self) -> str:
        """Return the tracker's address as it follows its name in messages: " at http://localhost:5000"."""
        return ""

    @property
    def waits_for(self) -> str:
        """Return the tracker's name and address, its error, and how many events wait for it, as a text."""
        error = f" ({self._error})" if self._error else ""
        count = len(self._pending)
        events = "1 event waits" if count == 1 else f"{count:,} events wait"
        waiting = f", for which {events}; {self._replay_hint()}" if count else ""
        return f"{self.service}{self.where()}{error}{waiting}"

    @property
    def untaken(self) -> int:
        """Return how many of the last delivered events the tracker may not have; they count as queued."""
        return self._untaken + len(self._refused)

    # --- called by the engine ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Lock and read the state file, connect, and send the logged events that the tracker lacks."""
        self._work_dir = Path(run.work_dir)
        self._known, self._outcome, self._error = Known(), RunOutcome(), ""
        try:
            self._lock = lock_file(self._state_path.with_suffix(".lock"), LOCK_SECONDS)
            self._known = self.connect(run, self._run_to_continue(run))
            self._known.trainer_id = run.trainer_id
        except Exception as error:
            if self._lock is not None:
                self._lock.close()
            raise UnavailableError(
                f"{self.service} cannot be used: {self._error_text(error)}; {self._replay_hint()}"
            ) from None
        self._tally = Tally(self.had_before(self._known))
        self._begin_training()
        self._save_state()
        if run.start_iter:
            self._send_logged(run.start_iter)
        self._untaken, self._refused = 0, []  # the bus does not count events that were read from the log

    def write_timed(self, events: list[Timed]) -> None:
        """Write events with the Unix time of each; a replay calls this with the times in the event log."""
        self._enqueue_and_send(events)
        # the bus accepts no more failures than this delivery has events
        refused, self._refused = self._refused[: len(events)], self._refused[len(events) :]
        if refused:
            raise Unencodable(refused, of=len(events))

    def _enqueue_and_send(self, events: list[Timed]) -> None:
        """Add events to `_pending`, and send all of `_pending` unless it is too soon for a retry.

        Raises:
            UnavailableError: more than `BACKLOG` events wait.
        """
        self._untaken += len(events)
        for timestamp, event in events:
            if (unsent := self._without_sent(event)) is not None:
                self._pending.append(Timed(timestamp, unsent))
        if not self._error or monotonic() >= self._retry_at:
            self._try_to_send()
        if len(self._pending) > BACKLOG:
            self._untaken -= len(events)  # this delivery has failed
            raise self._drop_pending()

    def flush(self) -> None:
        self._try_to_send()

    def close(self) -> None:
        """Send the pending events, end the tracker's run and release the lock."""
        self._try_to_send()
        end_error = ""
        try:
            if self._known.id:  # "" if `open` has failed
                self.end(self._outcome.status.upper())
        except Exception as error:
            end_error = f"{self.service} did not take the end of the run: {self._error_text(error)}"
        finally:
            if self._lock is not None:
                self._lock.close()
        if self._pending:
            raise self._drop_pending()
        if end_error:
            raise UnavailableError(end_error)

    @property
    def written(self) -> Written:
        """Return how many values since `open` were new, and how many the tracker already had."""
        return Written(self.service, self._tally.new, self._tally.known)

    def _run_to_continue(self, run: Run) -> Known:
        """Return the contents of the state file, or `Known()` if a new run of the tracker begins.

        A new run begins if a training starts at step 0, unless the state file has the id of the same trainer:
        its worker process was started again, or it trains a second time.
        """
        known = load_state(self._state_path)
        is_new = not run.start_iter and bool(run.trainer_id) and run.trainer_id != known.trainer_id
        return Known() if is_new else known

    # --- which values are sent -----------------------------------------------------------------------------

    def _without_sent(self, event: Event) -> Event | None:
        """Return an event without the values that were sent in an earlier training, or None if none remains.

        The remaining values are recorded as sent.
        """
        self._outcome.receive(event)
        match event:
            case BeforeTrain():
                self._begin_training()
            case ScalarsLogged():
                return self._new_scalars(event)
            case ImageLogged() | HistogramLogged() | TextLogged():
                return event if self._is_new(key_of(event), event.step) else None
        return event

    def _new_scalars(self, event: ScalarsLogged) -> ScalarsLogged | None:
        """Return an event with only the numbers that were not sent before, or None if all were sent."""
        scalars = {}
        for name, value in event.scalars.items():
            key = f"{event.mode}/{name}"
            if (number := number_of(value)) is None:
                self.warn_once(key, f"{key} is left out: expected a number, got {type(value).__name__}")
            elif self._is_new(key, event.step):
                scalars[name] = number
        return msgspec.structs.replace(event, scalars=scalars) if scalars else None

    def _is_new(self, key: str, step: int) -> bool:
        """Return whether a value is to be sent, and record it; False if an earlier training has sent it."""
        self._tally.count(key, step)
        if step <= self._sent_before.get(key, -1):
            return False
        record_last(self._known.last, [key], step)
        return True

    def _begin_training(self) -> None:
        """Let the training that begins send no step that was sent before."""
        self._sent_before = dict(self._known.last)

    def _send_logged(self, start: int) -> None:
        """Send the events of the run's event log that the tracker lacks, up to `start`, the resumed step."""
        log = self._work_dir / FILE_NAME
        if not log.is_file():
            return
        for records in EventReader(log, only=[*self._logged_types(), BeforeTrain], on_torn="ignore").blocks():
            before_start = (record for record in records if step_of(record.event) <= start)
            self._enqueue_and_send([Timed(r.time, r.event) for r in before_start if self._can_send(r.event)])
        self._begin_training()  # the training that resumes must not send these steps again

    def _can_send(self, event: Event) -> bool:
        """Return whether an event can be sent: a checkpoint only if it exists and was not sent before."""
        if not isinstance(event, CheckpointSaved):
            return True
        sent_iter = self._known.last.get(key_of_checkpoint(event), -1)
        return event.iter > sent_iter and Path(event.path).exists()

    def _logged_types(self) -> list[type[Event]]:
        """Return the types of the events that are read from the event log."""
        types: list[type[Event]] = [ScalarsLogged, ImageLogged, HistogramLogged, TextLogged]
        types += [CheckpointSaved] if self.checkpoints else []
        return [event_type for event_type in types if event_type in self.events]

    # --- sending -------------------------------------------------------------------------------------------

    def _try_to_send(self) -> None:
        """Send the pending events; an error is stored, and logged unless the send before failed too."""
        if not self._pending:
            self._untaken = 0
            return
        try:
            self.send(self._pending)
        except Exception as error:
            if not self._error:
                self._logged_error = self._error_text(error)
                logger.warning(
                    "%s does not take the events, which wait until it does: %s",
                    self.service,
                    self._logged_error,
                )
            self._error = self._error_text(error)
            self._retry_at = monotonic() + RETRY_SECONDS
            return
        self._error = ""
        self._pending, self._untaken = [], 0
        self._save_state()

    def _drop_pending(self) -> UnavailableError:
        """Drop the pending events, and return the error to raise, which has their number."""
        count, self._pending = len(self._pending), []
        reason = self._error
        if reason == self._logged_error and len(reason) > SHORT:
            reason = f"{reason[:SHORT].rstrip()}... (logged before)"
        events = "1 event was" if count == 1 else f"{count:,} events were"
        return UnavailableError(f"{events} not written to {self.service}: {reason}; {self._replay_hint()}")

    def _replay_hint(self) -> str:
        """Return a hint with the `eventloop replay` command that sends the events later."""
        run, out = self._work_dir, f" --out {quote(str(self._work_dir))}"
        if run.name == REPLAY_FOLDER:  # this writer is part of a replay, whose run is one folder up
            run, out = run.parent, ""
        options = masked(set_options(self._made_with, secret=self.secret_arguments), self.secrets())
        command = f"eventloop replay {quote(str(run))} --to {self.target}{options}{out}"
        return f"`{command}` writes them later, if the run has an EventLogWriter"

    def _save_state(self) -> None:
        """Write the state file; after a kill it is either the old or the new one."""
        try:
            with replacing(self._state_path, durable=False) as file:
                file.write(msgspec.json.encode(self._known))
        except OSError as error:  # raising it would make the bus deliver again events that were already sent
            self.warn_once("state", f"{self._state_path} cannot be written: {error}")

    # --- what subclasses share -----------------------------------------------------------------------------

    def import_library(self, *modules: str) -> list[Any]:
        """Import and return modules, the tracker's library first.

        Raises:
            ImportError: a module is not installed; the message has the command that installs the library.
        """
        try:
            return [importlib.import_module(module) for module in modules]
        except ImportError as error:
            raise ImportError(
                f"{type(self).__name__} needs {modules[0]}: pip install 'torch-eventloop[{self.target}]'"
            ) from error

    def png_of(self, event: ImageLogged) -> bytes | None:
        """Return an image as the bytes of a PNG file; if it is no valid image, log a warning, return None."""
        from eventloop.writers.pixels import pixels, png

        try:
            return png(pixels(event))
        except (TypeError, ValueError) as error:
            self.warn_once(key_of(event), f"{key_of(event)} is left out: {error}")
            return None

    def checkpoint_of(self, event: CheckpointSaved) -> Path | None:
        """Return the path of a checkpoint; if it no longer exists, log a warning and return None."""
        path = Path(event.path)
        if path.exists():
            return path
        self.warn_once(event.path, f"checkpoint {path} is not sent: it was removed meanwhile")
        return None

    def record_sent(self, checkpoint: CheckpointSaved) -> None:
        """Record that a checkpoint was sent, so that a resumed run does not send it again."""
        record_last(self._known.last, [key_of_checkpoint(checkpoint)], checkpoint.iter)

    def warn_once(self, key: str, text: str) -> None:
        """Log a warning without secrets, unless one with the same key was logged."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s: %s", self.service, masked(text, self.secrets()))

    def _error_text(self, error: BaseException) -> str:
        """Return an error on one line of at most 500 characters, without secrets."""
        text = masked(" ".join(error_text(error).split()), self.secrets())
        return text.rstrip(".") if len(text) <= 500 else f"{text[:500]}..."
