"""What the commands share: reading a number, and writing to somebody who may have stopped reading."""

from __future__ import annotations

import argparse
import os
import sys


def at_least_one(text: str) -> int:
    """An argument that is a positive number.

    Raises:
        argparse.ArgumentTypeError, ValueError: it is none.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def say(text: str) -> bool:
    """Write a line, now; False when nobody is there to read it any more, as in `eventloop demo | head`."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return False
    return True


def drop_output() -> None:
    """Send what is still to come nowhere, or the interpreter fails over it when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
