"""ConsoleWriter without a terminal: its lines. The progress bar is in test_progress.py."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import pytest

from eventloop.bus import Bus
from eventloop.bus.subscription import SubscriptionStats
from eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    BeforeRun,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    EventsDropped,
    HandlerFailed,
    PreemptionRequested,
    ScalarsLogged,
    SlowHandler,
    StopRequested,
    TextLogged,
)
from eventloop.writers import ConsoleWriter
from eventloop.writers.lines import notice

Attach = Callable[..., Bus]
Account = Callable[[Bus], SubscriptionStats]


class Console:
    """A console on a StringIO, behind a real bus."""

    def __init__(self, attach: Attach, interval: int = 10, **facts: Any) -> None:
        self.stream = io.StringIO()
        self.bus = attach(ConsoleWriter(interval, stream=self.stream), **facts)

    def lines(self, *events: Event) -> list[str]:
        """The lines after `events`."""
        for event in events:
            self.bus.emit(event)
        self.bus.flush()
        return self.stream.getvalue().splitlines()


def train(step: int, epoch: int = 0, max_epochs: int | None = 10, **scalars: float) -> ScalarsLogged:
    return logged(scalars, step, epoch, max_epochs)


def logged(
    scalars: dict[str, float], step: int, epoch: int = 0, max_epochs: int | None = 10
) -> ScalarsLogged:
    return ScalarsLogged(
        step=step, iter=step - 1, epoch=epoch, max_iters=1800, max_epochs=max_epochs, scalars=scalars
    )


def test_a_line_of_training(attach: Attach) -> None:
    """Position, learning rate, time left, speed, the other values, and the times."""
    console = Console(attach, iters_per_epoch=180)

    (line,) = console.lines(train(220, 1, loss=0.12341, data_time=0.0001, time=0.001, lr=0.001, acc=0.5))

    assert line == (
        "Epoch(train)  [2][ 40/180]  lr: 1.0000e-03  eta: 0:00:02   1000 it/s    loss: 0.1234      acc: 0.5000      "
        "time: 0.0010   data_time: 0.0001"
    )


def test_a_line_of_a_run_counted_in_iterations(attach: Attach) -> None:
    """Without epochs the position is the iteration."""
    console = Console(attach)

    (line,) = console.lines(train(40, max_epochs=None, loss=0.5))

    assert line == "Iter(train) [  40/1800]  loss: 0.5000"


def test_an_epoch_of_unknown_length_shows_the_iteration(attach: Attach) -> None:
    """A loader without a length has no total to show."""
    console = Console(attach)

    (line,) = console.lines(train(40, 2, loss=0.5))

    assert line == "Epoch(train)  [3][40]  loss: 0.5000"


def test_a_line_of_validation(attach: Attach) -> None:
    """The epoch of a validation is the number of completed ones; times come last."""
    console = Console(attach)
    scalars = {"time": 0.01, "accuracy": 0.98, "loss": 0.07}

    (line,) = console.lines(ScalarsLogged(mode="val", step=360, epoch=2, max_epochs=10, scalars=scalars))

    assert line == "Epoch(val)  [2]  accuracy: 0.9800      loss: 0.0700      time: 0.0100"


def test_a_line_of_a_test_without_epochs(attach: Attach) -> None:
    """There the position is the step."""
    console = Console(attach)

    (line,) = console.lines(ScalarsLogged(mode="test", step=360, scalars={"accuracy": 0.98}))

    assert line == "Iter(test) [360]  accuracy: 0.9800"


def test_each_event_that_is_far_enough_is_a_line(attach: Attach) -> None:
    """With events every 10 iterations and interval=10 there is a line for each."""
    console = Console(attach)

    lines = console.lines(*(train(step, loss=1.0) for step in range(10, 110, 10)))

    assert len(lines) == 10


def test_lines_keep_their_distance(attach: Attach) -> None:
    """Events every iteration make a line every `interval`, and what was held back is shown at the end."""
    console = Console(attach, interval=4)

    lines = console.lines(*(train(step, loss=1.0) for step in range(1, 12)))

    assert [line.split("[")[2].split("]")[0] for line in lines] == ["4", "8", "11"]


def test_the_first_line_of_a_resumed_run_is_a_whole_one(attach: Attach) -> None:
    """Lines stay at the multiples of `interval`, where the other values are logged: not at the first that is put."""
    console = Console(attach, interval=10)

    lines = console.lines(
        *(train(step, lr=0.1) for step in range(38, 41)), train(40, loss=1.0), train(50, loss=0.5)
    )

    assert [line.split("[")[2].split("]")[0] for line in lines] == ["40", "50"]


def test_values_in_between_appear_in_the_next_line(attach: Attach) -> None:
    """A value that has no line of its own is not lost."""
    console = Console(attach)

    lines = console.lines(train(10, loss=1.0), train(16, norm=3.0), train(20, loss=0.5))

    assert lines[1:] == ["Epoch(train)  [1][20]  loss: 0.5000      norm: 3.0000"]


def places(line: str, *names: str) -> list[int]:
    """Where values begin in a line; -1 where it has none of that name."""
    return [line.find(f"  {name}: ") for name in names]


VALUES = [2.3, 9.9e-05, -0.12, float("nan"), 12345.5, 0.0, -3e-7]


def test_values_keep_their_places(attach: Attach) -> None:
    """However long they are, and however long an iteration takes."""
    console = Console(attach, iters_per_epoch=180)
    seconds = [0.0049, 0.1, 7.0, 40.0, 0.2, 0.004, 2.0]

    lines = console.lines(
        *(
            train(10 * i, loss=loss, time=time, lr=10.0**-i, acc=abs(loss), step_time=time)
            for i, (loss, time) in enumerate(zip(VALUES[:-1], seconds, strict=False), start=1)
        )
    )

    names = ("lr", "eta", "loss", "acc", "time", "step_time")
    assert {tuple(places(line, *names)) for line in lines} == {tuple(places(lines[0], *names))}
    assert -1 not in places(lines[0], *names)


def test_scores_keep_their_places(attach: Attach) -> None:
    """From epoch 9 to epoch 10 too; a test has places of its own."""
    console = Console(attach)

    lines = console.lines(
        *(
            ScalarsLogged(
                mode=mode, epoch=epoch, max_epochs=10, scalars={**first, "accuracy": value, "loss": value}
            )
            for epoch, value in zip((8, 9, 10), VALUES, strict=False)
            for mode, first in (("val", {}), ("test", {"perplexity": 1.0}))
        )
    )

    for own in (lines[::2], lines[1::2]):
        assert {tuple(places(line, "accuracy", "loss")) for line in own} == {
            tuple(places(own[0], "accuracy", "loss"))
        }


def test_a_value_that_comes_sometimes_moves_no_other(attach: Attach) -> None:
    """Its place is blank in the lines that lack it; and what came once, before the rest, leaves no place."""
    console = Console(attach)
    seldom: list[dict[str, float]] = [
        {},
        {"norm": 1.0},
        {},
        {"norm": 1.0},
        {"rare": 3.0},
        {"norm": 1.0, "rare": 3.0},
    ]

    first, *lines = console.lines(
        train(0, parameters=1e5),
        *(logged({**own, "loss": 1.0, "acc": 0.5}, 10 * i) for i, own in enumerate(seldom, start=1)),
    )

    assert "parameters: 100000.0000" in first
    assert {tuple(places(line, "loss", "acc")) for line in lines} == {tuple(places(lines[0], "loss", "acc"))}
    assert {place for line in lines for place in places(line, "norm")} == {-1, places(lines[1], "norm")[0]}
    assert lines[2].endswith("acc: 0.5000")


def test_a_value_that_is_longer_than_all_before_widens_its_place(attach: Attach) -> None:
    """It is whole, and those after it keep the new place."""
    console = Console(attach)

    lines = console.lines(
        *(train(10 * i, loss=loss, acc=0.5) for i, loss in enumerate([1.0, 1.0, -2e-100, 1.0], start=1))
    )

    at = [*(places(line, "acc")[0] for line in lines)]
    assert "loss: -2.0000e-100  acc" in lines[2]
    assert at == [at[0], at[0], at[0] + 2, at[0] + 2]


def test_names_without_end_take_no_places_without_end(attach: Attach) -> None:
    """A line stays as long as its own values are, and some more."""
    console = Console(attach)

    lines = console.lines(
        *(logged({f"image_{i}": 1.0}, 10 * (2 * i + k)) for i in range(500) for k in range(1, 3)),
        train(10_010, loss=1.0),
        train(10_020, image_499=1.0),
    )

    assert len(lines[-1]) < 5000


def test_lines_keep_the_order_of_their_events(attach: Attach) -> None:
    """What was held back comes before a later validation."""
    console = Console(attach)
    val = ScalarsLogged(mode="val", epoch=1, max_epochs=10, scalars={"loss": 1.0})

    lines = console.lines(train(10, loss=1.0), train(15, loss=2.0), val)

    assert [line.split("  loss")[0] for line in lines] == [
        "Epoch(train)  [1][10]",
        "Epoch(train)  [1][15]",
        "Epoch(val)  [1]",
    ]


def test_time_left_comes_from_smoothed_times(attach: Attach) -> None:
    """The mean of the first five intervals; from then on a new one counts a fifth."""
    console = Console(attach)
    times = [1.0, 2.0, 3.0, 2.0, 2.0, 7.0]

    lines = console.lines(*(train(1700 + 10 * i, time=time) for i, time in enumerate(times)))

    shown = [line.split("eta: ")[1].split("  ")[0] for line in lines]
    assert shown == ["0:01:40", "0:02:15", "0:02:40", "0:02:20", "0:02:00", "0:02:30"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.000493, "2028 it/s"),
        (0.00493, "202.8 it/s"),
        (0.1, "10.0 it/s"),
        (0.4, "2.5 it/s"),
        (7.0, "0.143 it/s"),
        (300.0, "0.00333 it/s"),
    ],
)
def test_speed_shows_three_digits_at_least(attach: Attach, seconds: float, shown: str) -> None:
    """Iterations that take minutes have a speed too."""
    console = Console(attach)

    (line,) = console.lines(train(10, time=seconds))

    assert shown in line


def test_speed_is_known_where_the_end_is_not(attach: Attach) -> None:
    """A run of unknown length has no time left, but a speed."""
    console = Console(attach)

    (line,) = console.lines(ScalarsLogged(step=10, iter=9, scalars={"time": 0.01, "loss": 0.5}))

    assert line == "Iter(train) [10]  100.0 it/s   loss: 0.5000      time: 0.0100"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(3600.0, "1:00:00"), (36000.0, "10:00:00"), (360000.0, "100:00:00")]
)
def test_time_left_is_in_hours(attach: Attach, seconds: float, shown: str) -> None:
    """Days are hours too: the text keeps its form."""
    console = Console(attach)

    (line,) = console.lines(train(1799, time=seconds))

    assert f"eta: {shown} " in line


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0])
def test_times_that_are_none_give_no_time_left(attach: Attach, seconds: float) -> None:
    """Nonsense under the name `time` ends nothing."""
    console = Console(attach)

    (line,) = console.lines(train(10, time=seconds))

    assert "eta" not in line
    assert "it/s" not in line


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("loss", 0.12345, "0.1235"), ("loss", 0.0, "0.0000"), ("loss", 1.5e-6, "1.5000e-06"),
        ("loss", 2.5e7, "2.5000e+07"), ("loss", float("nan"), "nan"), ("loss", float("-inf"), "-inf"),
        ("base_lr", 0.1, "1.0000e-01"), ("lr/head", 0.1, "1.0000e-01"), ("time", 0.0001, "0.0001"),
        ("step_time", 0.0004, "0.0004"),
    ],
)  # fmt: skip
def test_numbers_show_what_they_are(attach: Attach, name: str, value: float, shown: str) -> None:
    """Four places, or a power of ten where those would show nothing."""
    console = Console(attach)

    (line,) = console.lines(ScalarsLogged(mode="val", scalars={name: value}))

    assert line == f"Iter(val) [0]  {name}: {shown}"


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (TextLogged(name="note", text="hello"), "note: hello"),
        (TextLogged(text="hello"), "hello"),
        (CheckpointSaved(path="a/b", bytes=1_230_000, seconds=0.031), "Checkpoint saved: a/b (1.2 MB, 0.03 s)"),
        (CheckpointFailed(path="a/b", error="OSError: disk\nfull"), "Checkpoint FAILED: a/b: OSError: disk full"),
        (AfterLoadCheckpoint(path="a/b"), "Checkpoint loaded: a/b"),
        (StopRequested(iter=9, reason="enough"), "Stop requested: enough"),
        (PreemptionRequested(iter=9, reason="SIGTERM"), "Preemption requested: SIGTERM"),
        (HandlerFailed(handler="J", error="OSError: x", count=2), "J FAILED (2x): OSError: x"),
        (EventsDropped(handler="J", count=5), "J dropped 5 events: its queue was full"),
        (SlowHandler(handler="J", cost=0.0021, count=9), "J is slow: p99 2.10 ms over 9 calls"),
        (AfterRun(iter=100), "Run ended at iteration 100: completed"),
        (AfterRun(iter=7, reason="error", error="E: x"), "Run ended at iteration 7: error: E: x"),
    ],
)  # fmt: skip
def test_other_events_are_a_line_each(attach: Attach, event: Event, line: str) -> None:
    """What happens besides iterations is said in words."""
    console = Console(attach)

    assert console.lines(event) == [line]


HOSTILE = "\x1b]0;title\x07\r\x9b2J\u202e\n[bold]"


@pytest.mark.parametrize(
    "event",
    [
        ScalarsLogged(step=10, mode="train", scalars={HOSTILE: 1.0}),
        ScalarsLogged(mode=HOSTILE, scalars={"loss": 1.0}),
        TextLogged(name="note", text=HOSTILE),
        CheckpointSaved(path=HOSTILE),
        CheckpointFailed(path=HOSTILE, error=HOSTILE),
        AfterLoadCheckpoint(path=HOSTILE),
        StopRequested(reason=HOSTILE),
        PreemptionRequested(reason=HOSTILE),
        HandlerFailed(handler=HOSTILE, error=HOSTILE),
        EventsDropped(handler=HOSTILE),
        SlowHandler(handler=HOSTILE),
        AfterRun(reason=HOSTILE, error=HOSTILE),
    ],
)
def test_a_terminal_obeys_no_text(attach: Attach, event: Event) -> None:
    """Control characters and direction marks are escapes; only a text that was logged may have several lines."""
    console = Console(attach)

    console.lines(event)

    shown = console.stream.getvalue()
    assert {*"\x1b\x07\r\x9b\u202e"}.isdisjoint(shown)
    assert r"\x1b]0;title\x07" in shown
    assert r"\u009b2J\u202e" in shown
    assert "[bold]" in shown
    assert shown.count("\n") == (2 if isinstance(event, TextLogged) else 1)


def test_an_event_without_words_of_its_own_is_named() -> None:
    """A subclass may subscribe to more."""
    assert notice(BeforeRun()).startswith("before_run: BeforeRun(")


def test_a_second_run_starts_over(attach: Attach) -> None:
    """The distance between lines is not carried from one run into the next."""
    console = Console(attach)

    lines = console.lines(train(10, loss=1.0), AfterRun(iter=10), BeforeRun(), train(1, loss=1.0))

    assert lines[-1] == "Epoch(train)  [1][1]  loss: 1.0000"


def test_standard_output_is_the_default(attach: Attach, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a terminal under pytest: plain lines."""
    bus = attach(ConsoleWriter())

    bus.emit(train(10, loss=0.5))
    bus.flush()

    assert capsys.readouterr().out == "Epoch(train)  [1][10]  loss: 0.5000\n"


