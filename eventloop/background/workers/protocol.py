"""Encode the messages between a subscriber and its worker process.

A message is a frame of kind, number, length and body in one of two pipes (`eventloop.processes.channel`). The
worker receives `SETUP`, then `BEGIN`, then events (`TYPE` before the first event of each class), `FLUSH` and
`CLOSE`. It answers `READY` or `REFUSED`, then `DONE` and `FAILED`, which acknowledge events in the order in
which they were sent, `FLUSHED` and `CLOSED`. It may send `LOG`, a log record, at any time
(`eventloop.background.workers.log_records`).

Events are encoded as msgpack. An event that msgpack would change, such as a numpy number or a tuple in a
field of type `Any`, is pickled. A worker cannot import an event class that the main program defines; it
defines a similar class instead, a likeness.
"""

from __future__ import annotations

import io
import pickle
import traceback
from contextlib import suppress
from types import FunctionType
from typing import Any

import msgspec

from eventloop.background.workers.importable import find, why_not_importable
from eventloop.events import Event
from eventloop.events.codec import Frames
from eventloop.events.deferred import Timed, timed
from eventloop.events.encoding_errors import Unencodable, why_not
from eventloop.processes.channel import Frame, Kind, frame
from eventloop.util.surrogates import escaped
from eventloop.util.text import error_text


