"""Implement `eventloop evaluate`, which validates the checkpoints of a run and reports the metrics to it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.cli.output_file import failed, print_stderr
from eventloop.util.errors import CheckpointError, WorkDirInUseError
from eventloop.util.terminal import print_line

if TYPE_CHECKING:  # slow imports, which --help does not need
    from eventloop.sidecar.evaluator import Evaluator

DESCRIPTION = """\
Builds the trainer by the function that also builds it for the training, loads the weights of each durable
checkpoint of RUN, oldest first, validates, and prints the metrics. A run that lives gets them at once: its
writers log them at the step of the checkpoint, and save_best, early stopping and schedules use them. They
wait in RUN/inbox for a run that is resumed later. A checkpoint is validated once, also if the command is
repeated. Nothing else is written into RUN, and nothing is removed."""
EXIT_CODES = """\
exit codes: 0 done; 1 a checkpoint could not be read, or the function or the validation raised an error (with
its traceback); 2 bad input, or another evaluator of RUN lives; 130 stopped by Ctrl-C,
143 by SIGTERM"""


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "evaluate",
        help="validate the checkpoints of a run, also while it trains",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of the run")
    parser.add_argument(
        "build",
        metavar="MODULE:FUNCTION",
        help="the function that builds the trainer, without arguments; also path/to/file.py:function",
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on with new checkpoints, and end with the run (exit code 0)"
    )
    parser.add_argument("--device", metavar="D", help="the device, such as cuda:1 (default: the function's)")
    parser.add_argument(
        "--checkpoints",
        nargs="+",
        default=["all"],
        metavar="newest|all|best|NAME",
        help="which ones (default: all); those that are named, such as epoch_3, are validated again",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error in the input"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    from eventloop.sidecar.evaluator import lower_priority, owning_evaluations

    try:
        _check(options)
        lower_priority()
        with owning_evaluations(options.run):
            return _evaluate(options)
    except (_InputError, CheckpointError, WorkDirInUseError) as error:
        return failed(options, error, 2)


class _InputError(Exception):
    """Raised for bad input, which is shown without a traceback, unlike an error of the user's function."""


def _check(options: argparse.Namespace) -> None:
    """Refuse a run that does not exist, a bad choice of checkpoints, and a function that is not found."""
    from eventloop.sidecar.building import find_function
    from eventloop.sidecar.outstanding import ALL, BEST, NEWEST

    if not options.run.is_dir():
        raise _InputError(f"no directory at {options.run}: give the directory of a run")
    keywords = {ALL, NEWEST, BEST}.intersection(options.checkpoints)
    if keywords and len(options.checkpoints) > 1:
        raise _InputError(
            f"--checkpoints takes {keywords.pop()!r} alone, got {' '.join(options.checkpoints)}"
        )
    try:
        find_function(options.build)
    except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        raise _InputError(str(error)) from error


def _evaluate(options: argparse.Namespace) -> int:
    """Run the evaluator, and return the exit status: 130 if it was stopped, 1 if a validation has failed."""
    evaluator = _evaluator(options)
    evaluator.run(follow=options.follow)
    if evaluator.known:
        print_stderr(_validated_before(evaluator.known))
    if evaluator.stopped:
        return 130
    return 1 if evaluator.failed else 0


def _validated_before(names: Sequence[str]) -> str:
    """Return a sentence on checkpoints that were validated before, with the way to validate them again."""
    if len(names) == 1:
        return f"1 checkpoint was validated before: --checkpoints {names[0]}, its name, validates it again"
    return (
        f"{len(names):,} checkpoints were validated before: a name, such as --checkpoints {names[-1]}, "
        "validates one again"
    )


def _evaluator(options: argparse.Namespace) -> Evaluator:
    """Return the evaluator of the options; its module imports torch, which other commands do not need."""
    from eventloop.sidecar.evaluator import Evaluator

    return Evaluator(
        options.run, options.build, device=options.device, choice=options.checkpoints, show=print_line
    )
