"""ConsoleWriter without a terminal: its lines. The progress bar is in test_progress.py."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from math import inf, nan
from typing import Any, TextIO

import pytest

from eventloop.eventlog.notices import notice
from eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    BeforeRun,
    CheckpointFailed,
    CheckpointSaved,
    CommandApplied,
    CommandRefused,
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
from tests.writers.conftest import Account, Attach, emit, val, write


class Console:
    """A console on a StringIO, behind a real bus."""

    def __init__(self, attach: Attach, interval: int = 10, **facts: Any) -> None:
        self.stream = io.StringIO()
        self.bus = attach(ConsoleWriter(interval, stream=self.stream), **facts)

    def lines(self, *events: Event) -> list[str]:
        """The lines after `events`."""
        emit(self.bus, *events)
        return self.stream.getvalue().splitlines()


@pytest.fixture
def console(attach: Attach) -> Console:
    return Console(attach)


def train(step: int, epoch: int = 0, max_epochs: int | None = 10, **scalars: float) -> ScalarsLogged:
    return ScalarsLogged(
        step=step, iter=step - 1, epoch=epoch, max_iters=1800, max_epochs=max_epochs, scalars=scalars
    )


def steps_of(lines: list[str]) -> list[str]:
    """The iteration in the position of each line."""
    return [line.split("[")[2].split("]")[0] for line in lines]


# --- what a line has ---------------------------------------------------------------------------------------


def test_a_line_of_training(attach: Attach) -> None:
    """Position, learning rate, time left, speed, the other values, and the times."""
    console = Console(attach, iters_per_epoch=180)

    (line,) = console.lines(train(220, 1, loss=0.12341, data_time=0.0001, time=0.001, lr=0.001, acc=0.5))

    assert line == (
        "Epoch(train)  [2][ 40/180]  lr: 1.0000e-03  eta: 0:00:02   1000 it/s    loss: 0.1234      acc: 0.5000      "
        "time: 0.0010   data_time: 0.0001"
    )


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (train(40, max_epochs=None, loss=0.5), "Iter(train) [  40/1800]  loss: 0.5000"),
        (train(40, 2, loss=0.5), "Epoch(train)  [3][40]  loss: 0.5000"),
        (
            ScalarsLogged(step=10, iter=9, scalars={"time": 0.01, "loss": 0.5}),
            "Iter(train) [10]  100.0 it/s   loss: 0.5000      time: 0.0100",
        ),
        (
            ScalarsLogged(mode="test", step=360, scalars={"accuracy": 0.98}),
            "Iter(test) [360]  accuracy: 0.9800",
        ),
    ],
    ids=["of iterations", "epoch of unknown length", "run of unknown length", "of a test without epochs"],
)
def test_a_line_of_a_run_counted_in_iterations(console: Console, event: Event, line: str) -> None:
    """Without epochs the position is the iteration; a run of unknown length has a speed and no time left."""
    assert console.lines(event) == [line]


def test_a_line_of_validation(console: Console) -> None:
    """The epoch of a validation is the number of completed ones; times come last."""
    scalars = {"time": 0.01, "accuracy": 0.98, "loss": 0.07}

    lines = console.lines(ScalarsLogged(mode="val", step=360, epoch=2, max_epochs=10, scalars=scalars))

    assert lines == ["Epoch(val)  [2]  accuracy: 0.9800      loss: 0.0700      time: 0.0100"]


def test_commands_to_the_run_are_lines(console: Console) -> None:
    """A command has a line with its arguments and its sender, a refused one with the reason."""
    lines = console.lines(
        CommandApplied(iter=9, command="set", arguments={"lr": 0.1}, source="anna@login1"),
        CommandRefused(iter=10, command="set", reason="lr must be at least 0"),
    )

    assert lines == [
        "Command applied: set lr=0.1 (from anna@login1)",
        "Command refused: set: lr must be at least 0",
    ]


def test_time_left_comes_from_smoothed_times(console: Console) -> None:
    """The mean of the first five intervals; from then on a new one counts a fifth."""
    times = [1.0, 2.0, 3.0, 2.0, 2.0, 7.0]

    lines = console.lines(*(train(1700 + 10 * i, time=time) for i, time in enumerate(times)))

    shown = [line.split("eta: ")[1].split("  ")[0] for line in lines]
    assert shown == ["0:01:40", "0:02:15", "0:02:40", "0:02:20", "0:02:00", "0:02:30"]


def test_time_left_is_in_hours(console: Console) -> None:
    """Days are hours too."""
    assert "eta: 100:00:00 " in console.lines(train(1799, time=360000.0))[0]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.000493, "2028 it/s"),
        (0.00493, "202.8 it/s"),
        (0.1, "10.0 it/s"),
        (0.4, "2.5 it/s"),
        (7.0, "0.143 it/s"),
        (300.0, "0.00333 it/s"),
        (nan, None),
        (inf, None),
        (0.0, None),
        (-1.0, None),
    ],
)
def test_speed_shows_three_digits_at_least(console: Console, seconds: float, shown: str | None) -> None:
    """Also for iterations that take minutes; a time that is not one gives neither speed nor time left."""
    (line,) = console.lines(train(10, time=seconds))

    if shown is None:
        assert "eta" not in line
        assert "it/s" not in line
    else:
        assert shown in line


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("loss", 0.12345, "0.1235"),
        ("loss", 0.0, "0.0000"),
        ("loss", 1.5e-6, "1.5000e-06"),
        ("loss", 2.5e7, "2.5000e+07"),
        ("loss", nan, "nan"),
        ("loss", -inf, "-inf"),
        ("base_lr", 0.1, "1.0000e-01"),
        ("lr/head", 0.1, "1.0000e-01"),
        ("time", 0.0001, "0.0001"),
        ("step_time", 0.0004, "0.0004"),
    ],
)
def test_numbers_show_what_they_are(console: Console, name: str, value: float, shown: str) -> None:
    """Four places, or a power of ten where those would show nothing."""
    assert console.lines(val(0, **{name: value})) == [f"Iter(val) [0]  {name}: {shown}"]


# --- when a line comes -------------------------------------------------------------------------------------


def test_lines_keep_their_distance(attach: Attach) -> None:
    """Events every iteration make a line every `interval`, and values held back are shown at the end."""
    lines = Console(attach, interval=4).lines(*(train(step, loss=1.0) for step in range(1, 12)))

    assert steps_of(lines) == ["4", "8", "11"]


def test_the_first_line_of_a_resumed_run_is_a_whole_one(console: Console) -> None:
    """Lines stay at the multiples of `interval`, where the other values are logged."""
    rates = [train(step, lr=0.1) for step in range(38, 41)]

    lines = console.lines(*rates, train(40, loss=1.0), train(50, loss=0.5))

    assert steps_of(lines) == ["40", "50"]


def test_a_run_resumed_within_an_epoch_shows_its_first_log(attach: Attach) -> None:
    """Logs come at multiples of `interval` in the epoch, whose length need not be a multiple of it."""
    resumed = [train(step, loss=1.0, epoch=1) for step in (67, 77, 87)]  # after 60, 13 in the second epoch

    lines = Console(attach, iters_per_epoch=47).lines(*resumed)

    assert steps_of(lines) == ["20/47", "30/47", "40/47"]


def test_values_in_between_appear_in_the_next_line(console: Console) -> None:
    """A value without a line of its own is not lost, and comes before a later validation."""
    evaluated = ScalarsLogged(mode="val", epoch=1, max_epochs=10, scalars={"loss": 1.0})

    lines = console.lines(
        train(10, loss=1.0), train(16, norm=3.0), train(20, loss=0.5), train(25, loss=2.0), evaluated
    )

    assert lines[1] == "Epoch(train)  [1][20]  loss: 0.5000      norm: 3.0000"
    assert [line.split("  loss")[0] for line in lines[2:]] == ["Epoch(train)  [1][25]", "Epoch(val)  [1]"]


@pytest.mark.parametrize(
    ("steps", "logs", "shown"),
    [
        (range(20, 176, 20), [10, 20, 30, 40], ["10", "20", "30", "40"] * 4),
        (range(15, 172, 15), [40], ["30", "40", "40", "40", "40"]),  # one line before any log
    ],
    ids=["as often as lines", "seldom"],
)
def test_the_value_of_a_handler_costs_no_line(
    attach: Attach, steps: Sequence[int], logs: Sequence[int], shown: list[str]
) -> None:
    """A value that comes alone, between two logs, is in the line of the next log, whatever the length of an epoch."""
    alone = {step: train(step, (step - 1) // 44, w_norm=1.0) for step in steps}
    regular = {
        44 * epoch + i: train(44 * epoch + i, epoch, loss=1.0, time=0.1) for epoch in range(4) for i in logs
    }
    events = [event for _, event in sorted((alone | regular).items())]

    lines = Console(attach, iters_per_epoch=44).lines(*events)

    assert [place.split("/")[0] for place in steps_of(lines)] == shown
    assert sum("loss" in line for line in lines) == len(regular)


def test_a_value_that_a_notice_shows_early_costs_no_line(console: Console) -> None:
    """A handler's value before the notice has a line of its own, and the log after it another one."""
    first, *rest = (train(step, loss=1.0, time=0.1) for step in (10, 20, 30))

    lines = console.lines(first, train(16, norm=3.0), StopRequested(reason="x"), *rest)

    assert lines.pop(2) == "Stop requested: x"
    assert steps_of(lines) == ["10", "16", "20", "30"]


