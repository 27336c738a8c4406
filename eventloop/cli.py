"""The command line: `eventloop demo`, `eventloop replay`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from eventloop import __version__, replay_command

LAST_WORDS_SECONDS = 0.2


EXIT_CODES = """\
exit codes: 0 done, 1 an error while training (with its traceback), 2 bad input (one line), 130 ended by Ctrl-C:
the first stops after the iteration, with a checkpoint and the summary; a second one ends at once"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, see `EXIT_CODES`. An error in the middle of a training is raised.
    A second Ctrl-C ends the process from here: whatever hangs in another thread, it hangs no longer."""
    options = _parser().parse_args(arguments)
    try:
        return replay_command.run(options) if options.command == "replay" else _demo(options)
    except KeyboardInterrupt:
        _end_at_once(130)
        return 130


def _demo(options: argparse.Namespace) -> int:
    try:
        from eventloop import demo  # imports torch, hooks and writers: not for --help

        trainer = demo.prepare(
            options.work_dir,
            epochs=options.epochs,
            device=options.device,
            seed=options.seed,
            resume=options.resume,
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        if options.traceback:
            raise
        print(f"eventloop: {error} (--traceback shows where)", file=sys.stderr)
        return 2
    return 0 if demo.run(trainer) else 130


def _end_at_once(code: int) -> None:
    """End the process without the interpreter's own ending, which waits for other threads' locks and ends: a writer
    that hangs in a full pipe has the lock of standard output, and the interpreter would abort over it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    last_words = threading.Thread(target=_last_words, daemon=True)
    last_words.start()
    last_words.join(LAST_WORDS_SECONDS)
    os._exit(code)


def _last_words() -> None:
    with suppress(OSError, ValueError):
        print("eventloop: ended by Ctrl-C", file=sys.stderr, flush=True)
        sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eventloop", description="A PyTorch training engine built as an event bus."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small CNN on real handwritten digits", epilog=EXIT_CODES)
    demo.add_argument(
        "--epochs", type=_at_least_one, default=10, help="passes over the data (default: %(default)s)"
    )
    demo.add_argument("--work-dir", type=Path, help="default: runs/demo, or the next free name")
    demo.add_argument(
        "--device", default="auto", help='"cpu", "cuda", ... (default: the accelerator if there is one)'
    )
    demo.add_argument("--seed", type=int, default=0, help="of weights and shuffling (default: %(default)s)")
    demo.add_argument(
        "--resume", nargs="?", const="auto", default=None, metavar="CHECKPOINT",
        help="continue the run in --work-dir, or the one saved last, from its newest checkpoint or the one given",
    )  # fmt: skip
    demo.add_argument("--traceback", action="store_true", help="show where bad input was found")
    replay_command.add_parser(commands)
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
