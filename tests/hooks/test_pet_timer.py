"""TestHook: Pet's timers of a test, and the line of progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from eventloop.events import TextLogged
from eventloop.hooks import Hook
from eventloop.hooks.pet_timer import TestHook, Timer
from eventloop.training.trainer import Trainer

if TYPE_CHECKING:
    from tests.hooks.conftest import Clock

DATA, INFER, POST = 0.25, 1.0, 0.5


@pytest.fixture
def pet_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the timers."""
    monkeypatch.setattr("eventloop.hooks.pet_timer.perf_counter", clock)
    return clock


class SlowLoader:
    """A loader whose every batch takes a while; with `length=None` one that does not say how long it is."""

    def __init__(self, clock: Clock, batches: int) -> None:
        self.clock, self.batches = clock, batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches):
            self.clock.advance(DATA)
            yield torch.zeros(1)


class SizedLoader(SlowLoader):
    """One that says it."""

    def __len__(self) -> int:
        return self.batches


class SlowPost(Hook):
    """A handler that writes results."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def after_test_iter(self, trainer: Trainer, event: Any) -> None:
        """Take long."""
        self.clock.advance(POST)


Run = Callable[..., list[str]]


@pytest.fixture
def run(pet_clock: Clock, make_trainer: Callable[..., Trainer]) -> Run:
    """Test on the clock, and return the lines."""

    def infer(trainer: Trainer, batch: Any) -> dict[str, float]:
        pet_clock.advance(INFER)
        return {"acc": 0.5}

    def test(
        hook: TestHook, batches: int = 8, times: int = 1, sized: bool = True, step: Any = infer
    ) -> list[str]:
        loader = (SizedLoader if sized else SlowLoader)(pet_clock, batches)
        trainer = make_trainer(hooks=[SlowPost(pet_clock), hook], test_loader=loader, val_step=step)
        with trainer.bus.capture(TextLogged) as seen:
            for _ in range(times):
                trainer.test()
        return [event.text for event in seen if isinstance(event, TextLogged)]

    return test


def test_line_is_said_at_the_period_and_at_the_end(run: Run) -> None:
    """Batches done, the means of iter = data + infer + post, and the time left, in Pet's form."""
    assert run(TestHook(logperiod=5, num_warmup=2)) == [
        "[Testing][range:1-8 of 8][5/8][1.750s = 0.250s + 1.000s + 0.500s][eta: 0:00:05]",
        "[Testing][range:1-8 of 8][8/8][1.750s = 0.250s + 1.000s + 0.500s][eta: 0:00:00]",
    ]


def test_warm_up_is_left_out(run: Run) -> None:
    """The first `num_warmup` batches are in no timer, the rest all of them."""
    hook = TestHook(num_warmup=3)

    run(hook, batches=8)

    assert {name: timer.calls for name, timer in hook.timers.items()} == dict.fromkeys(
        ("iter", "data", "infer", "post"), 5
    )


def test_no_time_is_known_in_the_warm_up(run: Run) -> None:
    """The line says so, instead of a time left of 0."""
    assert run(TestHook(logperiod=4, num_warmup=4), batches=5)[0].endswith(
        "[4/5][0.000s = 0.000s + 0.000s + 0.000s][eta: ?]"
    )


def test_each_test_starts_anew(run: Run) -> None:
    """Warm-up and means are those of the pass."""
    hook = TestHook(num_warmup=2)

    lines = run(hook, batches=3, times=2)

    assert len(lines) == 2
    assert hook.timers["iter"].calls == 1


def test_loader_that_does_not_say_its_length(run: Run) -> None:
    """There is a line at the period, and the time left is not known."""
    assert run(TestHook(logperiod=3, num_warmup=0), batches=4, sized=False) == [
        "[Testing][range:1-? of ?][3/?][1.750s = 0.250s + 1.000s + 0.500s][eta: ?]"
    ]


def test_own_timers_make_a_second_line(run: Run, pet_clock: Clock) -> None:
    """With all three ways to write them."""
    hook = TestHook("a.yaml", logperiod=2, num_warmup=0)

    def step(trainer: Trainer, batch: Any) -> dict[str, float]:
        with hook.timing("nms"):
            pet_clock.advance(0.5)
        hook.tic("merge")
        pet_clock.advance(0.25)
        assert hook.toc("merge") == 0.25
        hook.draw_tic()
        pet_clock.advance(0.125)
        hook.draw_toc()
        return {"acc": 0.5}

    (text,) = run(hook, batches=2, step=step)

    assert text.splitlines() == [
        "[a.yaml][Testing][range:1-2 of 2][2/2][1.625s = 0.250s + 0.875s + 0.500s][eta: 0:00:00]",
        "|nms: 0.500s|merge: 0.250s|draw: 0.125s|",
    ]


