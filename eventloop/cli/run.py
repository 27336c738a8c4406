"""Implement `eventloop run`, which runs a script of another engine with a bus, and shows its costs."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import Any

import msgspec

from eventloop.autoattach.options import RunOptions
from eventloop.cli.output_file import failed, print_stderr
from eventloop.util.printable import printable

DESCRIPTION = """\
Runs a script of Lightning, Transformers, ignite or MMEngine as `python script.py` does, with a bridge of
eventloop attached to each trainer that it makes; the script is not changed. Writers record the run. At its
end the costs of each callback, hook and handler are printed to standard error; costs.json has them, too.

Options of the command come before the script; everything after it belongs to the script. A training on
several processes is started as ever: torchrun --nproc-per-node 2 -m eventloop run script.py"""
SCRIPT_HINT = "; arguments of the script come after it: eventloop run SCRIPT ARGUMENTS"
EXIT_CODES = """\
exit codes: those of the script, whose errors are shown as by Python; 2 bad input"""


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="run a script of Lightning, Transformers, ignite or MMEngine, and show its costs",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--writers NAMES] [--work-dir DIR] [--no-measure] [--traceback] "
        "[-m] SCRIPT | MODULE [ARGUMENT ...]",
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT | MODULE", help="the script; its arguments follow")
    parser.add_argument(
        "--writers",
        default="jsonl",
        metavar="NAMES",
        help="with commas between them: console, csv, eventlog, imagefile, jsonl, mlflow, notify, "
        "opentelemetry, tensorboard, trackio, visdom, wandb, names of classes (default: jsonl)",
    )
    parser.add_argument(
        "--work-dir",
        metavar="DIR",
        help="directory of the files (default: that of the script's trainer, or else a new one under runs/); "
        "further trainers of the script use trainer-2 and so on within it",
    )
    parser.add_argument(
        "--no-measure", action="store_true", help="do not measure the callbacks of the script's trainer"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error in the input"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code, or raise an error of the script unchanged."""
    try:
        bridge_options = _bridge_options(options)
        folder = mkdtemp(prefix="eventloop_run_")
    except (ImportError, OSError, ValueError) as error:
        return failed(options, error, 2)
    try:
        return _run(options, msgspec.structs.replace(bridge_options, summaries=folder))
    finally:
        if os.getpid() == bridge_options.pid:  # a process that the script forked gets here, too
            shutil.rmtree(folder, ignore_errors=True)


def _run(options: argparse.Namespace, bridge_options: RunOptions) -> int:
    """Run the script with bridges, and print the summaries of its runs, also after an error."""
    from eventloop.autoattach.attacher import Attacher
    from eventloop.autoattach.hosts import attached
    from eventloop.autoattach.script import run_main

    attacher = Attacher(bridge_options)
    attacher.options.put(os.environ)
    succeeded = False
    try:
        with attached(attacher):
            run_main(options.script, options.arguments, module=options.module)
        succeeded = True
    except SystemExit as ended:
        succeeded = not ended.code
        raise
    finally:
        if os.getpid() == bridge_options.pid:
            _report(options.script, attacher, succeeded=succeeded)
    return 0


def _bridge_options(options: argparse.Namespace) -> RunOptions:
    """Check the command's options, and return the options for the bridges.

    Raises:
        ImportError: no engine is installed, or a writer's library is missing.
        OSError: the script does not exist, or `--work-dir` cannot be written.
        ValueError: a writer is unknown, or the script is not a Python file.
    """
    from eventloop.autoattach.hosts import any_installed
    from eventloop.autoattach.script import check_script

    check_script(options.script, module=options.module)
    if not any_installed():
        raise ImportError(
            "expected one of Lightning, Transformers, ignite and MMEngine, got none installed: pip install "
            "lightning, or drive a loop of your own with eventloop.bridges.DrivenTrainer"
        )
    writers = tuple(_writer(name.strip()) for name in options.writers.split(",") if name.strip())
    if options.work_dir is not None:
        _make_dir(options.work_dir)
    return RunOptions(writers, options.work_dir, not options.no_measure)


def _make_dir(work_dir: str) -> None:
    """Create the directory of the run's files, and check that files can be written in it.

    Raises:
        OSError: the directory cannot be created or written; the text names it.
    """
    # `make_work_dir` is not used here, because it would import torch before the script does
    try:
        Path(work_dir).mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=work_dir).close()
    except OSError as error:
        raise type(error)(
            f"--work-dir must be a directory that can be written, got {work_dir}: {error.strerror}"
        ) from error


def _writer(name: str) -> str:
    """Return the class name of a writer, after checking that it can be created.

    Raises:
        ImportError: the writer's library is not installed.
        ValueError: the writer is unknown.
    """
    from eventloop.registry import WRITERS
    from eventloop.util.suggest import suggest

    class_names = {class_name.removesuffix("Writer").lower(): class_name for class_name in WRITERS.names()}
    class_name = class_names.get(name.lower().removesuffix("writer"))
    if class_name is None:
        raise ValueError(f"--writers has an unknown writer {name!r}{suggest(name, [*class_names])}")
    writer = WRITERS.find(class_name)  # not `find_class`, which imports the hooks, and so torch
    assert writer is not None
    writer()
    return class_name


def _report(script: str, attacher: Any, *, succeeded: bool) -> None:
    """Print the summaries of the script's runs, on the first rank alone.

    If there was no run, print the reason, or the code to add to a script without a supported engine.
    """
    if sys.stderr is None or os.environ.get("RANK", "0") != "0":
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    attacher.add_child_runs()
    for directory, summary in attacher.summaries.items():
        sys.stderr.write(printable(f"\n{summary}\n"))
        shown = os.path.relpath(directory) if directory.is_relative_to(Path.cwd()) else str(directory)
        print_stderr(f"the run is in {shown}; each callback: eventloop report --all {shlex.quote(shown)}")
    for host, problem in attacher.problems.items():
        print_stderr(f"{host} ran without a bus: {problem}")
    if attacher.summaries or attacher.problems or not succeeded:
        return
    if attacher.hosts:
        print_stderr(f"no run of {' or '.join(sorted(attacher.hosts))} ended, so there is no summary")
    else:
        _advise(script, attacher)


def _advise(script: str, attacher: Any) -> None:
    """Print how a script without a run of a supported engine gets a summary."""
    from eventloop.autoattach.written_loop import HAS_A_BRIDGE, HAS_A_TRAINER, advice

    if attacher.bridged:
        print_stderr(HAS_A_BRIDGE.format(script=script, hosts=" and ".join(sorted(attacher.bridged))))
    elif "eventloop.training.trainer" in sys.modules and not attacher.imports_bridges:
        print_stderr(HAS_A_TRAINER.format(script=script))
    else:
        sys.stderr.write(printable(f"eventloop: {advice(script)}"))
