"""Implement `eventloop tell`, which sends a command to a running training and prints its answer."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.output_file import failed, print_stderr
from eventloop.util.terminal import print_line

if TYPE_CHECKING:  # slow imports, which --help does not need
    from eventloop.commands import Answer

COMMANDS = """\
commands:
  checkpoint             save a checkpoint; the answer is its path once it is durable
  validate               validate now; the answer is the metrics
  stop [REASON]          stop the run, with its closing events and the last checkpoint
  pause, go              wait after an iteration, and go on
  set NAME=VALUE ...     set numbers, such as lr=1e-4, "lr*=0.5", early_stopping.patience=5
  trace [ITERATIONS]     record the next iterations as a file for Perfetto
  note TEXT              log a text at this iteration
  rollback [CHECKPOINT]  go back to a checkpoint within the run
  help, stacks           list all commands; show where each thread of the run stands
  and those of the run's own program, as words or NAME=VALUE: eventloop tell RUN --help lists them

exit codes: 0 applied; 1 refused (why); 2 no such run, or wrong arguments; 3 no answer (whether the
run's process lives, and whether the command was withdrawn); 130 ended by Ctrl-C. The run looks for commands
each second, and applies them at the end of an iteration."""
HELP_SECONDS = 5.0
"""The longest wait, in seconds, of `--help` for the list of a run's own commands."""
_TEXTS = ("note", "stop")
"""The commands whose words form one text, in which `NAME=VALUE` is no argument."""
_NAMED = re.compile(r"([^\s=]+)=(.*)", re.DOTALL)
_WITH_VALUE, _FLAGS = ("--timeout",), ("--no-wait", "--json", "--traceback", "-h", "--help")


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "tell",
        help="send a command to a running training: stop, checkpoint, set lr=1e-4, ...",
        usage="eventloop tell RUN COMMAND [WORD | NAME=VALUE ...] [--timeout S] [--no-wait] [--json]",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="the run's directory")
    parser.add_argument("name", nargs="?", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("words", nargs="*", metavar="ARGUMENT", help="its arguments")
    parser.add_argument("--timeout", type=_seconds, default=30.0, metavar="S", help="seconds (default: 30)")
    parser.add_argument("--no-wait", action="store_true", help="send the command, and print its id")
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    parser.add_argument("-h", "--help", action="store_true", help="show this, and the run's own commands")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.set_defaults(show=parser)


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the options first and the words after `--`.

    argparse would else take a word such as `-0.5` for an option, and refuse words after an option.
    """
    options, words, remaining = [], [], list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument == "--":
            words += remaining
            break
        if argument in _WITH_VALUE:
            options += [argument, *remaining[:1]]
            del remaining[:1]
        elif argument in _FLAGS or argument.startswith("--"):
            options.append(argument)
        else:
            words.append(argument)
    return [*options, "--", *words] if words else options


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from eventloop.commands.client import NoAnswerError, NoRunError, post, send

    if options.help or options.run is None or options.name is None:
        return _help(options)
    try:
        words, arguments = _split(options.name, options.words)
        if options.no_wait:
            command_id = post(options.run, options.name, *words, arguments=arguments)
            print_line(json.dumps({"id": command_id}) if options.json else f"sent as {command_id}")
            return 0
        answer = send(options.run, options.name, *words, arguments=arguments, timeout=options.timeout)
    except NoAnswerError as error:
        if options.json:
            print_line(_no_answer(options.name, error, withdrawn=error.withdrawn, lives=error.lives))
        else:
            print_stderr(str(error))
        return 3
    except (NoRunError, OSError, ValueError) as error:
        return failed(options, error, 2)
    _print(answer, as_json=options.json)
    return 0 if answer.outcome == "applied" else 1


def _help(options: argparse.Namespace) -> int:
    """Print the usage and the commands of the run, if it is alive; return the exit code.

    Without the option --help, report a missing argument as an error.
    """
    parser: argparse.ArgumentParser = options.show
    if not options.help:
        missing = "RUN, the run's directory" if options.run is None else "COMMAND, such as stop"
        parser.error(f"expected {missing}; eventloop tell --help lists the commands")
    print_line(parser.format_help().rstrip())
    if options.run is None:
        return 0
    from eventloop.commands.client import NoAnswerError, NoRunError, send

    try:
        answer = send(options.run, "help", timeout=min(options.timeout, HELP_SECONDS))
    except (NoRunError, NoAnswerError, OSError) as error:
        print_stderr(str(error))
        return 3 if isinstance(error, NoAnswerError) else 2
    print_line(f"\nthe commands of {options.run}:\n{_indented(str(answer.result.get('text', '')))}")
    return 0


def _split(command: str, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words that are not of the form NAME=VALUE, and the values of the others by name.

    Raises:
        ValueError: a name is given twice, or `set` has no NAME=VALUE.
    """
    if command in _TEXTS:
        return ([" ".join(words)] if words else []), {}
    plain: list[str] = []
    named: dict[str, str] = {}
    for word in words:
        if (match := _NAMED.fullmatch(word)) is None:
            plain.append(word)
        elif match[1] in named:
            raise ValueError(f"expected each name once, got {match[1]!r} twice")
        else:
            named[match[1]] = match[2]
    if command == "set" and (plain or not named):
        got = repr(plain[0]) if plain else "nothing"
        raise ValueError(f"set expects NAME=VALUE, such as lr=1e-4, got {got}")
    return plain, named


def _print(answer: Answer, *, as_json: bool) -> None:
    """Print an answer: the result to standard output, a warning or a refusal to standard error."""
    if as_json:
        import msgspec

        print_line(msgspec.json.encode(answer).decode())
        return
    if answer.warning:
        print_stderr(answer.warning)
    if answer.outcome == "refused":
        print_stderr(f"refused after iteration {answer.iteration}: {answer.reason}")
    elif [*answer.result] == ["text"]:
        print_line(answer.result_text)
    else:
        print_line(f"applied after iteration {answer.iteration}: {answer.result_text}".removesuffix(": "))


def _no_answer(command: str, error: Exception, *, withdrawn: bool, lives: bool | None) -> str:
    fields = {"command": command, "outcome": "no answer", "reason": str(error)}
    return json.dumps({**fields, "withdrawn": withdrawn, "lives": lives})


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _seconds(text: str) -> float:
    """Convert the argument of --timeout to a number of seconds.

    Raises:
        argparse.ArgumentTypeError: the argument is not a number above 0 and below 1e9.
    """
    number = 0.0
    with suppress(ValueError):
        number = float(text)
    if not 0.0 < number < 1e9:  # Python refuses waits that are much longer
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return number
