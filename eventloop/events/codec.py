"""Encode events as msgpack and decode them.

The temporary files of full queues and the pipes to worker processes contain such events. A frame, one encoded
event, consists of the number of its type, the length of its body, and the body. Types are numbered in the
order in which they are added. So the `Frames` that decodes must have the same types added in the same order.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import inspect

from eventloop.events.base import Event

_HEADER = struct.Struct("<II")
_IN_LIST = 0xFFFF_FFFF
"""The type number of an event that the caller keeps in a list, because it cannot be encoded."""
_PICKLED = 0xFFFF_FFFE
"""The type number of an event whose body is a pickle."""
_EXACT_TYPES = (
    inspect.IntType,
    inspect.FloatType,
    inspect.BoolType,
    inspect.StrType,
    inspect.BytesType,
    inspect.NoneType,
    inspect.LiteralType,
    inspect.EnumType,
    inspect.DateTimeType,
    inspect.UUIDType,
    inspect.DecimalType,
)
"""msgspec's descriptions of the simple types whose values msgpack restores exactly."""


class Frames:
    """Encode events as frames, and decode the frames.

    A decoded event equals the encoded one. `encode` raises an error for an event for which that would not
    hold, such as an event with a tensor, or with a tuple in a field of type `Any`. The caller then keeps the
    event itself in a list, and writes the frame `ELSEWHERE` in its place. If a lone surrogate in a text is
    the only problem, `pickled` returns a frame. There is one exception: a value whose type differs from that
    of its field is decoded as another type, and no error is raised.
    """

    ELSEWHERE = _HEADER.pack(_IN_LIST, 0)
    """The frame in place of an event that the caller keeps in a list."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._numbers: dict[type[Event], int] = {}
        self._types: list[type[Event]] = []
        self._exact: list[bool] = []
        self._decoders: list[msgspec.msgpack.Decoder[Event]] = []

    def encode(self, event: Event) -> bytes:
        """Return the frame of an event, and add its type if it is new.

        Raises:
            Exception: msgpack cannot encode the event, or the decoded event would differ from it.
        """
        event_type = type(event)
        number = self._numbers.get(event_type)
        if number is None:
            number = self.add(event_type)
        body = self._encode(event)
        if not self._exact[number] and self._decoders[number].decode(body) != event:
            raise TypeError("decoding would return another value than was encoded")
        return _HEADER.pack(number, len(body)) + body

    def pickled(self, event: Event) -> bytes:
        """Return a frame with a pickle of an event that `encode` refused because of a lone surrogate.

        Raises:
            Exception: the event holds an object such as a tensor, or pickle cannot find the event's class.
        """
        msgspec.to_builtins(event)  # raises for a tensor, which pickle would copy
        body = pickle.dumps(event, pickle.HIGHEST_PROTOCOL)
        return _HEADER.pack(_PICKLED, len(body)) + body

    def decode(self, data: bytes | bytearray, elsewhere: Iterable[Event]) -> Iterator[Event | Exception]:
        """Yield the event of each frame, or an exception if the event cannot be decoded.

        Args:
            data: frames, one after the other.
            elsewhere: the events that the caller kept in a list, in the order of their frames.
        """
        listed = iter(elsewhere)
        start, end = 0, len(data)
        while start < end:
            number, length = _HEADER.unpack_from(data, start)
            start += _HEADER.size
            if number == _IN_LIST:
                yield next(listed)
            else:
                yield self._decode(number, data[start : start + length])
            start += length

    def add(self, event_type: type[Event]) -> int:
        """Assign the next number to a type of event, and return the number."""
        exact = _exact(inspect.type_info(event_type), set())
        self._decoders.append(msgspec.msgpack.Decoder(event_type))
        self._exact.append(exact)
        self._types.append(event_type)
        self._numbers[event_type] = len(self._types) - 1
        return self._numbers[event_type]

    def _decode(self, number: int, body: bytes | bytearray) -> Event | Exception:
        """Return the event of one frame, or the error if it cannot be decoded."""
        if number == _PICKLED:
            return _unpickled(body)
        try:
            return self._decoders[number].decode(body)
        except Exception as error:
            return _unchecked(self._types[number], body, error)


def _unpickled(body: bytes | bytearray) -> Event | Exception:
    """Return the event of a pickle, or the error if it cannot be loaded."""
    try:
        event: Event = pickle.loads(body)
    except Exception as error:
        return error
    return event


def _unchecked(event_type: type[Event], body: bytes | bytearray, error: Exception) -> Event | Exception:
    """Decode an event that has values of other types than its fields declare.

    A program can create such an event, because a constructor checks no types. msgspec's decoder refuses it.

    Args:
        error: the error of that decoder, which is returned if the bytes are damaged.
    """
    try:
        values = msgspec.msgpack.decode(body)
        fields = [field for field in msgspec.structs.fields(event_type) if field.encode_name in values]
        return event_type(
            **{field.name: _converted(values[field.encode_name], field.type) for field in fields}
        )
    except Exception:
        return error


def _converted(value: Any, field_type: Any) -> Any:
    """Return `value` as an object of the field's type, or unchanged if it cannot be converted."""
    try:
        return msgspec.convert(value, field_type)
    except msgspec.ValidationError:
        return value


def _exact(node: inspect.Type, seen: set[int]) -> bool:
    """Return whether msgpack decodes every value of a type to an equal value.

    If so, `encode` need not check the event. In a field of type `Any`, for example, a tuple is decoded as a
    list, and a date as a text.

    Args:
        node: msgspec's description of the type.
        seen: the ids of the descriptions that were visited already, to which this function adds.
    """
    if id(node) in seen:  # a type that contains itself
        return True
    seen.add(id(node))
    match node:
        case inspect.StructType():
            parts: tuple[inspect.Type, ...] = tuple(field.type for field in node.fields)
        case inspect.DictType(key_type=inspect.StrType() | inspect.IntType()):
            parts = (node.value_type,)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            parts = (node.item_type,)
        case inspect.TupleType():
            parts = node.item_types
        case inspect.UnionType():
            parts = node.types
        case _:
            return isinstance(node, _EXACT_TYPES)
    return all(_exact(part, seen) for part in parts)
