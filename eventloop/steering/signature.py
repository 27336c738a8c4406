"""Make a command of a function: its signature has the arguments, and its docstring is the help."""

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
    """A command whose arguments fit its parameters.

    Attributes:
        arguments: the value of each parameter by name, defaults too, as JSON has it.
        call: applies the command to a trainer, and returns what the function returns.
    """

    arguments: dict[str, Any]
    call: Callable[[Any], Any]


class CommandSpec:
    """A command that a run knows.

    Args:
        name: the name by which it is called.
        function: `(trainer, **parameters) -> result`; each parameter has a type that JSON can hold.
        takes_any: whether the function takes `(trainer, arguments)` with arguments of any names in its place.
        repeated: whether a repetition of the run applies the command again.
        internal: parameters that hooks give, which the help leaves out.

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
        self._joins = bool(parameters) and parameters[-1][1] is str
        self._texts = {parameter[0] for parameter in parameters if parameter[1] is str}
        self._parameters = _struct(name, parameters)

    @property
    def help(self) -> str:
        """The command with its parameters, and the first line of the docstring."""
        text = (inspect.getdoc(self.function) or "").partition("\n")[0]
        return f"{self._usage}: {text}".removesuffix(": ")

    @property
    def _usage(self) -> str:
        fields = [(field.name, field.required) for field in msgspec.structs.fields(self._parameters)]
        shown = " ".join(
            name.upper() if required else f"[{name.upper()}]"
            for name, required in fields
            if name not in self._internal
        )
        return f"{self.name} {'NAME=VALUE ...' if self._takes_any else shown}".strip()

    def bind(self, command: Command) -> Bound:
        """Convert the arguments of a command to the types of the parameters.

        Raises:
            ValueError: an argument is unknown, missing, of another type or no finite number; the text names
                it.
        """
        if self._takes_any:
            if command.words:
                raise ValueError(f"{self.name} takes NAME=VALUE, got {command.words[0]!r}")
            return Bound(command.arguments, partial(_call, self.function, [dict(command.arguments)], {}))
        values = self._named(command)
        for name in values:
            if name not in self._names:
                raise ValueError(
                    f"{self.name} has no argument {name!r}{suggest(name, self._names or ['none'])}"
                )
        self._check(values)
        named = msgspec.structs.asdict(msgspec.convert(values, self._parameters, strict=False))
        for name, value in named.items():
            if not _is_finite(value):
                raise ValueError(f"{self.name} expects finite numbers, got {name}={value}")
        return Bound(msgspec.to_builtins(named), partial(_call, self.function, [], named))

    def _check(self, values: Mapping[str, Any]) -> None:
        """Refuse arguments of which one is missing or has another type, naming it and what came."""
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

    def _named(self, command: Command) -> dict[str, Any]:
        """Return all arguments by name; the last parameter, if it is a text, takes all further words."""
        words = list(command.words)
        if self._joins and len(words) > len(self._names):
            first = len(self._names) - 1
            words[first:] = [" ".join(words[first:])]
        if len(words) > len(self._names):
            raise ValueError(f"{self.name} expects {self._usage!r}, got {len(words)} arguments")
        named: dict[str, Any] = dict(zip(self._names, words, strict=False))
        if twice := [name for name in command.arguments if name in named]:
            raise ValueError(f"{self.name} got {twice[0]!r} twice, by its place and by its name")
        return {
            name: _opened(value) if name not in self._texts else value
            for name, value in {**named, **command.arguments}.items()
        }


def _call(function: Callable[..., Any], given: list[Any], named: Mapping[str, Any], trainer: Any) -> Any:
    return function(trainer, *given, **named)


def _opened(value: Any) -> Any:
    """Return the list or mapping that a text holds as JSON; anything else as it is."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(value)
    return value


def _is_finite(value: Any) -> bool:
    try:
        json.dumps(msgspec.to_builtins(value), allow_nan=False)
    except ValueError:
        return False
    return True


def _parameters(name: str, function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Return the parameters after the trainer, each as its name, its type and its default or NODEFAULT."""
    signature, hints = inspect.signature(function), get_type_hints(function)
    found: list[tuple[str, Any, Any]] = []
    for parameter in [*signature.parameters.values()][1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"command {name!r} takes {parameter}: each parameter needs a name and a type")
        if parameter.name not in hints:
            raise TypeError(
                f"parameter {parameter.name!r} of command {name!r} has no type: arguments come as text, so "
                f"write {parameter.name}: float, for example"
            )
        default = msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default
        found.append((parameter.name, hints[parameter.name], default))
    return found


def _struct(name: str, parameters: list[tuple[str, Any, Any]]) -> type[msgspec.Struct]:
    try:
        struct = msgspec.defstruct(name, parameters, kw_only=True)
        msgspec.json.schema(struct)
    except TypeError as error:
        raise TypeError(f"command {name!r} has a parameter that JSON cannot hold: {error}") from None
    return struct
