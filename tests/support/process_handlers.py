"""What the tests run in worker processes; imported there by name. Each writes what it saw to the file LOG."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from time import sleep
from typing import Any

from eventloop.events import AfterTrainIter, Event, Timed
from eventloop.events.encoding_errors import BadEvent, Unencodable


class MealServed(Event):
    """A user's event."""

    dish: str
    place: Path = Path()


def log(line: object) -> None:
    """One line, whole even when the worker is killed."""
    with open(os.environ["LOG"], "a", encoding="utf-8", buffering=1) as file:
        file.write(f"{line}\n")


def note(event: AfterTrainIter) -> None:
    log(event.iter)


def note_slowly(event: AfterTrainIter) -> None:
    log(event.iter)
    sleep(0.02)


def note_batch(events: list[AfterTrainIter]) -> None:
    log(" ".join(str(event.iter) for event in events))


def note_times(events: list[Timed]) -> None:
    for when, event in events:
        log(f"{type(event).__name__} {when!r}")


def note_even(events: AfterTrainIter | list[AfterTrainIter]) -> None:
    several = events if isinstance(events, list) else [events]
    for event in several:
        if event.iter % 2 == 0:
            log(event.iter)
    bad = [BadEvent("after_train_iter", "iter", "it is odd") for event in several if event.iter % 2]
    if bad:
        raise Unencodable(bad, of=len(several))


def note_process(event: Event) -> None:
    modules = [name for name in ("torch", "numpy", "__mp_main__") if name in sys.modules]
    log(" ".join(map(str, (os.getpid(), os.getppid(), os.nice(0), *modules))))


def note_lunch(event: MealServed) -> None:
    log(f"{type(event).__module__} {event.dish} {event.place}")


def note_anything(event: Event) -> None:
    log(f"{type(event).__name__} {event}")


def note_stdin(event: Event) -> None:
    log(repr(sys.stdin.read()))


def speak(event: AfterTrainIter) -> None:
    print(f"heard {event.iter}")  # noqa: T201


class Chosen(Exception):
    """An exception that pickles."""


class Stubborn(Exception):
    """An exception that does not come back from a pickle."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def fail(event: AfterTrainIter) -> None:
    log(event.iter)
    raise Chosen(f"no to {event.iter}")


def fail_over_a_path(event: AfterTrainIter) -> None:
    raise Stubborn(os.fsdecode(b"no caf\xe9"), "never")


def leave(event: AfterTrainIter) -> None:
    sys.exit("goodbye")


def hang(event: AfterTrainIter) -> None:
    log(event.iter)
    threading.Event().wait()


def hang_at_two(event: AfterTrainIter) -> None:
    log(event.iter)
    if event.iter == 2:
        threading.Event().wait()


def die_at_two(event: AfterTrainIter) -> None:
    log(event.iter)
    if event.iter == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def flushed() -> None:
    log("flushed")


def closed() -> None:
    log("closed")


def fail_to_close() -> None:
    raise Chosen("not closed")


class Refuses:
    """Cannot be made again."""

    def __call__(self, event: Event) -> None:
        pass

    def __reduce__(self) -> Any:
        return no_such, ()


def no_such() -> None:
    raise Chosen("cannot be made in a worker")


class DiesWhenTold(Refuses):
    """Kills each process it is made in, once the file LOG says so."""

    def __reduce__(self) -> Any:
        return die_when_told, ()


def die_when_told() -> None:
    while not Path(os.environ["LOG"]).read_text(encoding="utf-8"):
        sleep(0.002)
    os._exit(9)


def spiky(event: Event) -> None:
    """Every twentieth takes long."""
    sleep(0.05 if getattr(event, "iter", 0) % 20 == 19 else 0.0)
