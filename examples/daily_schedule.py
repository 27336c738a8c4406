"""A day with three habits: events of your own, and the order in which several handlers hear one of them.

    python examples/daily_schedule.py

The day only announces its moments; running, working and sleeping each subscribe to those they care about, and a
new habit changes nothing in the day. This is the schedule of the document the project was founded on (its
spelling of "breakfirst" included), which had to call every method of every hook; a bus calls who subscribed.
"""

from __future__ import annotations

from eventloop.bus import Bus
from eventloop.events import Event
from eventloop.events.base import event_name
from eventloop.events.priority import Priority


class BeforeBreakfirst(Event):
    """Subclassing `Event` declares it: from here on it is also known as "before_breakfirst"."""


class AfterBreakfirst(Event): ...


class BeforeLunch(Event): ...


class AfterLunch(Event): ...


class BeforeDinner(Event): ...


class AfterDinner(Event): ...


class AfterFinishWork(Event): ...


def say(event: Event, what: str) -> None:
    """Print what is done at a moment of the day."""
    print(f"{event_name(type(event))}:{what}")


# There each new hook went to the head of the list, so the one registered last ran first. Here the order is said:
# the lower priority runs first, whoever registers when, and `print(bus)` shows it.
SLEEPING, WORKING, RUNNING = Priority.HIGH, Priority.NORMAL, Priority.LOW


def start_running(bus: Bus) -> None:
    """Run twice a day."""

    @bus.on(BeforeBreakfirst, priority=RUNNING)
    def run_in_the_morning(event: Event) -> None:
        say(event, "吃早饭之前跑步30分钟")

    @bus.on(BeforeDinner, priority=RUNNING)
    def run_in_the_evening(event: Event) -> None:
        say(event, "吃晚饭之前跑步60分钟")


def start_working(bus: Bus) -> None:
    """Read the news, then work after every meal."""
    plans = {
        BeforeBreakfirst: "吃早饭之前看新闻30分钟",
        AfterBreakfirst: "吃早饭后工作3个小时",
        AfterLunch: "吃完午饭工作3个小时",
        AfterDinner: "晚饭之后工作60分钟",
    }

    @bus.on(*plans, priority=WORKING)  # one handler may hear several events
    def work(event: Event) -> None:
        say(event, plans[type(event)])


def start_sleeping(bus: Bus) -> None:
    """A nap, and the night."""

    @bus.on("after_lunch", priority=SLEEPING)  # by name; a misspelled one is an error on this line
    def take_a_nap(event: Event) -> None:
        say(event, "吃完午饭午休60分钟")

    @bus.on("after_finish_work", priority=SLEEPING)
    def go_to_bed(event: Event) -> None:
        say(event, " 去睡觉了！！！")


def live_a_day(bus: Bus) -> None:
    """Announce the moments of a day. Nobody here cares for `before_lunch`, and so nothing happens."""
    print("开始启动我的一天")
    bus.emit(BeforeBreakfirst())
    bus.emit(AfterBreakfirst())
    bus.emit(BeforeLunch())
    bus.emit(AfterLunch())
    bus.emit(BeforeDinner())
    bus.emit(AfterDinner())
    bus.emit(AfterFinishWork())
    print("---睡觉---")


def main() -> None:
    """Take up three habits and live."""
    bus = Bus()
    start_running(bus)
    start_working(bus)
    start_sleeping(bus)
    live_a_day(bus)


if __name__ == "__main__":
    main()