def test_a_second_run_starts_over(console: Console) -> None:
    """The distance between lines is not carried from one run into the next."""
    lines = console.lines(train(10, loss=1.0), AfterRun(iter=10), BeforeRun(), train(1, loss=1.0))

    assert lines[-1] == "Epoch(train)  [1][1]  loss: 1.0000"


# --- columns -----------------------------------------------------------------------------------------------


def places(line: str, *names: str) -> list[int]:
    """Where values begin in a line; -1 where it has none of that name."""
    return [line.find(f"  {name}: ") for name in names]


def check_places(lines: list[str], *names: str) -> None:
    """Each name is in every line, at one place."""
    assert -1 not in places(lines[0], *names)
    assert {tuple(places(line, *names)) for line in lines} == {tuple(places(lines[0], *names))}


def test_values_keep_their_places(attach: Attach) -> None:
    """However long they are, and however long an iteration takes."""
    console = Console(attach, iters_per_epoch=180)
    values = [2.3, 9.9e-05, -0.12, nan, 12345.5, 0.0]
    seconds = [0.0049, 0.1, 7.0, 40.0, 0.2, 0.004]

    lines = console.lines(
        *(
            train(10 * i, loss=loss, time=time, lr=10.0**-i, acc=abs(loss), step_time=time)
            for i, (loss, time) in enumerate(zip(values, seconds, strict=True), start=1)
        )
    )

    check_places(lines, "lr", "eta", "loss", "acc", "time", "step_time")


