"""Encode events as msgpack, in frames of type number, length and body, and decode them.

Spill files of full queues and worker processes use it. Types are numbered in the order of `add`, so an
object that decodes must add the same types in the same order; `encode` adds a new type itself.
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
_LEAVES = (
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


class Frames:
    """Encode events, and decode them.

    A decoded event equals the encoded one. `encode` refuses an event for which that would not hold, such as
    an event with a tensor, or with a tuple in a field of type `Any`. The caller then keeps the event itself
    in a list, and writes the frame `ELSEWHERE` in its place; if a lone surrogate is the only problem, it uses
    `pickled` instead. One case is not noticed: a value whose type is not that of its field comes back as the
    type that msgpack gives it.
    """

    ELSEWHERE = _HEADER.pack(_IN_LIST, 0)
    """The frame that stands for an event which the caller keeps in a list."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._numbers: dict[type[Event], int] = {}
        self._types: list[type[Event]] = []
        self._exact: list[bool] = []
        self._decoders: list[msgspec.msgpack.Decoder[Event]] = []

    def encode(self, event: Event) -> bytes:
        """Return the frame of an event.

        Raises:
            Exception: msgpack cannot encode it, or the decoded event would differ.
        """
        kind = type(event)
        number = self._numbers.get(kind)
        if number is None:
            number = self.add(kind)
        body = self._encode(event)
        if not self._exact[number] and self._decoders[number].decode(body) != event:
            raise TypeError("decoding would return another value than was encoded")
        return _HEADER.pack(number, len(body)) + body

    def pickled(self, event: Event) -> bytes:
        """Return a frame with a pickle, for an event that was refused because of a lone surrogate.

        Raises:
            Exception: the event holds another value that is not plain, such as a tensor, or its class cannot
                be found.
        """
        msgspec.to_builtins(event)  # raises for a tensor, which pickle would copy
        body = pickle.dumps(event, pickle.HIGHEST_PROTOCOL)
        return _HEADER.pack(_PICKLED, len(body)) + body

    def decode(self, data: bytes | bytearray, elsewhere: Iterable[Event]) -> Iterator[Event | Exception]:
        """Yield the events of some frames, or an exception for an event that cannot be decoded.

        Args:
            elsewhere: the events that the caller kept in a list, in order.
        """
        kept = iter(elsewhere)
        start, end = 0, len(data)
        while start < end:
            number, length = _HEADER.unpack_from(data, start)
            start += _HEADER.size
            if number == _IN_LIST:
                yield next(kept)
            else:
                yield self._decode(number, data[start : start + length])
            start += length

    def add(self, kind: type[Event]) -> int:
        """Assign the next number to a type of event, and return it."""
        exact = _exact(inspect.type_info(kind), set())
        self._decoders.append(msgspec.msgpack.Decoder(kind))
        self._exact.append(exact)
        self._types.append(kind)
        self._numbers[kind] = len(self._types) - 1
        return self._numbers[kind]

    def _decode(self, number: int, body: bytes | bytearray) -> Event | Exception:
        if number == _PICKLED:
            return _unpickled(body)
        try:
            return self._decoders[number].decode(body)
        except Exception as error:
            return _unchecked(self._types[number], body, error)


def _unpickled(body: bytes | bytearray) -> Event | Exception:
    try:
        event: Event = pickle.loads(body)
    except Exception as error:
        return error
    return event


def _unchecked(kind: type[Event], body: bytes | bytearray, error: Exception) -> Event | Exception:
    """Return an event whose values need not have the types of its fields, which a constructor does not check.

    Return `error` if the bytes are damaged.
    """
    try:
        values = msgspec.msgpack.decode(body)
        return kind(
            **{
                field.name: _of_type(values[field.encode_name], field.type)
                for field in msgspec.structs.fields(kind)
                if field.encode_name in values
            }
        )
    except Exception:
        return error


def _of_type(value: Any, wanted: Any) -> Any:
    """Return the value as the wanted type, or as it is if that is impossible."""
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError:
        return value


def _exact(node: inspect.Type, seen: set[int]) -> bool:
    """Return whether msgpack restores each value of a type exactly, so that no event needs a check.

    In a field of type `Any`, for example, a tuple comes back as a list, and a date as a text.

    Args:
        node: msgspec's description of the type.
        seen: the ids of the descriptions that were visited.
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
            return isinstance(node, _LEAVES)
    return all(_exact(part, seen) for part in parts)
