"""A trainer that an error, Ctrl-C or a close has ended trains again: where it was, with the same subscribers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

from eventloop import Trainer, read_events
from eventloop.events import AfterRun, BeforeRun, Event, ScalarsLogged
from eventloop.hooks import AmpOptimizerHook, EMAHook, GradientCumulativeOptimizerHook, LoggerHook
from eventloop.writers import CSVWriter, EventLogWriter, JSONLWriter, TensorBoardWriter, Writer, read_jsonl
from tests.support.interrupted import assert_same, state_of
from tests.support.signals import send
from tests.support.trainers import MakeTrainer, batches, build_trainer, collect, event_name, shuffled
from tests.writers.csv_rows import rows

SEED = 3
EPOCHS: dict[str, Any] = {"max_epochs": 3}
ITERATIONS: dict[str, Any] = {"max_iters": 12, "val_interval": 4}
"""A run of 12 iterations in either unit, validated every 4."""


def build(make_trainer: MakeTrainer, unit: dict[str, Any], **changes: Any) -> Trainer:
    """A trainer with what has a state: momentum, schedulers, an average, a shuffled loader."""
    torch.manual_seed(SEED)
    model = torch.nn.Linear(2, 3)  # draws nothing, so that an iteration that is done again is the same
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedulers = [CosineAnnealingLR(optimizer, T_max=20), ReduceLROnPlateau(optimizer, patience=0)]
    return make_trainer(
        **{
            "model": model,
            "optimizer": optimizer,
            "schedulers": schedulers,
            "train_loader": shuffled(4),
            "val_loader": batches(2),
            "hooks": [EMAHook(momentum=0.1), LoggerHook(interval=1)],
            **unit,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The state at the end of the run that nothing interrupted, made once."""
    made: dict[str, dict[str, Any]] = {}

    def state(unit: dict[str, Any]) -> dict[str, Any]:
        if str(unit) not in made:
            directory = tmp_path_factory.mktemp("whole")
            trainer = build(lambda **changes: build_trainer(work_dir=directory, **changes), unit)
            trainer.train()
            trainer.close()
            made[str(unit)] = state_of(trainer)
        return made[str(unit)]

    return state


def fail_once(trainer: Trainer, event: str, iteration: int) -> None:
    """Raise in a handler, the first time `event` comes after so many iterations."""

    def faulty(trainer: Trainer, event: Event) -> None:
        if trainer.iter >= iteration:
            failing.cancel()
            raise ValueError("no luck")

    failing = trainer.bus.subscribe(faulty, event, name="faulty")