def test_a_value_that_comes_sometimes_moves_no_other(console: Console) -> None:
    """Its place is blank in the lines that lack it; a value that came once, before the rest, leaves no place."""
    seldom: list[dict[str, Any]] = [
        {},
        {"norm": 1.0},
        {},
        {"norm": 1.0},
        {"rare": 3.0},
        {"norm": 1.0, "rare": 3.0},
    ]

    first, *lines = console.lines(
        train(0, parameters=1e5),
        *(train(10 * i, **own, loss=1.0, acc=0.5) for i, own in enumerate(seldom, start=1)),
    )

    assert "parameters: 100000.0000" in first
    check_places(lines, "loss", "acc")
    assert {place for line in lines for place in places(line, "norm")} == {-1, places(lines[1], "norm")[0]}
    assert lines[2].endswith("acc: 0.5000")


def test_a_value_that_is_longer_than_all_before_widens_its_place(console: Console) -> None:
    """It is whole, and those after it keep the new place."""
    losses = [1.0, 1.0, -2e-100, 1.0]

    lines = console.lines(*(train(10 * i, loss=loss, acc=0.5) for i, loss in enumerate(losses, start=1)))

    at = [*(places(line, "acc")[0] for line in lines)]
    assert "loss: -2.0000e-100  acc" in lines[2]
    assert at == [at[0], at[0], at[0] + 2, at[0] + 2]