def test_timer_that_the_code_uses_is_left_to_it(run: Run, pet_clock: Clock) -> None:
    """Who times `infer` and `post` where they are is not timed a second time."""
    hook = TestHook(num_warmup=0)

    def step(trainer: Trainer, batch: Any) -> dict[str, float]:
        hook.tic("infer")
        pet_clock.advance(1.0)
        hook.toc("infer")
        hook.tic("post")
        pet_clock.advance(2.0)
        hook.toc("post")
        return {"acc": 0.5}

    lines = run(hook, batches=2, step=step)

    assert lines[0].endswith("[2/2][3.750s = 0.250s + 1.000s + 2.000s][eta: 0:00:00]")
    assert (hook.timers["infer"].calls, hook.timers["post"].calls) == (2, 2)


def test_training_is_not_timed(run: Run, make_trainer: Callable[..., Trainer]) -> None:
    """The hook hears tests alone."""
    hook = TestHook()

    make_trainer(hooks=[hook]).train()

    assert hook.iter == 0


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged so far."""
    caplog.set_level(logging.INFO, "eventloop")
    return lambda: [record.getMessage() for record in caplog.records]


def test_loop_of_ones_own(pet_clock: Clock, said: Callable[[], list[str]]) -> None:
    """Without a trainer, as in Pet: the times are divided by the images of a batch, which `cur` counts."""
    hook = TestHook("a.yaml", logperiod=4, num_warmup=1)
    for cur in (2, 4, 6):
        hook.tic("iter")
        hook.tic("infer")
        pet_clock.advance(2.0)
        hook.toc("infer")
        hook.toc("iter")
        hook.log_stats(cur, 1, 6, 20, ims_per_gpu=2, suffix=" done", log_all=True)

    assert said() == [
        "[a.yaml][Testing][range:1-6 of 20][4/6][1.000s = 0.000s + 1.000s + 0.000s][eta: 0:00:02] done",
        "[a.yaml][Testing][range:1-6 of 20][6/6][1.000s = 0.000s + 1.000s + 0.000s][eta: 0:00:00] done",
    ]


def test_own_timers_are_logged_where_asked_for(pet_clock: Clock, said: Callable[[], list[str]]) -> None:
    """`log_all` adds them, the default leaves them out."""
    hook = TestHook(num_warmup=0)
    with hook.timing("iter"), hook.timing("nms"):
        pet_clock.advance(0.5)

    hook.log_stats(10, 1, 10, 10)
    hook.log_stats(10, 1, 10, 10, log_all=True)

    assert [line.partition("\n")[2] for line in said()] == ["", "|nms: 0.500s|"]


def test_toc_in_the_warm_up_has_no_value(pet_clock: Clock) -> None:
    """It returns None, and is in no mean."""
    hook = TestHook(num_warmup=1)
    times = []
    for _ in range(2):
        hook.tic("iter")
        pet_clock.advance(0.5)
        times.append(hook.toc("iter"))

    assert times == [None, 0.5]


def test_reset_starts_all_timers_anew(pet_clock: Clock) -> None:
    """And the warm-up."""
    hook = TestHook(num_warmup=0)
    with hook.timing("iter"):
        pet_clock.advance(0.5)

    hook.reset_timer()

    assert (hook.iter, hook.timers["iter"].calls, hook.timers["iter"].average_time) == (0, 0, 0.0)


def test_mean_or_last_time(pet_clock: Clock) -> None:
    """`Timer.toc` returns the one or the other."""
    timer = Timer()
    returned = []
    for seconds, average in ((1.0, True), (3.0, True), (5.0, False)):
        timer.tic()
        pet_clock.advance(seconds)
        returned.append(timer.toc(average=average))

    assert returned == [1.0, 2.0, 5.0]


@pytest.mark.parametrize(("synchronize", "expected"), [(False, 0), (True, 4)])
def test_device_is_waited_for_where_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, synchronize: bool, expected: int
) -> None:
    """Once for each of the four timers, after the warm-up; by default never."""
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("waited"))

    run(TestHook(num_warmup=1, synchronize=synchronize), batches=2)

    assert len(waits) == expected


def test_waiting_without_a_device_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` serves both kinds of machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    TestHook().wait()


def test_timer_of_a_taken_name_is_an_error() -> None:
    """`add_timer` makes new ones."""
    with pytest.raises(ValueError, match="there is a timer 'iter' already: choose another name"):
        TestHook().add_timer("iter")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nms", "there is no timer 'nms' to toc: known are iter, data, infer, post"),
        ("infer", "the timer 'infer' is not running"),
    ],
)
def test_toc_without_tic_is_an_error(name: str, message: str) -> None:
    """In the warm-up too."""
    with pytest.raises(ValueError, match=message):
        TestHook().toc(name)


def test_timer_that_was_not_begun_is_an_error() -> None:
    """The same of a `Timer` by itself."""
    with pytest.raises(ValueError, match="toc without tic"):
        Timer().toc()


def test_other_attributes_are_missing() -> None:
    """Only names that end in _tic and _toc are made."""
    with pytest.raises(AttributeError, match="'TestHook' object has no attribute 'nms_tac'"):
        _ = TestHook().nms_tac


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logperiod": 0}, "logperiod must be at least 1, got 0"),
        ({"num_warmup": -1}, "num_warmup must be at least 0, got -1"),
        ({"num_warmup": 2.5}, "num_warmup must be an int, got 2.5"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """They are checked when the hook is built."""
    with pytest.raises((TypeError, ValueError), match=message):
        TestHook(**options)