class Setup(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    path: list[bytes]
    """The entries of `sys.path` as bytes, because a folder's name need not be UTF-8."""
    target: bytes
    """The encoded handler and callbacks."""
    stop_on_error: bool
    """Whether the worker makes no more deliveries after an error of the handler."""
    log_level: int
    """The level below which the worker does not send log records."""


class Progress(msgspec.Struct, frozen=True):
    """The deliveries of a worker since its last acknowledgement."""

    durations: list[float]
    """The seconds of each delivery."""
    spans: list[tuple[float, float]] = []
    """The begin and the seconds of each delivery, while spans are recorded.

    `perf_counter` is the same clock for all processes of a POSIX system.
    """
    untaken: int = 0
    """The number of the last events that the destination has not accepted (`util.functions.untaken_by`)."""
    awaited: str = ""
    """The object that deliveries wait for, as ", waiting for X" (`util.functions.awaited_by`)."""


class Failure(msgspec.Struct, frozen=True):
    """An encoded exception of a worker."""

    text: str
    """The type and message of the exception, for a process that cannot decode `pickled`."""
    traceback: str
    pickled: bytes
    seconds: float = 0.0
    """The seconds of the delivery that raised the exception."""


class WorkerTraceback(Exception):
    """The cause of an exception that was raised in a worker; its text is the traceback in the worker."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# --- events ------------------------------------------------------------------------------------------------


class _Type(msgspec.Struct, frozen=True):
    """The description of an event's class, from which a worker imports it or defines a similar class."""

    module: str
    name: str
    like: str = ""
    """The name of a class that the main program defines; "" for a class that a worker can import.

    With a `like`, the worker imports `module` and `name`, which are the nearest base class that it can
    import. From this class it derives one with the name `like` and these fields.
    """
    fields: tuple[str, ...] = ()


class EventEncoder:
    """Encode events for one worker."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._announced: set[type[Event]] = set()
        self._likenesses: dict[type[Event], int] = {}

    def encode(self, event: Event, into: list[bytes]) -> None:
        """Append the frames of an event to the list `into`.

        Raises:
            Unencodable: the event can be neither encoded nor pickled.
        """
        try:
            self._encode(event, into)
        except BaseException as error:  # also a SystemExit that a value's `__reduce__` raises
            raise Unencodable([why_not(event, error, _pickled)], of=1) from error

    def _encode(self, event: Event, into: list[bytes]) -> None:
        """Add the messages of an event: its class at its first event, then its fields, pickled if needed."""
        event_type = type(event)
        if event_type not in self._announced:
            self._announce(event_type, into)
        likeness = self._likenesses.get(event_type)
        if likeness is not None:
            fields = {name: getattr(event, name) for name in event_type.__struct_fields__}
            into.append(frame(Kind.LIKENESS, likeness, _pickled(fields)))
            return
        try:
            into.append(frame(Kind.EVENT, 0, self._frames.encode(event)))
        except Exception:
            into.append(frame(Kind.PICKLED, 0, _pickled(event)))

    def _announce(self, event_type: type[Event], into: list[bytes]) -> None:
        """Append a `TYPE` frame, from which the worker imports or defines an event class."""
        described = _describe(event_type)
        self._announced.add(event_type)
        if described.like:
            self._likenesses[event_type] = len(self._likenesses)
        else:
            try:
                self._frames.add(event_type)
            except Exception:  # msgpack does not support a field's type, so the events are pickled
                return
        into.append(frame(Kind.TYPE, 0, msgspec.msgpack.encode(described)))


class EventDecoder:
    """Decode events in a worker, with the classes that `TYPE` messages describe."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._likenesses: list[type[Event]] = []

    def learn(self, message: Frame) -> None:
        """Import or define the class that a `TYPE` message describes; raise the errors of the import."""
        described = msgspec.msgpack.decode(message.body, type=_Type)
        if described.like:
            self._likenesses.append(_likeness(described))
        else:
            self._frames.add(find(described.module, described.name))

    def decode(self, message: Frame) -> Event:
        """Return the event of a message."""
        if message.kind == Kind.LIKENESS:
            return self._likenesses[message.number](**pickle.loads(message.body))
        if message.kind == Kind.PICKLED:
            event: Event = pickle.loads(message.body)
            return event
        (decoded,) = self._frames.decode(message.body, ())
        if isinstance(decoded, Exception):
            raise decoded
        return decoded


def pack_times(events: list[Any]) -> bytes:
    """Encode the times of `Stamped` events as the body of their `BATCH` message."""
    return msgspec.msgpack.encode([event.time for event in timed(events)])


def with_times(events: list[Event], body: bytes) -> list[Timed]:
    """Return events with their times, which `pack_times` has encoded as the `body` of a `BATCH` message."""
    return [*map(Timed, msgspec.msgpack.decode(body, type=list[float]), events)]


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            raise pickle.PicklingError(why_not_importable(obj))
        return NotImplemented


def _pickled(value: object) -> bytes:
    """Pickle a value for a worker, which can import no function or class of the main program.

    Raises:
        PicklingError: the value contains a function or class of the main program.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _describe(event_type: type[Event]) -> _Type:
    """Return the description of an event class for a worker."""
    if not why_not_importable(event_type):
        return _Type(event_type.__module__, event_type.__qualname__)
    base = next(base for base in event_type.__mro__[1:] if not why_not_importable(base))
    return _Type(base.__module__, base.__qualname__, event_type.__name__, event_type.__struct_fields__)


def _likeness(described: _Type) -> type[Event]:
    """Define a class like an event class of the main program, from its description."""
    base: type[Event] = find(described.module, described.name)
    own_fields = [(name, Any) for name in described.fields if name not in base.__struct_fields__]
    defined = msgspec.defstruct(
        described.like, own_fields, bases=(base,), frozen=True, gc=False, kw_only=True
    )
    likeness: type[Event] = defined  # type: ignore[assignment]
    return likeness


# --- exceptions --------------------------------------------------------------------------------------------


def pack_error(error: BaseException, seconds: float = 0.0) -> bytes:
    """Encode an exception as the body of a message."""
    pickled = b""
    with suppress(Exception):  # many exceptions cannot be pickled, or their pickles cannot be loaded
        candidate = pickle.dumps(error)
        pickle.loads(candidate)
        pickled = candidate
    text = "".join(traceback.format_exception(error)).rstrip()
    message = escaped(error_text(error))  # the message may contain a path that is not UTF-8
    return msgspec.msgpack.encode(Failure(message, escaped(text), pickled, seconds))


def unpack_error(body: bytes) -> tuple[BaseException, float]:
    """Return a worker's exception, with a `WorkerTraceback` as its cause, and the seconds of its delivery."""
    failure = msgspec.msgpack.decode(body, type=Failure)
    error: object = None
    with suppress(Exception):  # this process may be unable to import the exception's module
        error = pickle.loads(failure.pickled)
    if not isinstance(error, BaseException):
        error = RuntimeError(failure.text)
    error.__cause__ = WorkerTraceback(failure.traceback)
    return error, failure.seconds
