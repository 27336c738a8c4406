"""Make a command of a function: its signature gives the arguments, and its docstring the help."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import msgspec

from eventloop.commands.messages import Command
from eventloop.util.suggest import suggest


class Bound(NamedTuple):
    """The function of a command together with its checked arguments.

    Attributes:
        arguments: the values of all parameters by name, with defaults, as values that JSON can hold.
        call: applies the command to a trainer, and returns the result of the function.
    """

    arguments: dict[str, Any]
    call: Callable[[Any], Any]


class CommandSpec:
    """A command that a run knows.

    Args:
        name: the name of the command.
        function: `(trainer, **parameters) -> result`; each parameter has a type that JSON can hold.
        takes_any: True if the function is `(trainer, arguments) -> result`, with a mapping of any arguments.
        repeated: whether a repetition of the run applies the command again.
        internal: parameters that only hooks pass, which the help does not show.

    Raises:
        TypeError: a parameter has no type, a type that JSON cannot hold, or takes any number of arguments.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        takes_any: bool = False,
        repeated: bool = True,
        internal: Collection[str] = (),
    ) -> None:
        self.name, self.function, self.repeated = name, function, repeated
        self._takes_any, self._internal = takes_any, internal
        parameters = [] if takes_any else _parameters(name, function)
        self._names = [parameter[0] for parameter in parameters]
        self._last_is_text = bool(parameters) and parameters[-1][1] is str
        self._text_names = {parameter[0] for parameter in parameters if parameter[1] is str}
        self._parameters = _struct(name, parameters)

    @property
    def help(self) -> str:
        """A line with the command, its parameters, and the first line of the function's docstring."""
        text = (inspect.getdoc(self.function) or "").partition("\n")[0]
        return f"{self._usage}: {text}".removesuffix(": ")

    @property
    def _usage(self) -> str:
        """The command with its parameters, such as "note TEXT" or "trace [ITERATIONS]"."""
        if self._takes_any:
            return f"{self.name} NAME=VALUE ..."
        fields = [
            each for each in msgspec.structs.fields(self._parameters) if each.name not in self._internal
        ]
        parameters = [each.name.upper() if each.required else f"[{each.name.upper()}]" for each in fields]
        return " ".join([self.name, *parameters])

    def bind(self, command: Command) -> Bound:
        """Convert the arguments of a command to the types of the parameters.

        Raises:
            ValueError: an argument is unknown, missing, of another type or not finite; the text names it.
        """
        if self._takes_any:
            if command.words:
                raise ValueError(f"{self.name} takes NAME=VALUE, got {command.words[0]!r}")
            return Bound(command.arguments, partial(_call, self.function, [dict(command.arguments)], {}))
        given = self._by_name(command)
        for name in given:
            if name not in self._names:
                raise ValueError(
                    f"{self.name} has no argument {name!r}{suggest(name, self._names or ['none'])}"
                )
        self._check(given)
        values = msgspec.structs.asdict(msgspec.convert(given, self._parameters, strict=False))
        for name, value in values.items():
            if not _is_finite(value):
                raise ValueError(f"{self.name} expects finite numbers, got {name}={value}")
        return Bound(msgspec.to_builtins(values), partial(_call, self.function, [], values))

    def _check(self, values: Mapping[str, Any]) -> None:
        """Raise a ValueError for the first argument that is missing or has another type."""
        for field in msgspec.structs.fields(self._parameters):
            if field.name not in values:
                if field.required:
                    raise ValueError(f"{self.name} expects {self._usage!r}, got no {field.name.upper()}")
                continue
            try:
                msgspec.convert(values[field.name], field.type, strict=False)
            except msgspec.ValidationError as error:
                got = f"{field.name}={values[field.name]!r}"
                raise ValueError(f"{self.name} expects {self._usage!r}, got {got}: {error}") from None

    def _by_name(self, command: Command) -> dict[str, Any]:
        """Return all arguments of a command by the names of the parameters.

        If the last parameter is a text, the remaining words are joined for it.
        """
        words = list(command.words)
        if self._last_is_text and len(words) > len(self._names):
            last = len(self._names) - 1
            words[last:] = [" ".join(words[last:])]
        if len(words) > len(self._names):
            raise ValueError(f"{self.name} expects {self._usage!r}, got {len(words)} arguments")
        by_position: dict[str, Any] = dict(zip(self._names, words, strict=False))
        if twice := [name for name in command.arguments if name in by_position]:
            raise ValueError(f"{self.name} got {twice[0]!r} twice, by its place and by its name")
        arguments = {**by_position, **command.arguments}
        return {
            name: value if name in self._text_names else _decoded(value) for name, value in arguments.items()
        }


def _call(function: Callable[..., Any], given: list[Any], named: Mapping[str, Any], trainer: Any) -> Any:
    """Call the function of a command; with `partial` this is the `call` of a `Bound`."""
    return function(trainer, *given, **named)


def _decoded(value: Any) -> Any:
    """Decode a text that is a JSON list or mapping; return any other value unchanged."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(value)
    return value


def _is_finite(value: Any) -> bool:
    """Return whether a value, also a nested one, has no NaN and no infinite number."""
    try:
        json.dumps(msgspec.to_builtins(value), allow_nan=False)
    except ValueError:
        return False
    return True


def _parameters(name: str, function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Return name, type and default (or NODEFAULT) of each parameter after the trainer.

    Raises:
        TypeError: a parameter has no name or no type.
    """
    signature, hints = inspect.signature(function), get_type_hints(function)
    parameters: list[tuple[str, Any, Any]] = []
    for parameter in [*signature.parameters.values()][1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"command {name!r} takes {parameter}: each parameter needs a name and a type")
        if parameter.name not in hints:
            raise TypeError(
                f"parameter {parameter.name!r} of command {name!r} has no type: arguments come as text, so "
                f"write {parameter.name}: float, for example"
            )
        default = msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default
        parameters.append((parameter.name, hints[parameter.name], default))
    return parameters


def _struct(name: str, parameters: list[tuple[str, Any, Any]]) -> type[msgspec.Struct]:
    """Return a struct whose fields are the parameters; refuse types that JSON cannot hold."""
    try:
        struct = msgspec.defstruct(name, parameters, kw_only=True)
        msgspec.json.schema(struct)
    except TypeError as error:
        raise TypeError(f"command {name!r} has a parameter that JSON cannot hold: {error}") from None
    return struct
