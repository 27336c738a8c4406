"""Encode the messages between a subscriber and its worker process.

They are frames of kind, number, length and body over two pipes (`eventloop.processes.channel`). The worker
receives `SETUP`, then `BEGIN`, events (a `TYPE` ahead of the first of each class), `FLUSH`, and `CLOSE`. It
answers `READY` or `REFUSED`, then `DONE` and `FAILED`, which acknowledge events in the order they were sent,
`FLUSHED` and `CLOSED`. In between it sends `LOG`, a log record (`eventloop.background.workers.log_records`).

Events are msgpack; an event that msgpack would change (a numpy number, a tuple in an `Any`) is pickled. For
an event class that a worker cannot import, because the program itself defines it, the worker makes a class
that looks like it.
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
    """The first message to a worker: module path, packed handler, whether an error stops it, log level."""

    path: list[bytes]
    """The entries of `sys.path` as bytes, because a folder's name need not be UTF-8."""
    target: bytes
    stop_on_error: bool
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
    """How many of the last events the destination has not taken, as `eventloop.util.functions.untaken_by`."""
    awaited: str = ""
    """What its deliveries wait for, as `eventloop.util.functions.awaited_by` returns it."""


class Failure(msgspec.Struct, frozen=True):
    """An encoded exception of a worker."""

    text: str
    traceback: str
    pickled: bytes
    seconds: float = 0.0


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
    """The name of a class that the program itself defines; "" for classes that a worker can import.

    The worker then defines a class with these fields, derived from the nearest base class it can import.
    """
    fields: tuple[str, ...] = ()


class EventEncoder:
    """Encode events for one worker."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._announced: set[type[Event]] = set()
        self._likenesses: dict[type[Event], int] = {}

    def encode(self, event: Event, into: list[bytes]) -> None:
        """Append the frames of an event to `into`."""
        try:
            self._encode(event, into)
        except BaseException as error:  # a SystemExit in a value's `__reduce__` is the event's fault alone
            raise Unencodable([why_not(event, error, _pickled)], of=1) from error

    def _encode(self, event: Event, into: list[bytes]) -> None:
        kind = type(event)
        if kind not in self._announced:
            self._announce(kind, into)
        likeness = self._likenesses.get(kind)
        if likeness is not None:
            fields = {name: getattr(event, name) for name in kind.__struct_fields__}
            into.append(frame(Kind.LIKENESS, likeness, _pickled(fields)))
            return
        try:
            into.append(frame(Kind.EVENT, 0, self._frames.encode(event)))
        except Exception:
            into.append(frame(Kind.PICKLED, 0, _pickled(event)))

    def _announce(self, kind: type[Event], into: list[bytes]) -> None:
        described = _describe(kind)
        if described.like:
            self._likenesses[kind] = len(self._likenesses)
        else:
            try:
                self._frames.add(kind)
            except (
                Exception
            ):  # msgpack does not support a field, or its type is not found: events are pickled
                self._announced.add(kind)
                return
        self._announced.add(kind)
        into.append(frame(Kind.TYPE, 0, msgspec.msgpack.encode(described)))


class EventDecoder:
    """Decode events in a worker, with the classes that `TYPE` messages describe."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._likenesses: list[type[Event]] = []

    def learn(self, message: Frame) -> None:
        """Import or define the class that a `TYPE` message describes; errors of the import are raised."""
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
    return msgspec.msgpack.encode([each.time for each in timed(events)])


def with_times(events: list[Event], body: bytes) -> list[Timed]:
    """Return a batch as `Timed` events; `body` is that of its `BATCH` message, made by `pack_times`."""
    return [*map(Timed, msgspec.msgpack.decode(body, type=list[float]), events)]


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type) and obj.__module__ == "__main__":
            raise pickle.PicklingError(why_not_importable(obj))
        return NotImplemented


def _pickled(value: object) -> bytes:
    """Pickle a value for a worker; refuse objects defined by the main program, which it cannot import."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _describe(kind: type[Event]) -> _Type:
    if not why_not_importable(kind):
        return _Type(kind.__module__, kind.__qualname__)
    base = next(base for base in kind.__mro__[1:] if not why_not_importable(base))
    return _Type(base.__module__, base.__qualname__, kind.__name__, kind.__struct_fields__)


def _likeness(described: _Type) -> type[Event]:
    base: type[Event] = find(described.module, described.name)
    own = [(name, Any) for name in described.fields if name not in base.__struct_fields__]
    made = msgspec.defstruct(described.like, own, bases=(base,), frozen=True, gc=False, kw_only=True)
    like: type[Event] = made  # type: ignore[assignment]
    return like


# --- exceptions --------------------------------------------------------------------------------------------


def pack_error(error: BaseException, seconds: float = 0.0) -> bytes:
    """Encode an exception as the body of a message."""
    pickled = b""
    with suppress(Exception):  # many do not pickle, or do not come back
        candidate = pickle.dumps(error)
        pickle.loads(candidate)
        pickled = candidate
    text = "".join(traceback.format_exception(error)).rstrip()
    message = escaped(error_text(error))  # it may name a file whose path is not UTF-8
    return msgspec.msgpack.encode(Failure(message, escaped(text), pickled, seconds))


def unpack_error(body: bytes) -> tuple[BaseException, float]:
    """Return the exception, caused by a `WorkerTraceback`, and the seconds of its delivery."""
    failure = msgspec.msgpack.decode(body, type=Failure)
    error: object = None
    with suppress(Exception):  # this process may be unable to import the exception's module
        error = pickle.loads(failure.pickled)
    if not isinstance(error, BaseException):
        error = RuntimeError(failure.text)
    error.__cause__ = WorkerTraceback(failure.traceback)
    return error, failure.seconds
