"""Find the function of a command by its name, and check the command's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from eventloop.commands.messages import EVALUATED, Command
from eventloop.steering.protocols import CommandError
from eventloop.util.suggest import suggest

if TYPE_CHECKING:
    from eventloop.steering.signature import Bound, CommandSpec

AT_ONCE = ("help", "stacks")
"""The commands that a background thread answers, even while the training thread hangs."""


class KnownCommands:
    """The commands that one run knows: the commands of every run, and others that its program adds.

    The modules of the commands of every run are imported when a command is looked up.
    """

    def __init__(self) -> None:
        self._own: dict[str, CommandSpec] = {}  # of the program or a bridge; they may replace others
        self._excluded: dict[str, str] = {}  # names of commands, each with the reason why it is refused

    @property
    def _specs(self) -> dict[str, CommandSpec]:
        """The commands by name; one of the program replaces a command of every run."""
        from eventloop.steering.builtin import BUILTIN
        from eventloop.steering.evaluated import EVALUATED_SPEC

        return {spec.name: spec for spec in (*BUILTIN, EVALUATED_SPEC)} | self._own

    def add(self, name: str, function: Callable[..., Any]) -> None:
        """Add a command of the program.

        Raises:
            TypeError: a parameter has no type, or a type that JSON cannot hold.
            ValueError: there is another command of that name.
        """
        known = self._specs.get(name)
        if known is not None and known.function is function:
            return  # added before, for example by a handler of `before_run` in an earlier run
        if known is not None or name in AT_ONCE:
            raise ValueError(f"there is a command {name!r} already: give the function another name")
        from eventloop.steering.signature import CommandSpec

        self._own[name] = CommandSpec(name, function)

    def replace(self, function: Callable[..., Any]) -> None:
        """Set the function of the command that has the function's name.

        A bridge replaces the command `checkpoint` in this way if the other engine saves its own checkpoints.
        """
        from eventloop.steering.signature import CommandSpec

        self._own[function.__name__] = CommandSpec(function.__name__, function)

    def exclude(self, reasons: Mapping[str, str]) -> None:
        """Refuse commands that the loop of this trainer cannot apply.

        Args:
            reasons: the reason of each refusal, by the command's name.
        """
        self._excluded.update(reasons)

    def bind(self, command: Command) -> Bound:
        """Return the function of a command together with its checked arguments.

        Raises:
            CommandError: the command is unknown or excluded, or its arguments are wrong.
        """
        name = command.command
        if (reason := self._excluded.get(name)) is not None:
            raise CommandError(f"{name} is not possible here: {reason}")
        specs = self._specs
        if (spec := specs.get(name)) is None:
            raise CommandError(f"unknown command {name!r}{suggest(name, [*specs, *AT_ONCE])}")
        try:
            return spec.bind(command)
        except ValueError as error:
            raise CommandError(str(error)) from None

    def is_repeated(self, name: str) -> bool:
        """Return whether a repetition of the run applies the command of this name again."""
        return self._specs[name].repeated

    @property
    def help(self) -> str:
        """The commands with their parameters and descriptions, one command on each line."""
        return "\n".join(spec.help for spec in self._specs.values() if spec.name != EVALUATED)
