"""Implement `eventloop init`, which writes a training script to start from. It may import every package."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from eventloop.cli.output_file import failed, print_stderr

TEMPLATE = Path(__file__).with_name("training_template.py")
NEEDS = "torchmetrics tensorboard rich"
"""The packages that the script imports in addition to those that eventloop depends on."""


def add_parser(commands: Any) -> None:
    """Add the command's parser to the parser of `eventloop`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "init",
        help="write a small, complete training script to start from",
        epilog="exit codes: 0 done, 2 the file exists, or cannot be written",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        default=Path("train.py"),
        metavar="FILE",
        help="the name of the new script (default: train.py)",
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    file: Path = options.file
    try:
        with file.open("x", encoding="utf-8") as script:
            script.write(TEMPLATE.read_text(encoding="utf-8").replace("train.py", file.name))
    except FileExistsError:
        return failed(
            options, ValueError(f"{file} exists, and is not replaced: give the name of a new file"), 2
        )
    except OSError as error:
        return failed(options, error, 2)
    print_stderr(f"{file} is written: pip install {NEEDS}, then python {file}")
    return 0
