"""What the tests run in worker processes; imported there by name. Each writes what it saw to the file LOG."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from time import process_time, sleep
from typing import Any

from eventloop.events import AfterTrainIter, Event, Timed
from eventloop.events.encoding_errors import BadEvent, Unencodable

logger = logging.getLogger("eventloop")


class MealServed(Event):
    """A user's event."""

    dish: str
    place: Path = Path()


def log(line: object) -> None:
    """One line, whole even when the worker is killed."""
    with open(os.environ["LOG"], "a", encoding="utf-8", buffering=1) as file:
        file.write(f"{line}\n")


def record(event: AfterTrainIter) -> None:
    log(event.iter)


def record_slowly(event: AfterTrainIter) -> None:
    log(event.iter)
    sleep(0.02)


def record_batch(events: list[AfterTrainIter]) -> None:
    log(" ".join(str(event.iter) for event in events))


def record_times(events: list[Timed]) -> None:
    for when, event in events:
        log(f"{type(event).__name__} {when!r}")


def record_even(events: AfterTrainIter | list[AfterTrainIter]) -> None:
    several = events if isinstance(events, list) else [events]
    for event in several:
        if event.iter % 2 == 0:
            log(event.iter)
    bad = [BadEvent("after_train_iter", "iter", "it is odd") for event in several if event.iter % 2]
    if bad:
        raise Unencodable(bad, of=len(several))


def record_process(event: Event) -> None:
    modules = [name for name in ("torch", "numpy", "__mp_main__") if name in sys.modules]
    log(" ".join(map(str, (os.getpid(), os.getppid(), os.nice(0), *modules))))


def record_lunch(event: MealServed) -> None:
    log(f"{type(event).__module__} {event.dish} {event.place}")


def record_anything(event: Event) -> None:
    log(f"{type(event).__name__} {event}")


def record_stdin(event: Event) -> None:
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


def exit_process(event: AfterTrainIter) -> None:
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


def hang_at_the_close() -> None:
    threading.Event().wait()


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
        return die_when_logged, ()


class ComputesWhenMade(Refuses):
    """Takes a processor in the worker it is made in until it may begin: a long import."""

    def __reduce__(self) -> Any:
        return compute_when_made, ()


def compute_when_made() -> Any:
    compute()
    return record


class HangsWhenMade(Refuses):
    """Waits in the worker it is made in for what never comes."""

    def __reduce__(self) -> Any:
        return hang_when_made, ()


def hang_when_made() -> None:
    log("hangs")
    threading.Event().wait()


def compute(event: Event | None = None) -> None:
    """Take a processor until there is a file with the name of LOG and ".go"; make one with ".computes" before."""
    Path(f"{os.environ['LOG']}.computes").touch()
    while not Path(f"{os.environ['LOG']}.go").exists():
        pass


class BurnsWhenMade(Refuses):
    """Takes 2 s of a processor in the worker it is made in."""

    def __reduce__(self) -> Any:
        return burn_when_made, ()


def burn_when_made() -> Any:
    while process_time() < 2.0:
        pass
    return record


def die_when_logged() -> None:
    while not Path(os.environ["LOG"]).read_text(encoding="utf-8"):
        sleep(0.002)
    os._exit(9)


def spiky(event: Event) -> None:
    """Every twentieth takes long."""
    sleep(0.05 if getattr(event, "iter", 0) % 20 == 19 else 0.0)


def warn(event: AfterTrainIter) -> None:
    logger.warning("iteration %d", event.iter)


def warn_at_all_levels(event: AfterTrainIter) -> None:
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(level, "a line")


def warn_of_an_error(event: AfterTrainIter) -> None:
    try:
        raise Chosen(os.fsdecode(b"no caf\xe9"))
    except Chosen as error:
        logger.exception("100%% sure of %s", error)  # noqa: TRY401


def warn_from_threads(event: AfterTrainIter) -> None:
    """Each line is longer than what a pipe takes at once."""

    def log_lines(name: str) -> None:
        for i in range(50):
            logger.warning("%s %d %s", name, i, "x" * 5000)

    threads = [threading.Thread(target=log_lines, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def warn_and_die(event: AfterTrainIter) -> None:
    logger.warning("the last words on %d", event.iter)
    os._exit(9)


def warn_in_a_fork(event: AfterTrainIter) -> None:
    child = os.fork()
    if not child:
        logger.warning("from the fork")
        os._exit(0)
    os.waitpid(child, 0)


def warn_wrongly(event: AfterTrainIter) -> None:
    logger.warning("%d and %d", event.iter)  # noqa: PLE1206


def warn_at_the_close() -> None:
    logger.warning("closes")
    atexit.register(logger.warning, "after the close")


class WarnsWhenMade(Refuses):
    """Logs while the worker imports its handler."""

    def __reduce__(self) -> Any:
        return warn_when_made, ()


def warn_when_made() -> Any:
    logger.warning("being made")
    return record
