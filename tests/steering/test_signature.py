"""A function's signature is the schema of a command: what it takes, what it refuses, and its help."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop.commands.messages import Command
from eventloop.steering.signature import CommandSpec


def prune(trainer: Any, amount: float, parts: list[int] = [], name: str = "all weights") -> dict[str, Any]:  # noqa: B006
    """Set the smallest weights to zero.

    More about it.
    """
    return {"trainer": trainer, "amount": amount, "parts": parts, "name": name}


SPEC = CommandSpec("prune", prune)


def command(*words: str, **arguments: object) -> Command:
    return Command(id="1-00000000", command="prune", words=[*words], arguments=arguments)


def test_words_are_converted_and_named() -> None:
    """Texts become the types of the parameters, the last text takes all further words, and each has its name."""
    bound = SPEC.bind(command("0.5", "[1, 2]", "all", "but", "biases"))

    assert bound.arguments == {"amount": 0.5, "parts": [1, 2], "name": "all but biases"}
    assert bound.call("trainer") == {"trainer": "trainer", **bound.arguments}


def test_defaults_are_among_the_arguments() -> None:
    """A record names each argument, so that a later change of a default changes no repetition."""
    assert SPEC.bind(command(amount=1)).arguments == {"amount": 1.0, "parts": [], "name": "all weights"}


def test_bound_arguments_bind_again() -> None:
    """What was recorded is converted to the same values."""
    arguments = SPEC.bind(command("0.5", "[1]")).arguments

    assert SPEC.bind(command(**arguments)).arguments == arguments


def test_a_text_with_a_bracket_stays_a_text() -> None:
    """Only a parameter that is no text is read as JSON."""
    assert SPEC.bind(command("1", name="[all]")).arguments["name"] == "[all]"


def test_the_help_leaves_internal_parameters_out() -> None:
    """A person is shown what a person gives."""

    def fetch(trainer: object, name: str, why: str = "") -> None:
        """Fetch it."""

    assert CommandSpec("fetch", fetch, internal=["why"]).help == "fetch NAME: Fetch it."


def test_the_help_has_the_parameters_and_the_first_line() -> None:
    """Required parameters are in capitals, others in brackets."""
    assert SPEC.help == "prune AMOUNT [PARTS] [NAME]: Set the smallest weights to zero."


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (command(), r"^prune expects 'prune AMOUNT \[PARTS\] \[NAME\]', got no AMOUNT$"),
        (command("much"), r"got amount='much': Expected `float`, got `str`$"),
        (command("1", "[1, x"), r"got parts='\[1, x': Expected `array`, got `str`$"),
        (command("1", parts=["a"]), r"got parts=\['a'\]: Expected `int`, got `str` - at `\$\[0\]`$"),
        (command("nan"), "^prune expects finite numbers, got amount=nan$"),
        (command(amount=float("inf")), "^prune expects finite numbers, got amount=inf$"),
        (command("1", amount=1), "^prune got 'amount' twice, by its place and by its name$"),
        (command("1", much=1), "^prune has no argument 'much': known are amount, name, parts$"),
    ],
)
def test_arguments_that_do_not_fit(given: Command, reason: str) -> None:
    """The error names the parameter, the expected type, and what came."""
    with pytest.raises(ValueError, match=reason):
        SPEC.bind(given)


def test_too_many_words() -> None:
    """A command without a text at its end takes only as many words as parameters."""

    def wait(trainer: Any, seconds: int) -> None: ...

    with pytest.raises(ValueError, match=r"^wait expects 'wait SECONDS', got 2 arguments$"):
        CommandSpec("wait", wait).bind(command("1", "2"))


def test_a_command_of_any_names() -> None:
    """A function that takes arguments of any names gets them as they came, and no words."""
    spec = CommandSpec("set", lambda trainer, arguments: arguments, takes_any=True)

    assert spec.bind(command(**{"lr*": "0.5"})).call(None) == {"lr*": "0.5"}
    assert spec.bind(command(**{"lr*": "0.5"})).arguments == {"lr*": "0.5"}
    with pytest.raises(ValueError, match=r"^set takes NAME=VALUE, got 'lr'$"):
        spec.bind(command("lr"))


def test_functions_that_cannot_be_commands() -> None:
    """A parameter needs a name and a type that JSON can hold."""

    def untyped(trainer: Any, amount) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001

    def many(trainer: Any, *amounts: float) -> None: ...

    def live(trainer: Any, model: range) -> None: ...

    with pytest.raises(TypeError, match="parameter 'amount' of command 'untyped' has no type"):
        CommandSpec("untyped", untyped)
    with pytest.raises(TypeError, match=r"command 'many' takes \*amounts: .+: each parameter needs a name"):
        CommandSpec("many", many)
    with pytest.raises(TypeError, match="command 'live' has a parameter that JSON cannot hold"):
        CommandSpec("live", live)
