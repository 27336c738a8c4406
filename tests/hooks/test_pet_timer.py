"""TestHook: Pet's timers of a test, and the line of progress."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from eventloop import Trainer
from eventloop.events import TextLogged
from eventloop.hooks import CallbackHook, TestHook
from eventloop.hooks.pet_timer import Timer
from tests.hooks.conftest import Clock, Make, SlowLoader
from tests.support.cuda import set_cuda
from tests.support.internals import substitute

DATA, INFER, POST = 0.25, 1.0, 0.5


@pytest.fixture
def pet_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the timers."""
    substitute(monkeypatch, "pet_timer.perf_counter", clock)
    return clock


Run = Callable[..., list[str]]


class Unsized:
    """A loader that does not say how long it is."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


@pytest.fixture
def run(pet_clock: Clock, make_trainer: Make) -> Run:
    """Test on the clock, and return the lines."""

    def infer(trainer: Trainer, batch: Any) -> dict[str, float]:
        pet_clock.advance(INFER)
        return {"acc": 0.5}

    def test(
        hook: TestHook, batches: int = 8, times: int = 1, sized: bool = True, step: Any = infer
    ) -> list[str]:
        loader: Any = SlowLoader(pet_clock, DATA, [torch.zeros(1)] * batches)
        post = CallbackHook(after_test_iter=lambda event: pet_clock.advance(POST))
        trainer = make_trainer(
            hooks=[post, hook], test_loader=loader if sized else Unsized(loader), val_step=step
        )
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
    """The first `num_warmup` batches of each test are in no timer, the rest are; until then no time is known."""
    hook = TestHook(logperiod=3, num_warmup=3)

    lines = run(hook, batches=8, times=2)

    assert {name: timer.calls for name, timer in hook.timers.items()} == dict.fromkeys(
        ("iter", "data", "infer", "post"), 5
    )
    assert [line.partition("8]")[2] for line in lines[::3]] == [
        "[3/8][0.000s = 0.000s + 0.000s + 0.000s][eta: ?]"
    ] * 2


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


def test_training_is_not_timed(run: Run, make_trainer: Make) -> None:
    """The hook hears tests alone."""
    hook = TestHook()

    make_trainer(hooks=[hook]).train()

    assert hook.iter == 0


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged so far."""
    caplog.set_level(logging.INFO, "eventloop")
    return lambda: [record.getMessage() for record in caplog.records]


def test_loop_of_ones_own(pet_clock: Clock, logged: Callable[[], list[str]]) -> None:
    """Without a trainer, as in Pet: the times are divided by the images of a batch, which `cur` counts."""
    hook = TestHook("a.yaml", logperiod=4, num_warmup=1)
    for cur in (2, 4, 6):
        hook.tic("iter")
        hook.tic("infer")
        pet_clock.advance(2.0)
        hook.toc("infer")
        hook.toc("iter")
        hook.log_stats(cur, 1, 6, 20, ims_per_gpu=2, suffix=" done", log_all=True)

    assert logged() == [
        "[a.yaml][Testing][range:1-6 of 20][4/6][1.000s = 0.000s + 1.000s + 0.000s][eta: 0:00:02] done",
        "[a.yaml][Testing][range:1-6 of 20][6/6][1.000s = 0.000s + 1.000s + 0.000s][eta: 0:00:00] done",
    ]


def test_own_timers_are_logged_where_asked_for(pet_clock: Clock, logged: Callable[[], list[str]]) -> None:
    """`log_all` adds them, the default leaves them out."""
    hook = TestHook(num_warmup=0)
    with hook.timing("iter"), hook.timing("nms"):
        pet_clock.advance(0.5)

    hook.log_stats(10, 1, 10, 10)
    hook.log_stats(10, 1, 10, 10, log_all=True)

    assert [line.partition("\n")[2] for line in logged()] == ["", "|nms: 0.500s|"]


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
    set_cuda(monkeypatch, is_available=lambda: True, synchronize=lambda: waits.append("waited"))

    run(TestHook(num_warmup=1, synchronize=synchronize), batches=2)

    assert len(waits) == expected


def test_waiting_without_a_device_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait` serves both kinds of machine."""
    set_cuda(monkeypatch, is_available=lambda: False)

    TestHook().wait()


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: TestHook().add_timer("iter"), ValueError, "there is a timer 'iter' already"),
        (
            lambda: TestHook().toc("nms"),
            ValueError,
            "no timer 'nms' to toc: known are iter, data, infer, post",
        ),
        (lambda: TestHook().toc("infer"), ValueError, "the timer 'infer' is not running"),
        (lambda: Timer().toc(), ValueError, "toc without tic"),
        (lambda: TestHook().nms_tac, AttributeError, "'TestHook' object has no attribute 'nms_tac'"),
    ],
)
def test_timer_that_was_not_begun_is_an_error(
    use: Callable[[], object], error: type[Exception], message: str
) -> None:
    """So is a second timer of a name, and an attribute that ends neither in _tic nor in _toc."""
    with pytest.raises(error, match=message):
        use()
