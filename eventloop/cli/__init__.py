"""Implement the command line `eventloop COMMAND`.

Start with `main`. Each command is a module, or a package such as `watch`, with functions `add_parser` and
`run`. `demo` is a complete example of a training, and `listing_text` formats checkpoints. May import every
package. Modules that need torch are imported when a command runs, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from eventloop._version import __version__
from eventloop.cli import checkpoints as checkpoints_command
from eventloop.cli import evaluate as evaluate_command
from eventloop.cli import init as init_command
from eventloop.cli import plan as plan_command
from eventloop.cli import replay as replay_command
from eventloop.cli import report as report_command
from eventloop.cli import run as run_command
from eventloop.cli import tell as tell_command
from eventloop.cli import trace as trace_command
from eventloop.cli import watch as watch_command
from eventloop.cli.output_file import failed
from eventloop.cli.script_arguments import split
from eventloop.util.suggest import near, suggest
from eventloop.util.terminal import OutputError, at_least_one

MESSAGE_SECONDS = 0.2
"""How long, in seconds, a command that Ctrl-C ends waits until its last message is printed."""

EXIT_CODES = """\
exit codes: 0 done; 1 an error while training (with its traceback); 2 bad input, or the output cannot be
written; 130 stopped by Ctrl-C: the first stops after the iteration, with a checkpoint and the
summary, a second one ends at once; 143 stopped by SIGTERM and 138 by SIGUSR1, as by the first Ctrl-C; 141
done, but the reader of the output has left"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; raise an error of a training.

    A Ctrl-C that the command itself does not handle, as the second one in a training, ends the process at
    once, even if other threads wait.
    """
    own, script_arguments = split(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parsers()
    if own and not own[0].startswith("-") and own[0] not in commands:
        parser.error(f"there is no command {own[0]!r}{suggest(own[0], [*commands])}")
    options, unknown = parser.parse_known_args(own)
    if unknown:
        hint = _nearest_option(unknown, commands[options.command])
        hint = plan_command.script_hint(options.file, unknown) if options.command == "plan" else hint
        hint = run_command.SCRIPT_HINT if options.command == "run" else hint
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.arguments = script_arguments
    if options.command == "run":
        return run_command.run(options)  # its errors and Ctrl-C are handled as Python does for the script
    try:
        return _COMMANDS[options.command](options)
    except OutputError as error:
        return failed(options, error, 2)
    except KeyboardInterrupt:
        _end_at_once(130)
        return 130


def _demo(options: argparse.Namespace) -> int:
    """Run `eventloop demo`; return its exit code, or raise an error of the training."""
    try:
        from eventloop.cli import demo  # here, because it imports torch, which --help does not need

        trainer = demo.prepare(
            options.work_dir,
            epochs=options.epochs,
            device=options.device,
            seed=options.seed,
            resume=options.resume,
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        return failed(options, error, 2)
    return demo.run(trainer)


def _end_at_once(code: int) -> None:
    """End the process without the interpreter's shutdown, which would wait for locks of other threads.

    A thread that is blocked in a write to a full pipe holds the lock of standard output; at its shutdown the
    interpreter would abort because of it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message = threading.Thread(target=_print_ended, daemon=True)
    message.start()
    message.join(MESSAGE_SECONDS)
    os._exit(code)


def _print_ended() -> None:
    with suppress(OSError, ValueError):
        print("eventloop: ended by Ctrl-C", file=sys.stderr, flush=True)
        sys.stdout.flush()


def _nearest_option(unknown: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Return a hint at the option that is spelled most like the first unknown argument, or ""."""
    options = re.findall(r"--[\w-]+", command.format_usage())
    # a high threshold, because any two options are similar by their dashes
    return near(unknown[0].partition("=")[0], options, least=0.8)


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of `eventloop`, and the parsers of its commands by name."""
    parser = argparse.ArgumentParser(
        prog="eventloop", description="A PyTorch training engine built as an event bus."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small CNN on real handwritten digits", epilog=EXIT_CODES)
    demo.add_argument(
        "--epochs",
        type=at_least_one,
        help="passes over the data (default: 10, or the number of the resumed run)",
    )
    demo.add_argument(
        "--work-dir", type=Path, help="the directory of the run (default: runs/demo, or the next free name)"
    )
    demo.add_argument(
        "--device", default="auto", help='"cpu", "cuda", ... (default: the accelerator if there is one)'
    )
    demo.add_argument(
        "--seed", type=int, help="seed of the weights and of the shuffling of a new run (default: 0)"
    )
    demo.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        default=None,
        metavar="auto|best|PATH|NAME",
        help="continue the run in --work-dir, or the run saved last: from its newest whole checkpoint "
        "(auto, also without a value), from its best one, or from the checkpoint with a path or a name, such "
        "as iter_50",
    )
    demo.add_argument("--traceback", action="store_true", help="show the traceback of an error in the input")
    init_command.add_parser(commands)
    checkpoints_command.add_parser(commands)
    evaluate_command.add_parser(commands)
    plan_command.add_parser(commands)
    replay_command.add_parser(commands)
    report_command.add_parser(commands)
    run_command.add_parser(commands)
    tell_command.add_parser(commands)
    trace_command.add_parser(commands)
    watch_command.add_parser(commands)
    return parser, commands.choices


_COMMANDS = {
    "demo": _demo,
    "init": init_command.run,
    "checkpoints": checkpoints_command.run,
    "evaluate": evaluate_command.run,
    "plan": plan_command.run,
    "replay": replay_command.run,
    "report": report_command.run,
    "tell": tell_command.run,
    "trace": trace_command.run,
    "watch": watch_command.run,
}
