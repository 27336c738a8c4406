"""Define the base class of the writers for experiment trackers.

It continues one run over restarts, writes each step once, and tries again after errors.

`wandb_writer`, `mlflow_writer`, `trackio_writer` and `opentelemetry_writer` derive from `TrackerWriter`. A
tracker cannot remove a step, so a step that is run again after a resume is not written again.
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
from eventloop.writers.tracker_values import Tally, key_of, key_of_checkpoint, number_of, record_last
from eventloop.writers.writer import TimedWriter

logger = logging.getLogger("eventloop")

RETRY_SECONDS = 10.0
LOCK_SECONDS = 30.0
"""The seconds to wait for the lock, which a killed program's worker keeps for up to 10 s."""
SHORT = 60
"""The number of characters of an error that is in the log already."""
BACKLOG = 100_000
"""The number of unsent events above which the writer fails."""
RUN_EVENTS = (*ENDING, BeforeTrain)
"""The events that mark where a training begins and how the run ended."""


class Known(msgspec.Struct):
    """The contents of the state file: a run and its last steps."""

    id: str = ""
    last: dict[str, int] = {}
    """The last step written for each name, such as "train/loss"."""
    trainer_id: str = ""
    """The id of the trainer whose run was written last."""


class TrackerWriter(TimedWriter):
    """The base class of writers that send a run to an experiment tracker.

    A subclass continues the run whose id is in the file `<target>_run.json` of the work dir. If the tracker
    cannot be reached when the run begins, or for too many events, the writer fails with one line in the log;
    the training goes on. Events that were not written are in the run's event log, if it has one: a resumed
    run writes those up to its checkpoint first, and `eventloop replay RUN --to TRACKER --out RUN` writes the
    rest.
    """

    batch = 256
    linger = 1.0
    offload = "auto"
    stall_timeout = 120.0
    service: ClassVar[str]
    """The name of the tracker in messages."""
    target: ClassVar[str]
    """The tracker's name as an extra, in `eventloop replay --to`, and in the file with the id of the run."""
    checkpoints = False
    """Whether each saved checkpoint is sent."""
    secret_variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables whose values no message may contain."""

    def __init__(self, name: str | None, offload: str | None) -> None:
        if offload is not None:
            check_choice("offload", offload, OFFLOADS)
            self.offload = offload
        check_texts(name=name)
        self.name = name
        self._known = Known()
        self._floor: dict[str, int] = {}  # by name, the last step written before training
        self._tally = Tally({})
        self._pending: list[Timed] = []
        self._untaken = 0
        self._retry_at = 0.0
        self._error = ""  # why the last send failed, or ""
        self._logged_error = ""
        self._warned: set[str] = set()
        self._refused: list[BadEvent] = []  # events with values that the tracker refused, not reported yet
        self._outcome = RunOutcome()
        self._lock: FileIO | None = None

    @property
    def _state_path(self) -> Path:
        of_name = "" if self.name is None else f"_{safe_name(self.name)}"
        return self._work_dir / f"{self.target}_run{of_name}.json"

    @abstractmethod
    def connect(self, run: Run, known: Known) -> Known:
        """Begin or continue a run; return its id and the last steps that the tracker has."""

    def had_before(self, known: Known) -> dict[str, int]:
        """Return the last step of each name that the tracker had before the writer connected.

        Args:
            known: the result of `connect`.
        """
        return known.last

    @abstractmethod
    def send(self, events: list[Timed]) -> None:
        """Send events. If it raises, it removes sent ones from the list first: those left are sent again."""

    def end(self, status: str) -> None:
        """End the run; `status` is "FINISHED", "FAILED" or "KILLED"."""

    def secrets(self) -> list[str]:
        """Return texts that no message may contain."""
        values = [os.environ.get(name, "") for name in self.secret_variables]
        return [text for value in values for text in (value, value.strip()) if text]

    def where(self) -> str:
        """Return the place of the tracker after its name in messages, such as " at http://localhost:5000"."""
        return ""

    @property
    def waits_for(self) -> str:
        """Return the tracker's name and address, its error, and how many events wait for it."""
        error = f" ({self._error})" if self._error else ""
        count = len(self._pending)
        events = "1 event waits" if count == 1 else f"{count:,} events wait"
        waiting = f", for which {events}; {self._later()}" if count else ""
        return f"{self.service}{self.where()}{error}{waiting}"

    @property
    def untaken(self) -> int:
        """Return how many of the last delivered events the tracker may not have; they count as queued."""
        return self._untaken + len(self._refused)

    # --- called by the engine ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        self._work_dir = Path(run.work_dir)
        self._known, self._outcome, self._error = Known(), RunOutcome(), ""
        try:
            self._lock = lock_file(self._state_path.with_suffix(".lock"), LOCK_SECONDS)
            self._known = self.connect(run, self._own_run(run))
            self._known.trainer_id = run.trainer_id
        except Exception as error:
            if self._lock is not None:
                self._lock.close()
            raise UnavailableError(
                f"{self.service} cannot be used: {self._text(error)}; {self._later()}"
            ) from None
        self._tally = Tally(self.had_before(self._known))
        self._begin_training()
        self._save()
        if run.start_iter:
            self._catch_up(run.start_iter)
        self._untaken, self._refused = 0, []  # events of the log are not the subscriber's

    def write_timed(self, events: list[Timed]) -> None:
        """Write events with the Unix time of each; a replay calls this with the times of the log."""
        self._pass_on(events)
        refused, self._refused = self._refused[: len(events)], self._refused[len(events) :]
        if refused:  # those beyond this delivery are told with the next one
            raise Unencodable(refused, of=len(events))

    def _pass_on(self, events: list[Timed]) -> None:
        self._untaken += len(events)
        for when, event in events:
            if (kept := self._receive(event)) is not None:
                self._pending.append(Timed(when, kept))
        if not self._error or monotonic() >= self._retry_at:
            self._try_to_send()
        if len(self._pending) > BACKLOG:
            self._untaken -= len(events)  # this delivery has failed
            raise self._lost()

    def flush(self) -> None:
        self._try_to_send()

    def close(self) -> None:
        self._try_to_send()
        unended = ""
        try:
            if self._known.id:  # else `open` has raised why there is no run to end
                self.end(self._outcome.status.upper())
        except Exception as error:
            unended = f"{self.service} did not take the end of the run: {self._text(error)}"
        finally:
            if self._lock is not None:
                self._lock.close()
        if self._pending:
            raise self._lost()
        if unended:
            raise UnavailableError(unended)

    @property
    def written(self) -> Written:
        """Return how many values since `open` were new, and how many the tracker already had."""
        return Written(self.service, self._tally.new, self._tally.known)

    def _own_run(self, run: Run) -> Known:
        """Return the tracker's run that is continued, or `Known()` for a new run.

        A trainer that begins at step 0 gets a new run, unless the run in the state file is its own. A
        worker process that is started again, or a second run, has the id of the same trainer.
        """
        known = _load(self._state_path)
        begins = not run.start_iter and bool(run.trainer_id) and run.trainer_id != known.trainer_id
        return Known() if begins else known

    # --- what is written -----------------------------------------------------------------------------------

    def _receive(self, event: Event) -> Event | None:
        """Note an event; return it without the values written before, or None if none is left."""
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
        scalars = {}
        for name, given in event.scalars.items():
            key = f"{event.mode}/{name}"
            if (value := number_of(given)) is None:
                self.warn_once(key, f"{key} is left out: expected a number, got {type(given).__name__}")
            elif self._is_new(key, event.step):
                scalars[name] = value
        return msgspec.structs.replace(event, scalars=scalars) if scalars else None

    def _is_new(self, key: str, step: int) -> bool:
        self._tally.count(key, step)
        if step <= self._floor.get(key, -1):
            return False
        record_last(self._known.last, [key], step)
        return True

    def _begin_training(self) -> None:
        self._floor = dict(self._known.last)

    def _catch_up(self, start: int) -> None:
        """Write the logged events up to iteration `start`, of the checkpoint, that the tracker lacks."""
        log = self._work_dir / FILE_NAME
        if not log.is_file():
            return
        for records in EventReader(log, only=[*self._logged(), BeforeTrain], on_torn="ignore").blocks():
            due = (each for each in records if step_of(each.event) <= start and self._lacks(each.event))
            self._pass_on([Timed(record.time, record.event) for record in due])
        self._begin_training()

    def _lacks(self, event: Event) -> bool:
        """Return False for a checkpoint that was sent, or that the run has removed."""
        if not isinstance(event, CheckpointSaved):
            return True
        sent = self._known.last.get(key_of_checkpoint(event), -1)
        return event.iter > sent and Path(event.path).exists()

    def _logged(self) -> list[type[Event]]:
        logged: list[type[Event]] = [ScalarsLogged, ImageLogged, HistogramLogged, TextLogged]
        logged += [CheckpointSaved] if self.checkpoints else []
        return [event for event in logged if event in self.events]

    # --- sending -------------------------------------------------------------------------------------------

    def _try_to_send(self) -> None:
        if not self._pending:
            self._untaken = 0
            return
        try:
            self.send(self._pending)
        except Exception as error:
            if not self._error:
                self._logged_error = self._text(error)
                logger.warning(
                    "%s does not take the events, which wait until it does: %s",
                    self.service,
                    self._logged_error,
                )
            self._error = self._text(error)
            self._retry_at = monotonic() + RETRY_SECONDS
            return
        self._error = ""
        self._pending, self._untaken = [], 0
        self._save()

    def _lost(self) -> UnavailableError:
        count, self._pending = len(self._pending), []
        why = self._error
        if why == self._logged_error and len(why) > SHORT:
            why = f"{why[:SHORT].rstrip()}... (logged before)"
        events = "1 event was" if count == 1 else f"{count:,} events were"
        return UnavailableError(f"{events} not written to {self.service}: {why}; {self._later()}")

    def _later(self) -> str:
        """Return a hint with the command that writes the events later; in a replay, its own."""
        run, out = self._work_dir, f" --out {quote(str(self._work_dir))}"
        if run.name == REPLAY_FOLDER:
            run, out = run.parent, ""
        options = masked(set_options(self._made_with, secret=self.secret_arguments), self.secrets())
        command = f"eventloop replay {quote(str(run))} --to {self.target}{options}{out}"
        return f"`{command}` writes them later, if the run has an EventLogWriter"

    def _save(self) -> None:
        """Write the state file; a kill leaves the old or the new one."""
        try:
            with replacing(self._state_path, durable=False) as file:
                file.write(msgspec.json.encode(self._known))
        except OSError as error:  # the events are written: to pass them again would write them twice
            self.warn_once("state", f"{self._state_path} cannot be written: {error}")

    # --- what subclasses share -----------------------------------------------------------------------------

    def import_library(self, *modules: str) -> list[Any]:
        """Import the modules of the tracker's library, the first of which names it, and those that it needs.

        Raises:
            ImportError: naming the extra that installs it.
        """
        try:
            return [importlib.import_module(module) for module in modules]
        except ImportError as error:
            raise ImportError(
                f"{type(self).__name__} needs {modules[0]}: pip install 'torch-eventloop[{self.target}]'"
            ) from error

    def png_of(self, event: ImageLogged) -> bytes | None:
        """Return an image as a PNG file; None, with a line in the log, if it cannot be."""
        from eventloop.writers.pixels import pixels, png

        try:
            return png(pixels(event))
        except (TypeError, ValueError) as error:
            self.warn_once(key_of(event), f"{key_of(event)} is left out: {error}")
            return None

    def checkpoint_of(self, event: CheckpointSaved) -> Path | None:
        """Return the path of a checkpoint; None, with a line in the log, if it is no longer there."""
        path = Path(event.path)
        if path.exists():
            return path
        self.warn_once(event.path, f"checkpoint {path} is not sent: it was removed meanwhile")
        return None

    def record_sent(self, checkpoint: CheckpointSaved) -> None:
        """Note that a checkpoint was sent, so that a resumed run does not send it again."""
        record_last(self._known.last, [key_of_checkpoint(checkpoint)], checkpoint.iter)

    def warn_once(self, key: str, text: str) -> None:
        """Log a warning, once for each key."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s: %s", self.service, masked(text, self.secrets()))

    def _text(self, error: BaseException) -> str:
        text = masked(" ".join(error_text(error).split()), self.secrets())
        return text.rstrip(".") if len(text) <= 500 else f"{text[:500]}..."


def _load(path: Path) -> Known:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Known)
    except FileNotFoundError:
        return Known()
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not the file of a run, remove it: {error}") from None