def test_a_program_without_standard_output_has_a_console_that_says_nothing(
    attach: Attach, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a scheduler that closes it, where Python has None: that is no failure of the console."""
    monkeypatch.setattr(sys, "stdout", None)
    writer = ConsoleWriter()
    bus = attach(writer)
    bus.emit(BeforeRun())
    bus.flush()

    assert writer.nobody_reads
    assert (account(bus).delivered, account(bus).error) == (1, "")


def test_characters_the_output_cannot_show_are_escaped(attach: Attach) -> None:
    """A text in another script does not end the console."""
    raw = io.BytesIO()
    bus = attach(ConsoleWriter(stream=io.TextIOWrapper(raw, encoding="ascii")))

    bus.emit(TextLogged(text="größer"))
    bus.flush()

    assert raw.getvalue() == b"gr\\xf6\\xdfer\n"


def test_an_output_that_fails_is_named_and_never_raises(attach: Attach, account: Account) -> None:
    """emit goes on as before; the account says what failed."""
    with open("/dev/full", "w", buffering=1) as stream:
        bus = attach(ConsoleWriter(stream=stream))

        for step in (10, 20, 30):
            bus.emit(train(step, loss=1.0))
        bus.close()

        assert (account(bus).delivered, account(bus).failed) == (0, 1)
        assert "No space left on device" in account(bus).error
        discard(stream)


def test_closing_twice_is_safe() -> None:
    """A writer that never opened closes too."""
    writer = ConsoleWriter()

    writer.close()
    writer.close()


def test_an_interval_below_one_is_refused() -> None:
    """The error names the bound and the value given."""
    with pytest.raises(ValueError, match="interval must be at least 1 iteration, got 0"):
        ConsoleWriter(0)


@pytest.mark.parametrize("interval", ["5", 2.5, True])
def test_an_interval_that_is_no_int_is_refused(interval: Any) -> None:
    """At the line that wrote it, with what came."""
    with pytest.raises(TypeError, match=f"interval must be an int, got {interval!r}"):
        ConsoleWriter(interval)


def test_a_bar_without_rich_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for the bar is told what to install."""
    without_rich(monkeypatch)

    with pytest.raises(ImportError, match=r"needs rich: pip install 'torch-eventloop\[demo\]'"):
        ConsoleWriter(progress=True)


def test_without_rich_a_terminal_gets_lines(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar is an extra: nobody has to install it."""
    without_rich(monkeypatch)
    stream = Terminal()
    bus = attach(ConsoleWriter(stream=stream))

    bus.emit(train(10, loss=0.5))
    bus.flush()

    assert stream.getvalue() == "Epoch(train)  [1][10]  loss: 0.5000\n"


def test_a_dumb_terminal_gets_lines(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot move its cursor has no bar."""
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    bus = attach(ConsoleWriter(stream=stream))

    bus.emit(train(10, loss=0.5))
    bus.flush()

    assert stream.getvalue() == "Epoch(train)  [1][10]  loss: 0.5000\n"


def discard(stream: TextIO) -> None:
    """Let what is left in its buffer go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eventloop.writers.progress", raising=False)
    monkeypatch.delattr("eventloop.writers.progress", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)


def pipe_without_reader(encoding: str = "utf-8") -> TextIO:
    """As standard output is once `head` has left."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding=encoding)


def test_a_reader_that_leaves_is_no_failure(attach: Attach, account: Account) -> None:
    """Nothing more is shown, every event counts as delivered, and what was printed elsewhere is left alone."""
    stream = pipe_without_reader()
    writer = ConsoleWriter(1, stream=stream)
    bus = attach(writer)
    for step in (1, 2, 3):
        bus.emit(train(step, loss=1.0))
    assert bus.flush()

    got = account(bus)
    assert (writer.nobody_reads, got.delivered, got.failed, got.error) == (True, 3, 0, "")
    bus.close()
    with pytest.raises(BrokenPipeError):  # what it had in its buffer
        stream.close()


def test_other_errors_of_the_output_are_failures(attach: Attach, account: Account) -> None:
    """A full disk is one."""
    with open("/dev/full", "w", encoding="utf-8") as stream:
        bus = attach(ConsoleWriter(1, stream=stream))
        bus.emit(train(1, loss=1.0))
        bus.flush()

        assert account(bus).failed == 1
        assert "No space left" in account(bus).error
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
