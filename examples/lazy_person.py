"""Two lazy days: an event that carries facts, and asking whether anybody listens.

    python examples/lazy_person.py

A lazy person does nothing alone: whoever wants Tom to watch something subscribes to `watch_tv` on Tom's bus. After
the example of the document the project was founded on, with a clock that does not make you wait.
"""

from __future__ import annotations

from eventloop.bus import Bus
from eventloop.events import Event


class WatchTV(Event):
    """The television could go on now. An event holds facts, read-only, and is built by keyword."""

    name: str


class HaveDinner(Event):
    """It is time for dinner."""

    name: str


class Clock:
    """Counts seconds without waiting for them."""

    def __init__(self, now: float) -> None:
        self.now = now

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        self.now += seconds


class LazyPerson:
    """Lives by what others subscribed to `bus`; each person has a bus of their own."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.clock = clock
        self.bus = Bus()

    def enjoy_a_lazy_day(self) -> None:
        """Get up, watch television, eat, sleep."""
        print(f"{self.name} get up at:{self.clock.now}")
        self.clock.sleep(3)
        if self.bus.wants(WatchTV):  # without a subscriber the event is not even built
            self.bus.emit(WatchTV(name=self.name))
        else:
            print("no tv to watch")
        self.clock.sleep(3)
        if self.bus.wants(HaveDinner):
            self.bus.emit(HaveDinner(name=self.name))
        else:
            print("nothing to eat at dinner")
        self.clock.sleep(3)
        print(f"{self.name} go to sleep at:{self.clock.now}")


def watch_daydayup(event: WatchTV) -> None:
    print(f"{event.name} : The program ---day day up--- is funny!!!")


def watch_happyfamily(event: WatchTV) -> None:
    print(f"{event.name} : The program ---happy family--- is boring!!!")


def eat_meat(event: HaveDinner) -> None:
    print(f"{event.name} : The meat is nice!!!")


def eat_hamburger(event: HaveDinner) -> None:
    print(f"{event.name} : The hamburger is not so bad!!!")


def main() -> None:
    """Tom has a day, then Jerry."""
    clock = Clock(1598599060.0)
    tom, jerry = LazyPerson("Tom", clock), LazyPerson("Jerry", clock)
    tom.bus.subscribe(watch_daydayup, WatchTV)
    tom.bus.subscribe(eat_meat, HaveDinner)
    jerry.bus.subscribe(watch_happyfamily, "watch_tv")  # the name serves as well as the class
    jerry.bus.subscribe(eat_hamburger, "have_dinner")
    for person in (tom, jerry):
        person.enjoy_a_lazy_day()


if __name__ == "__main__":
    main()
