"""The command line: `eventloop demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eventloop import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return _demo(options)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        if options.traceback:
            raise
        print(f"eventloop: {error} (--traceback shows where)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eventloop: ended by Ctrl-C", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace) -> int:
    from eventloop import demo  # imports torch, hooks and writers: not for --help

    return demo.run(
        options.work_dir,
        epochs=options.epochs,
        device=options.device,
        seed=options.seed,
        resume=options.resume,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eventloop", description="A PyTorch training engine built as an event bus."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small CNN on real handwritten digits")
    demo.add_argument(
        "--epochs", type=_at_least_one, default=10, help="passes over the data (default: %(default)s)"
    )
    demo.add_argument("--work-dir", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    demo.add_argument(
        "--device", default="auto", help='"cpu", "cuda", ... (default: the accelerator if there is one)'
    )
    demo.add_argument("--seed", type=int, default=0, help="of weights and shuffling (default: %(default)s)")
    demo.add_argument(
        "--resume", nargs="?", const="auto", default=None, metavar="CHECKPOINT",
        help="continue the run in --work-dir, from its newest checkpoint or the one given",
    )  # fmt: skip
    demo.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