def test_names_without_end_take_no_places_without_end(console: Console) -> None:
    """The number of columns is limited."""
    values: list[dict[str, Any]] = [{f"image_{i}": 1.0} for i in range(150) for _ in range(2)]
    lines = console.lines(
        *(train(10 * step, **value) for step, value in enumerate(values, start=1)),
        train(3010, loss=1.0),
        train(3020, image_149=1.0),
    )

    assert len(lines[-1]) < 3000


# --- other events ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (TextLogged(name="note", text="hello"), "note: hello"),
        (TextLogged(text="hello"), "hello"),
        (
            CheckpointSaved(path="a/b", bytes=1_230_000, seconds=0.031),
            "Checkpoint saved: a/b (1.2 MB, 0.03 s)",
        ),
        (
            CheckpointFailed(path="a/b", error="OSError: disk\nfull"),
            "Checkpoint FAILED: a/b: OSError: disk full",
        ),
        (AfterLoadCheckpoint(path="a/b"), "Checkpoint loaded: a/b"),
        (StopRequested(iter=9, reason="enough"), "Stop requested: enough"),
        (PreemptionRequested(iter=9, reason="SIGTERM"), "Preemption requested: SIGTERM"),
        (HandlerFailed(handler="J", error="OSError: x", count=2), "J FAILED (2x): OSError: x"),
        (EventsDropped(handler="J", count=5), "J dropped 5 events: its queue was full, or it was disabled"),
        (SlowHandler(handler="J", cost=0.0021, count=9), "J is slow: p99 2.10 ms over 9 calls"),
        (AfterRun(iter=100), "Run ended at iteration 100: completed"),
        (AfterRun(iter=7, reason="error", error="E: x"), "Run ended at iteration 7: error: E: x"),
    ],
)
def test_other_events_are_a_line_each(console: Console, event: Event, line: str) -> None:
    """Events besides iterations are said in words."""
    assert console.lines(event) == [line]


def test_a_failure_that_is_in_the_log_is_no_line(console: Console) -> None:
    """A failure that its subscriber has named in the log itself is not named a second time."""
    assert console.lines(HandlerFailed(handler="J", error="OSError: x", logged=True)) == []


def test_an_event_without_words_of_its_own_is_named() -> None:
    """A subclass may subscribe to more."""
    assert notice(BeforeRun()).startswith("before_run: BeforeRun(")


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
def test_a_terminal_obeys_no_text(console: Console, event: Event) -> None:
    """Control characters and direction marks are escapes; only a text that was logged may have several lines."""
    console.lines(event)

    shown = console.stream.getvalue()
    assert {*"\x1b\x07\r\x9b\u202e"}.isdisjoint(shown)
    assert r"\x1b]0;title\x07" in shown
    assert r"\u009b2J\u202e" in shown
    assert "[bold]" in shown
    assert shown.count("\n") == (2 if isinstance(event, TextLogged) else 1)


# --- the output --------------------------------------------------------------------------------------------

LINE = "Epoch(train)  [1][10]  loss: 0.5000\n"


