"""ConsoleWriter on a terminal: the progress bar."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import threading

import pytest
from msgspec.structs import replace

from eventloop.events import AfterRun, BeforeRun, BeforeVal, CheckpointSaved, Event, ScalarsLogged
from eventloop.writers import ConsoleWriter, progress
from tests.support.internals import substitute
from tests.writers.conftest import Account, Attach, emit, write

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class PseudoTerminal:
    """A terminal, and all that was written to it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def hang_up(self) -> str:
        """Close it and return what it showed."""
        self.stream.close()
        self._reader.join()
        return b"".join(self._chunks).decode()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._master, 65536):
                self._chunks.append(chunk)
        except OSError:  # Linux's way of saying that the other end is closed
            pass
        os.close(self._master)


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal of the tests, whatever terminal they are started from."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bar's clock; it stands still unless a test moves it."""
    now = [100.0]
    substitute(monkeypatch, "progress.monotonic", lambda: now[0])
    return now


def train(step: int) -> ScalarsLogged:
    scalars = {"loss": 1 / step, "lr": 1e-3, "time": 0.001}
    return ScalarsLogged(step=step, epoch=step // 180, max_iters=1800, max_epochs=10, scalars=scalars)


def val(step: int) -> ScalarsLogged:
    scalars = {"accuracy": 0.98}
    return ScalarsLogged(mode="val", step=step, epoch=1, max_iters=1800, max_epochs=10, scalars=scalars)


def shown(attach: Attach, *events: Event) -> str:
    """What a terminal was sent when `events` were emitted and the bus flushed, the bus being still open."""
    terminal = PseudoTerminal()
    emit(attach(ConsoleWriter(stream=terminal.stream)), *events)
    terminal.stream.write("<after>")
    return terminal.hang_up()


def drawn(attach: Attach, *events: Event) -> str:
    """The text of a bar on a stream, from events up to the close of the bus."""
    stream = io.StringIO()
    write(attach(ConsoleWriter(progress=True, stream=stream)), *events)
    return plain(stream.getvalue())


def plain(text: str) -> str:
    """`text` without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_bar_says_where_the_run_is(attach: Attach) -> None:
    """Epoch, iteration, loss, learning rate, speed and time left are on one line."""
    seen = plain(shown(attach, BeforeRun(), train(450), AfterRun(iter=450)))

    assert "epoch  3/10 ━────  450/1800  loss  0.0022   1000 it/s  eta  0:00:01  lr 1.0e-03\r\n" in seen


@pytest.mark.parametrize(("waits", "shows"), [(0.0003, False), (0.00065, True)])
def test_the_bar_shows_a_slow_loader(attach: Attach, waits: float, shows: bool) -> None:
    """The share of the wait for data is on the line if it is above 30 %."""
    event = train(450)
    event = replace(event, scalars={**event.scalars, "data_time": waits})

    line = plain(shown(attach, BeforeRun(), event, AfterRun(iter=450)))

    assert ("eta  0:00:01  data 65%\r\n" in line) == shows


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (AfterRun(iter=10), "completed"),
        (AfterRun(iter=10, reason="error", error="ValueError: x"), "error: ValueError: x"),
    ],
)
def test_what_others_print_after_the_run_is_clean(attach: Attach, end: AfterRun, line: str) -> None:
    """When after_run was delivered the cursor is back, at the beginning of a line of its own; late values begin no second
    bar."""
    seen = shown(attach, BeforeRun(), train(10), end)

    assert seen.index(HIDE_CURSOR) < seen.rindex(SHOW_CURSOR)
    assert HIDE_CURSOR not in seen[seen.rindex(SHOW_CURSOR) :]
    assert plain(seen).endswith(f"\r\nRun ended at iteration 10: {line}\r\n<after>")

    seen = shown(attach, BeforeRun(), train(10), end, train(20))
    assert seen.count(HIDE_CURSOR) == 1
    assert "Epoch(train)  [1][20]  lr: 1.0000e-03" in seen


def test_texts_of_a_run_are_no_commands(attach: Attach) -> None:
    """Neither to the terminal nor to rich, whose markup is shown as it is."""
    named = {"[bold]acc[/bold] :smile:\x1b[2J": 0.5}
    event = ScalarsLogged(mode="val", step=10, max_iters=1800, scalars=named)

    seen = shown(attach, BeforeRun(), train(10), event)

    assert r"[bold]acc[/bold] :smile:\x1b[2J: 0.5000" in plain(seen)
    assert "\x1b[2J" not in seen


def test_closing_the_bus_ends_the_bar(attach: Attach) -> None:
    """Without an after_run too, as at interpreter exit."""
    terminal = PseudoTerminal()
    write(attach(ConsoleWriter(stream=terminal.stream)), train(10))

    assert terminal.hang_up().endswith(SHOW_CURSOR)


def test_other_lines_appear_above_the_bar(attach: Attach) -> None:
    """A validation and a checkpoint have a line each, and the bar is drawn again below."""
    saved = CheckpointSaved(path="a" * 200, bytes=1_000_000, seconds=0.1)

    seen = plain(shown(attach, train(180), val(180), saved, AfterRun(iter=180)))

    assert "\rEpoch(val)  [1]  accuracy: 0.9800\r\nepoch  2/10" in seen
    assert f"\rCheckpoint saved: {'a' * 200} (1.0 MB, 0.10 s)\r\nepoch  2/10" in seen


def test_a_validation_under_way_is_said(attach: Attach) -> None:
    """The bar does not look stuck while the model is validated."""
    seen = plain(shown(attach, train(180), BeforeVal(), AfterRun(iter=180)))

    assert "\rval    2/10 " in seen


def test_a_run_without_training_has_no_bar(attach: Attach) -> None:
    """A validation alone is one line."""
    seen = shown(attach, BeforeRun(), BeforeVal(), val(0), AfterRun())

    assert HIDE_CURSOR not in seen
    assert seen.startswith("Epoch(val)  [1]  accuracy: 0.9800\r\n")


def test_the_bar_is_drawn_at_most_ten_times_a_second(attach: Attach, clock: list[float]) -> None:
    """A thousand events at one moment are drawn when they begin, and when the bar ends; an event a tenth of a second after
    the last drawing is drawn."""
    stream = io.StringIO()
    bus = attach(ConsoleWriter(progress=True, stream=stream))

    for step in range(1, 1000):
        bus.emit(train(step))
    bus.flush()  # draws what is held back
    clock[0] += 1.01 * progress.REFRESH_SECONDS
    write(bus, train(1000), train(1001))

    assert re.findall(r" +(\d+)/1800", plain(stream.getvalue())) == ["1", "999", "1000", "1001"]


@pytest.mark.parametrize("events", [[train(10)], [train(10), val(10)]])
def test_what_the_program_prints_begins_a_line(
    attach: Attach, clock: list[float], events: list[Event]
) -> None:
    """Beside the bar, and behind a line above it; a print never waits for the bar, as it has not replaced the stream."""
    before = sys.stdout, sys.stderr
    stream = io.StringIO()
    emit(attach(ConsoleWriter(progress=True, stream=stream)), *events)

    assert stream.getvalue().endswith("\r")
    assert (sys.stdout, sys.stderr) == before


def test_an_ascii_terminal_gets_an_ascii_bar(attach: Attach) -> None:
    """Where the encoding has no line characters."""
    raw = io.BytesIO()
    write(attach(ConsoleWriter(progress=True, stream=io.TextIOWrapper(raw, encoding="ascii"))), train(900))

    assert "##---" in plain(raw.getvalue().decode("ascii"))


def test_a_narrow_terminal_goes_without_the_bar(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers first: the line is never wrapped, and a number that has no room is left out rather than cut."""
    monkeypatch.setenv("COLUMNS", "40")

    assert {*re.findall(r"epoch[^\r\n]*", drawn(attach, train(900)))} == {
        "epoch  6/10   900/1800  loss  0.0011"
    }


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (123456.789, "1.2e+05"),
        (1234.56, " 1234.6"),
        (-9.9e-05, " -1e-04"),
        (9.9e-05, "9.9e-05"),
        (-0.5, "-0.5000"),
    ],
)
def test_numbers_that_grow_get_shorter(attach: Attach, value: float, shown: str) -> None:
    """A loss that explodes does not push the rest away."""
    assert f"loss {shown}  lr 5.0e-01" in drawn(
        attach, ScalarsLogged(step=12, scalars={"loss": value, "lr": 0.5})
    )


def test_a_run_of_unknown_length_counts(attach: Attach) -> None:
    """Without a total there is neither a bar nor a time left."""
    event = ScalarsLogged(step=12, scalars={"loss": 0.5, "time": 0.5})

    assert "iter   12  loss  0.5000      2 it/s" in drawn(attach, event)


def test_a_terminal_that_is_gone_is_named_and_never_raises(attach: Attach, account: Account) -> None:
    """emit goes on as before; the account says what failed, and closing is clean."""
    master, slave = pty.openpty()
    stream = os.fdopen(slave, "w", encoding="utf-8", buffering=1)
    bus = attach(ConsoleWriter(stream=stream))

    bus.emit(train(10))
    bus.flush()
    os.close(master)
    bus.emit(val(10))
    bus.emit(train(20))
    bus.close()

    stats = account(bus)
    assert (stats.delivered, stats.failed) == (1, 1)
    assert "Input/output error" in stats.error
    with contextlib.suppress(OSError):
        stream.close()