def fail_in_the_step(trainer: Trainer, iteration: int) -> None:
    """Raise in the loss function of an iteration, once."""
    loss_fn, failed = trainer.loss_fn, list[int]()

    def faulty(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if trainer.iter == iteration and not failed:
            failed.append(iteration)
            raise ValueError("no luck")
        return loss_fn(outputs, target)  # type: ignore[no-any-return,misc]

    trainer.loss_fn = faulty


def press_ctrl_c(trainer: Trainer, event: str, times: int) -> None:
    """Press Ctrl-C in a handler of the first such event, behind all others."""

    def press(event: Event) -> None:
        for _ in range(times):
            send(signal.SIGINT)

    trainer.bus.subscribe(press, event, once=True, priority="LOWEST", name="presses")


def train_twice(trainer: Trainer, error: type[BaseException] = ValueError) -> None:
    """The first run ends by an error."""
    with pytest.raises(error):
        trainer.train()
    assert trainer.bus.closed
    trainer.train()


HANDLERS = [
    ("before_train_iter", 6),
    ("after_backward", 6),
    ("before_optimizer_step", 6),
    ("after_optimizer_step", 6),
    ("before_val", 6),
    ("after_val_epoch", 6),
    ("after_train_epoch", 6),
    ("before_train_epoch", 0),
    ("after_train", 0),
]
ENDS: list[tuple[dict[str, Any], Callable[..., None], tuple[Any, ...], type[BaseException]]] = [
    (EPOCHS, fail_once, ("after_train_iter", 6), ValueError),
    (ITERATIONS, fail_once, ("after_val_iter", 6), ValueError),
    (EPOCHS, fail_in_the_step, (4,), ValueError),  # the first of a pass, whose order is found again
    (EPOCHS, press_ctrl_c, ("after_train_iter", 1), KeyboardInterrupt),  # stops at the boundary
    (EPOCHS, press_ctrl_c, ("after_train_iter", 2), KeyboardInterrupt),  # ends at once
    *((EPOCHS, fail_in_the_step, (iteration,), ValueError) for iteration in (0, 6)),
    *(
        (EPOCHS, press_ctrl_c, (event, 1), KeyboardInterrupt)
        for event in ("before_train_iter", "after_val_iter")
    ),
    *(
        (EPOCHS, press_ctrl_c, (event, 2), KeyboardInterrupt)
        for event in ("before_train_iter", "before_val_iter", "after_train")
    ),
    *(
        ((EPOCHS, ITERATIONS)[number % 2], fail_once, handler, ValueError)
        for number, handler in enumerate(HANDLERS)
    ),
]


@pytest.mark.representative(2)
@pytest.mark.parametrize(("unit", "end", "arguments", "error"), ENDS)
def test_the_second_run_goes_on(
    make_trainer: MakeTrainer,
    whole: Callable[..., Any],
    default_handlers: None,
    unit: dict[str, Any],
    end: Callable[..., None],
    arguments: tuple[Any, ...],
    error: type[BaseException],
) -> None:
    """It ends with the very state of a run that nothing interrupted: after errors of handlers and of the step, after
    Ctrl-C, and after a second one."""
    trainer = build(make_trainer, unit)
    end(trainer, *arguments)

    train_twice(trainer, error)

    assert (trainer.iter, trainer.bus.closed) == (12, False)
    assert_same(whole(unit), state_of(trainer))


@pytest.mark.representative(2)
@pytest.mark.parametrize(
    ("event", "iteration", "scaled"),
    [
        ("before_optimizer_step", 3, True),
        ("after_backward", 1, False),
        ("after_backward", 0, True),
        ("after_backward", 11, True),
        ("before_optimizer_step", 11, False),
        ("after_optimizer_step", 3, False),
    ],
)
def test_a_window_keeps_its_gradients(
    make_trainer: MakeTrainer, scaled: bool, event: str, iteration: int
) -> None:
    """No batch of a window is accumulated twice, and none is lost: if the step fails, its iteration is done again."""
    trainers = []
    for _ in range(2):
        hook = AmpOptimizerHook(512.0, "bfloat16", 4) if scaled else GradientCumulativeOptimizerHook(4)
        trainers.append(build(make_trainer, EPOCHS, hooks=[hook]))
        if trainers[1:]:
            fail_once(trainers[1], event, iteration)
            train_twice(trainers[1])
        else:
            trainers[0].train()

    assert trainers[1].iter == 12
    assert_same(state_of(trainers[0]), state_of(trainers[1]))


@pytest.mark.parametrize("every", [None, 2], ids=["each iteration", "accumulated"])
def test_no_optimizer_steps_twice(make_trainer: MakeTrainer, every: int | None) -> None:
    """If the step of the second of two optimizers fails, the first has made its own: the iteration counts."""

    class Fails(torch.optim.SGD):
        failing = True

        def step(self, closure: Any = None) -> Any:
            if self.failing:
                self.failing = False
                raise ValueError("no luck")
            return super().step(closure)

    model = torch.nn.Linear(2, 3)
    optimizers = {"first": torch.optim.SGD([model.weight], lr=0.1), "second": Fails([model.bias], lr=0.1)}
    steps: list[int] = []
    optimizers["first"].register_step_post_hook(lambda *_: steps.append(trainer.iter))
    hooks = [] if every is None else [GradientCumulativeOptimizerHook(every)]
    trainer = make_trainer(
        model=model, optimizer=optimizers, train_loader=batches(4), max_epochs=1, hooks=hooks
    )

    train_twice(trainer)

    assert steps == ([0, 1, 2, 3] if every is None else [1, 3])


class Full(Writer):
    """Meet a full disk at the fifth step of the first run."""

    events = (BeforeRun, AfterRun, ScalarsLogged)
    on_error = "raise"

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.seen: list[Event] = []

    def open(self, run: Any) -> None:
        self.opened.append(run.start_iter)

    def write(self, event: Event) -> None:
        if isinstance(event, ScalarsLogged) and event.step == 5 and len(self.opened) == 1:
            raise OSError("disk full")
        self.seen.append(event)


def test_after_a_writers_error(make_trainer: MakeTrainer, whole: Callable[..., Any]) -> None:
    """With `on_error="raise"` it ends the run; the writer opens again and goes on."""
    trainer = build(make_trainer, EPOCHS, writers=[writer := Full()])
    trainer.bus.subscribe(lambda event: trainer.bus.flush(), "before_train_iter", name="in step")

    train_twice(trainer, OSError)

    assert_same(whole(EPOCHS), state_of(trainer))
    assert writer.opened[0] == 0
    assert 5 <= writer.opened[1] <= 6
    runs = [type(event) for event in writer.seen if not isinstance(event, ScalarsLogged)]
    assert runs == [BeforeRun, AfterRun, BeforeRun, AfterRun]


def test_after_a_hand_written_loop(make_trainer: MakeTrainer) -> None:
    """Its body has left the epoch, as `break` would: the next one is the next epoch."""
    trainer = build(make_trainer, EPOCHS)
    with pytest.raises(ValueError, match="no luck"):  # noqa: PT012
        for _ in trainer.epochs():
            for batch in trainer.batches(trainer.train_loader or ()):
                if trainer.iter == 6:
                    raise ValueError("no luck")
                trainer.outputs = trainer.train_step(batch)
    assert (trainer.iter, trainer.epoch) == (6, 2)

    trainer.train()

    assert (trainer.iter, trainer.epoch) == (10, 3)


def test_a_loop_that_something_holds(make_trainer: MakeTrainer) -> None:
    """A progress bar in a notebook keeps the generators of a loop that an error has left: `close` ends it, the innermost
    first, and the trainer trains again."""
    trainer = build(make_trainer, EPOCHS)
    events = collect(trainer, "after_train_epoch", "after_train", "after_run")
    held = trainer.epochs()
    next(held)
    batches = trainer.batches(trainer.train_loader or ())
    next(batches)
    with pytest.raises(RuntimeError, match=r"in the middle of a run .*trainer\.close\(\)"):
        trainer.train()

    trainer.close()

    assert [event_name(event) for event in events] == ["after_train_epoch", "after_train", "after_run"]
    assert [event.reason for event in events] == ["left"] * 3
    trainer.train()
    assert (trainer.epoch, [*held], [*batches]) == (3, [], [])


REFUSED = r"trainer\.close\(\) was called in the middle of a run .*call trainer\.stop\(reason\)"


@pytest.mark.representative(1)
@pytest.mark.parametrize("where", ["handler", "val", "thread"])
def test_a_close_within_a_hand_written_loop_is_refused(make_trainer: MakeTrainer, where: str) -> None:
    """It changes nothing: the loop trains to its end, and the closing events come once, behind it."""
    trainer = build(make_trainer, EPOCHS)
    seen = collect(trainer, "after_train_iter", "after_train", "after_run")
    errors: list[str] = []

    def close() -> None:
        with pytest.raises(RuntimeError, match=REFUSED) as caught:
            trainer.close()
        errors.append(str(caught.value))

    if where != "thread":
        event = "before_train_iter" if where == "handler" else "after_val_iter"
        trainer.bus.subscribe(lambda event: close(), event, once=True, name="closes")
    for _ in trainer.epochs():
        for batch in trainer.batches(trainer.train_loader or ()):
            trainer.outputs = trainer.train_step(batch)
            if trainer.iter == 2 and where == "val":
                trainer.val()
            if trainer.iter == 2 and where == "thread":
                thread = threading.Thread(target=close, name="other")
                thread.start()
                thread.join()

    (error,) = errors
    assert ("'other'" in error) == (where == "thread")
    assert [event_name(event) for event in seen] == ["after_train_iter"] * 12 + ["after_train", "after_run"]
    assert seen[-1].reason == "completed"


def test_a_close_within_train_is_refused(make_trainer: MakeTrainer) -> None:
    """Background subscribers are given what comes after it."""
    trainer = build(make_trainer, EPOCHS)
    seen: list[Any] = []
    trainer.bus.subscribe(seen.append, "after_train_iter", offload="thread", name="taking")
    trainer.bus.subscribe(lambda event: trainer.close(), "after_train_iter", once=True, name="closes")

    with pytest.raises(RuntimeError, match=REFUSED):
        trainer.train()
    trainer.train()

    assert [event.iter for event in seen] == [*range(12)]


def test_a_loop_of_a_thread_that_has_ended(make_trainer: MakeTrainer) -> None:
    """Nobody else goes on with it: any thread closes it."""
    trainer = build(make_trainer, EPOCHS)
    events = collect(trainer, "after_run")
    held = trainer.epochs()
    thread = threading.Thread(target=next, args=(held,))
    thread.start()
    thread.join()

    trainer.close()

    assert [event.reason for event in events] == ["left"]


def test_batches_that_something_holds_end_with_their_run(make_trainer: MakeTrainer) -> None:
    """They would count an epoch of the next one."""
    trainer = build(make_trainer, EPOCHS)
    events = collect(trainer, "after_train_epoch", "after_run")
    held: list[Any] = []

    with pytest.raises(ValueError, match="no luck"):  # noqa: PT012
        for _ in trainer.epochs():
            held.append(trainer.batches(trainer.train_loader or ()))
            next(held[0])
            raise ValueError("no luck")

    assert [type(event).__name__ for event in events] == ["AfterTrainEpoch", "AfterRun"]
    assert not trainer.running


def test_an_error_of_the_last_handler_closes_the_bus(make_trainer: MakeTrainer) -> None:
    """A run that fails in a handler of `after_run` leaves nothing running, as one that fails before."""
    trainer = make_trainer()
    fail_once(trainer, "after_run", 0)

    train_twice(trainer)

    assert not trainer.running


def test_a_subscriber_that_is_refused_opens_no_bus(make_trainer: MakeTrainer) -> None:
    """A closed trainer stays closed."""
    trainer = make_trainer()
    trainer.close()

    with pytest.raises(ValueError, match="no_such_event"):
        trainer.bus.subscribe(print, "no_such_event", offload="thread")

    assert trainer.bus.closed


def test_files_are_whole(make_trainer: MakeTrainer) -> None:
    """Writers append: each step is there once, in its order, and nothing is written over."""
    writers = [JSONLWriter(), CSVWriter(), EventLogWriter(), TensorBoardWriter()]
    trainer = build(make_trainer, EPOCHS, writers=writers)
    fail_once(trainer, "after_train_iter", 6)

    train_twice(trainer)
    trainer.close()

    run, steps = trainer.work_dir, [*range(1, 13)]
    lines = [*read_jsonl(run / "metrics.jsonl")]
    assert [line["step"] for line in lines if line.get("mode") == "train" and "loss" in line] == steps
    ends = [line.get("error") for line in lines if line.get("event") == "after_run"]
    assert ends == ["ValueError: no luck", None]
    assert [int(row["step"]) for row in rows(run / "metrics.csv") if row["mode"] == "train"] == steps
    logged = [record.event for record in read_events(run) if isinstance(record.event, ScalarsLogged)]
    assert [event.step for event in logged if event.mode == "train" and "loss" in event.scalars] == steps
    assert _tensorboard_steps(run / "tensorboard") == steps


def _tensorboard_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return [scalar.step for scalar in read.Scalars("train/loss")]