def test_standard_output_is_the_default(attach: Attach, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a terminal under pytest: plain lines."""
    emit(attach(ConsoleWriter()), train(10, loss=0.5))

    assert capsys.readouterr().out == LINE


def test_a_program_without_standard_output_has_a_console_that_says_nothing(
    attach: Attach, account: Account
) -> None:
    """A scheduler may close it, and Python has None: that is no failure of the console."""
    with redirect_stdout(None):
        writer = ConsoleWriter()
        bus = attach(writer)
        emit(bus, BeforeRun())

    assert writer.nobody_reads
    assert (account(bus).delivered, account(bus).error) == (1, "")


def test_characters_the_output_cannot_show_are_escaped(attach: Attach) -> None:
    """A text in another script does not end the console."""
    raw = io.BytesIO()
    emit(attach(ConsoleWriter(stream=io.TextIOWrapper(raw, encoding="ascii"))), TextLogged(text="größer"))

    assert raw.getvalue() == b"gr\\xf6\\xdfer\n"


def test_an_output_that_fails_is_named_and_never_raises(attach: Attach, account: Account) -> None:
    """Each emit returns; the account has the error."""
    with open("/dev/full", "w", buffering=1) as stream:
        bus = attach(ConsoleWriter(1, stream=stream))
        write(bus, *(train(step, loss=1.0) for step in (1, 2, 3)))

        assert (account(bus).delivered, account(bus).failed) == (0, 1)
        assert "No space left on device" in account(bus).error
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for the text in its buffer


def pipe_without_reader() -> TextIO:
    """As standard output is once `head` has left."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


def test_a_reader_that_leaves_is_no_failure(attach: Attach, account: Account) -> None:
    """Nothing more is shown, every event counts as delivered, and text of other code in the buffer is left alone."""
    stream = pipe_without_reader()
    writer = ConsoleWriter(1, stream=stream)
    bus = attach(writer)
    emit(bus, *(train(step, loss=1.0) for step in (1, 2, 3)))

    got = account(bus)
    assert (writer.nobody_reads, got.delivered, got.failed, got.error) == (True, 3, 0, "")
    bus.close()
    with pytest.raises(BrokenPipeError):  # the text in its buffer
        stream.close()


@pytest.mark.parametrize(
    ("interval", "error", "message"),
    [
        (0, ValueError, "interval must be at least 1, got 0"),
        ("5", TypeError, "interval must be an int, got '5'"),
        (2.5, TypeError, "interval must be an int, got 2.5"),
        (True, TypeError, "interval must be an int, got True"),
    ],
)
def test_a_bad_interval_is_refused(interval: Any, error: type[Exception], message: str) -> None:
    """The constructor names the argument, and what came."""
    with pytest.raises(error, match=message):
        ConsoleWriter(interval)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_without_rich_a_terminal_gets_lines(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    """So does one that cannot move its cursor. `progress=True` names the package that it needs."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.delitem(sys.modules, "eventloop.writers.progress", raising=False)
    monkeypatch.delattr("eventloop.writers.progress", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    emit(attach(ConsoleWriter(stream=stream)), train(10, loss=0.5))

    assert stream.getvalue() == LINE
    with pytest.raises(ImportError, match=r"needs rich: pip install 'torch-eventloop\[demo\]'"):
        ConsoleWriter(progress=True)


def test_shares_of_handlers_are_left_to_curves(console: Console) -> None:
    """`CostsHook(log_seconds=...)` logs a value for each handler, which would fill the lines: they have none of them."""
    shares: dict[str, Any] = {"cost/data_share": 0.5, "cost/EMAHook.after_train_iter": 0.1}
    first, second = console.lines(train(10, loss=1.0), train(20, **shares), train(30, loss=2.0, **shares))

    assert "cost/" not in first + second
    assert steps_of([first, second]) == ["10", "30"]
