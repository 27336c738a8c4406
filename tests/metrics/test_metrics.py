"""Numbers of a run: each value that is put is delivered at its own iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eventloop.events import ScalarsLogged
from eventloop.metrics import EventStorage
from eventloop.metrics.history import HistoryBuffer
from eventloop.metrics.rows import RunLimits
from eventloop.metrics.storage import CHECK_EVERY, COLLECT_AT, PENDING_LIMIT


def logged(storage: EventStorage) -> list[Any]:
    """The events of everything put since the last call."""
    return storage.collect(RunLimits(100, 10)).events()


def scalars(storage: EventStorage) -> list[tuple[int, dict[str, float]]]:
    """The step and the scalars of each event."""
    return [(event.step, event.scalars) for event in logged(storage)]


def newest(storage: EventStorage) -> dict[str, float]:
    """The last value of each name."""
    return {name: value for name, (value, _) in storage.latest().items()}


# --- histories ---------------------------------------------------------------------------------------------


def history_of(*values: float, every: int = 1, **options: Any) -> HistoryBuffer:
    """A history of values that were put `every` so many iterations."""
    history = HistoryBuffer(**options)
    for i, value in enumerate(values):
        history.update(value, i * every)
    return history


def test_history_of_the_last_iterations() -> None:
    """Windows are counted in iterations, not in values."""
    history = history_of(0.0, 10.0, 20.0, 30.0, 40.0, every=10)

    assert history.window(20) == [30.0, 40.0]
    assert (history.median(20), history.avg(20), history.latest()) == (35.0, 35.0, 40.0)
    assert history.window(1) == [40.0]


def test_history_is_bounded_and_its_global_average_is_not() -> None:
    """A history keeps the last `max_length` values; `global_avg` and `len` are over all of them."""
    history = history_of(0.0, 1.0, 2.0, 3.0, max_length=2)

    assert history.values() == [(2.0, 2), (3.0, 3)]
    assert (history.global_avg(), len(history)) == (1.5, 4)


def test_empty_history() -> None:
    """An empty history has no statistic."""
    empty = HistoryBuffer()
    for ask in (
        empty.latest,
        empty.current,
        empty.mean,
        empty.min,
        empty.max,
        lambda: empty.avg(1),
        lambda: empty.median(1),
        empty.global_avg,
    ):
        with pytest.raises(ValueError, match="the history is empty"):
            ask()


def test_mmengines_statistics() -> None:
    """`mean`, `min` and `max` are of a window in iterations, or of all values that are kept."""
    history = history_of(9.0, 4.0, 1.0, 3.0, 2.0, every=10, max_length=4)

    assert (history.mean(20), history.min(20), history.max(window_size=30)) == (2.5, 2.0, 3.0)
    assert (history.mean(), history.min(), history.max(), history.current()) == (2.5, 1.0, 4.0, 2.0)
    assert history.statistics("max", 20) == 3.0
    assert history.statistics("mean", window_size=1) == history.statistics("current") == 2.0


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.nan, 1.0]])
def test_the_extremes_of_a_history_with_a_nan(values: list[float]) -> None:
    """Minimum and maximum are NaN wherever in the window the NaN is."""
    history = history_of(*values)

    assert math.isnan(history.min())
    assert math.isnan(history.max())


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: history_of(1.0).statistics("maen"),
            "method_name must be .*, got 'maen': did you mean 'mean'",
        ),
        (lambda: history_of(1.0).avg(0), "window must be at least 1 .*got 0"),
        (lambda: history_of(1.0).median(0), "window must be at least 1 .*got 0"),
        (lambda: history_of(1.0).max(0), "window must be at least 1 .*got 0"),
        (lambda: HistoryBuffer(0), "max_length must be at least 1, got 0"),
    ],
)
def test_a_statistic_that_is_not_there(ask: Callable[[], object], message: str) -> None:
    """Another name, a window of no iteration and a history of no length are refused."""
    with pytest.raises(ValueError, match=message):
        ask()


def test_values_without_an_iteration() -> None:
    """As in fvcore the iteration may be left out: it counts on from the last one that was given."""
    history = HistoryBuffer()
    for arguments in ((1.0,), (2.0,), (3.0, 10), (4.0,)):
        history.update(*arguments)

    assert history.values() == [(1.0, 0), (2.0, 1), (3.0, 10), (4.0, 11)]
    assert history.avg(2) == 3.5


# --- what is delivered -------------------------------------------------------------------------------------


def test_a_smoothed_name_says_its_mean() -> None:
    """A name with a smoothing hint is delivered once an interval: its mean, at its last iteration."""
    storage = EventStorage()
    for storage.iter in range(4):
        storage.put_scalar("loss", float(storage.iter))

    assert logged(storage) == [
        ScalarsLogged(step=4, iter=3, scalars={"loss": 1.5}, max_iters=100, max_epochs=10)
    ]
    assert logged(storage) == []


def test_a_name_put_alone_and_with_others() -> None:
    """However a name is put, its values are one history in order, and have one mean."""
    storage = EventStorage()
    storage.put_scalars({"x": 1.0, "y": 5.0})
    storage.put_scalars({"x": 3.0})
    storage.put_floats(("x",), [2.0])
    storage.iter = 1
    storage.put_scalar("x", 6.0)

    assert storage.history("x").values() == [(1.0, 0), (3.0, 0), (2.0, 0), (6.0, 1)]
    assert scalars(storage) == [(1, {"y": 5.0}), (2, {"x": 3.0})]


def test_names_of_an_interval_of_one_iteration_are_one_event() -> None:
    """With and without a hint, put together and alone; a value of another iteration has its own event."""
    storage = EventStorage()
    storage.iter = 3
    storage.put_scalars({"loss": 2.0, "accuracy": 0.5})
    storage.put_scalar("lr", 0.1, smoothing_hint=False)
    storage.put_scalar("late", 7.0, cur_iter=1)

    assert scalars(storage) == [(2, {"late": 7.0}), (4, {"loss": 2.0, "accuracy": 0.5, "lr": 0.1})]


def test_other_values_are_delivered_each() -> None:
    """Without a smoothing hint every value is delivered, also two of one iteration."""
    storage = EventStorage()
    storage.put_scalar("lr", 0.5, smoothing_hint=False)
    for storage.iter in range(2):
        storage.put_scalar("lr", storage.iter / 10, smoothing_hint=False)

    assert scalars(storage) == [(1, {"lr": 0.5}), (1, {"lr": 0.0}), (2, {"lr": 0.1})]


def test_a_late_value_keeps_its_iteration() -> None:
    """A value put for an earlier iteration is delivered at that one."""
    storage = EventStorage(start_iter=9)
    storage.put_scalar("slow", 1.0, smoothing_hint=False, cur_iter=4)
    storage.put_scalar("fast", 2.0, smoothing_hint=False)

    assert [(event.iter, event.step, event.scalars) for event in logged(storage)] == [
        (4, 5, {"slow": 1.0}),
        (9, 10, {"fast": 2.0}),
    ]


def test_values_of_a_validation_have_their_own_mode_and_step() -> None:
    """A value put in a validation is at the completed iterations, and apart from training's of the same name."""
    storage = EventStorage(start_iter=9)
    storage.put_scalar("loss", 1.0)
    storage.iter, storage.mode, storage.epoch = 10, "val", 1
    storage.put_scalar("loss", 2.0)

    assert [(e.mode, e.iter, e.step, e.epoch, e.scalars) for e in logged(storage)] == [
        ("train", 9, 10, 0, {"loss": 1.0}),
        ("val", 10, 10, 1, {"loss": 2.0}),
    ]


def test_values_between_two_iterations() -> None:
    """A value put between two iterations has the next one as `iter` and the completed ones as `step`."""
    storage = EventStorage(start_iter=10)
    storage.in_iteration = False
    storage.put_scalar("epoch_score", 1.0)

    assert [(event.iter, event.step) for event in logged(storage)] == [(10, 10)]


def test_an_interval_over_two_epochs_has_one_mean() -> None:
    """The mean is at the last iteration and in the last epoch."""
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    storage.iter, storage.epoch = 1, 1
    storage.put_scalar("loss", 4.0)

    (event,) = logged(storage)
    assert (event.step, event.epoch, event.scalars) == (2, 1, {"loss": 2.5})


# --- what may be put ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        True,
        torch.tensor([1.0]),
        torch.tensor([[1.0]], dtype=torch.float64),
        torch.tensor(True),
        *(
            torch.tensor(1.0).to(dtype)
            for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
        ),
    ],
    ids=repr,
)
def test_numbers(value: Any) -> None:
    """Ints, floats, truth values and tensors of one element of any real type are numbers."""
    storage = EventStorage()
    storage.put_scalar("x", value)

    assert storage.latest() == {"x": (1.0, 0)}


def test_numpy_numbers() -> None:
    """NumPy's scalars and arrays of one element are numbers too."""
    storage = EventStorage()
    storage.put_scalars({"a": np.float32(2), "b": np.int64(3), "c": np.array([4.0])})  # type: ignore[dict-item]

    assert newest(storage) == {"a": 2.0, "b": 3.0, "c": 4.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"scalar 'x' must be one number, got a tensor of shape \(3,\)"),
        ("2", "scalar 'x' must be a number or a tensor of one element, got '2'"),
        (None, "got None"),
        ([1.0], r"got \[1.0\]"),
        (np.complex64(1j), "scalar 'x' must be a number or a tensor of one element, got"),
        (np.array("1.5"), "scalar 'x' must be a number or a tensor of one element, got"),
        (np.array([None]), "scalar 'x' must be a number or a tensor of one element, got"),
        (1j, "scalar 'x' must be a number or a tensor of one element, got"),
        (10**400, r"scalar 'x' must be within the range of a float, up to 1\.8e308"),
    ],
    ids=repr,
)
def test_what_is_no_number(value: Any, message: str) -> None:
    """Any other value is refused where it is put, with all values put together with it."""
    storage = EventStorage()
    with pytest.raises(TypeError, match=message):
        storage.put_scalar("x", value)
    with pytest.raises(TypeError, match=message):
        storage.put_scalars({"a": 1.0, "x": value})

    assert storage.latest() == {}


def test_a_name_that_is_no_text() -> None:
    """A name must be a str, alone and in a mapping."""
    names: Any = {3: 1.0}
    with pytest.raises(TypeError, match="the name of a scalar must be a str, got 3"):
        EventStorage().put_scalar(*names.popitem())
    with pytest.raises(TypeError, match="the name of a scalar must be a str, got None"):
        EventStorage().put_scalars({"x": 1.0, None: 1.0})  # type: ignore[dict-item]


def test_one_hint_a_name() -> None:
    """A name keeps the smoothing hint of its first value; floats have one."""
    storage = EventStorage()
    storage.put_scalar("x", 1.0)
    storage.put_scalar("y", 1.0, smoothing_hint=False)

    with pytest.raises(ValueError, match="'x' was put with smoothing_hint=True before"):
        storage.put_scalar("x", 1.0, smoothing_hint=False)
    with pytest.raises(ValueError, match="'y' was put with smoothing_hint=False before"):
        storage.put_floats(("x", "y"), [1.0, 2.0])


def test_the_numbers_among_other_values() -> None:
    """`put_numbers` leaves out other values, under the scope that is open; without a number it puts nothing."""
    storage = EventStorage()
    with storage.name_scope("step"):
        storage.put_numbers(
            {"loss": torch.tensor(1.5), "n": 3, "array": np.ones(1), "logits": torch.zeros(4), "text": "none"}
        )
    assert newest(storage) == {"step/loss": 1.5, "step/n": 3.0, "step/array": 1.0}

    pending = storage.pending
    storage.put_numbers({"logits": torch.zeros(4)})
    assert storage.pending == pending


def test_floats_by_a_tuple_of_names() -> None:
    """`put_floats` is `put_scalars` of names and values apart; it copies the values, and knows scopes."""
    storage, names, values = EventStorage(), ("a", "b"), [1.0, 2.0]
    storage.put_floats(names, values)
    values[:] = [9.0, 9.0]
    with storage.name_scope("in"):
        storage.put_floats(names, [3.0, 4.0])

    assert scalars(storage) == [(1, {"a": 1.0, "b": 2.0, "in/a": 3.0, "in/b": 4.0})]
    with pytest.raises(ValueError, match="put_floats expects one float per name, got 1 "):
        storage.put_floats(names, [1.0])


def test_a_history_that_is_held_goes_on() -> None:
    """Code that has a history sees the values that the background reads from then on."""
    storage = EventStorage()
    storage.put_scalar("loss", 0.0)
    history = storage.history("loss")
    for storage.iter in range(1, 5):
        storage.put_scalar("loss", float(storage.iter))
        logged(storage)

    assert [value for value, _ in history.values()] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_tensor_that_has_no_tolist() -> None:
    """A subclass such as DTensor, whose `tolist` refuses, is read as well."""

    class Refuses(torch.Tensor):
        def tolist(self) -> Any:
            raise RuntimeError(".tolist() is not supported")

    storage = EventStorage()
    storage.put_scalar("norm", torch.tensor(4.0).as_subclass(Refuses))

    assert storage.latest() == {"norm": (4.0, 0)}


# --- memory ------------------------------------------------------------------------------------------------


def test_values_that_are_not_collected_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A `collect` is asked for at half of the limit; beyond it the histories keep what is not logged, and one
    warning reports it."""
    storage, count = EventStorage(), 2 * PENDING_LIMIT
    for storage.iter in range(COLLECT_AT):
        storage.put_scalar("loss", 1.0)
    assert not storage.crowded

    for storage.iter in range(COLLECT_AT, count):
        storage.put_scalar("loss", 1.0)

    assert storage.crowded
    assert storage.pending <= PENDING_LIMIT + CHECK_EVERY
    assert len(storage.history("loss")) == count
    assert caplog.text.count("metrics are not collected") == 1


def test_many_sets_of_names_are_not_all_remembered() -> None:
    """Names that come in ever other combinations keep their histories."""
    storage = EventStorage()
    for n in range(2_048):
        storage.put_scalars({"x": 1.0, f"y{n % 7}": 2.0, f"z{n // 7 % 300}": 3.0})

    assert len(storage.history("x")) == 2_048


def test_a_buffer_changed_in_place() -> None:
    """A tensor that its owner goes on changing is delivered as it was when it was put."""
    storage, running = EventStorage(), torch.zeros(())
    for storage.iter in range(3):
        storage.put_scalar("running", running.add_(1), smoothing_hint=False)

    assert scalars(storage) == [(1, {"running": 1.0}), (2, {"running": 2.0}), (3, {"running": 3.0})]


def test_tensors_of_a_cpu_are_not_kept_for_long() -> None:
    """Where values are seldom collected, tensors on the CPU become numbers after a while; those of a device, for which
    a meta tensor stands, do not, as that would wait for it."""
    storage = EventStorage()
    storage.put_scalars({"a": 1.0, "b": 1.0})  # the first values of names must be readable
    storage.collect()
    for storage.iter in range(CHECK_EVERY + 1):
        storage.put_scalar("loss", torch.tensor(float(storage.iter)))
        storage.put_scalars({"a": torch.tensor(1.0), "b": torch.empty((), device="meta")})

    rows = storage.collect().rows
    waiting = [row for row in rows if isinstance(row.values, torch.Tensor)]
    assert len(rows) == 2 * CHECK_EVERY + 2
    assert len(waiting) <= CHECK_EVERY // 2 + 1
    assert [row.values for row in rows[:4:2]] == [0.0, 1.0]
    assert isinstance(rows[1].values, list)
    assert rows[1].values[0] == 1.0
    assert isinstance(rows[1].values[1], torch.Tensor)


def test_a_value_of_the_graph_keeps_neither_graph_nor_base() -> None:
    """One element of a large result is kept detached, and without the other elements."""
    storage = EventStorage()
    storage.put_scalar("one", (torch.ones(1000, requires_grad=True) * 2)[0])
    storage.put_scalar("loss", torch.ones((), requires_grad=True) * 2)

    for row in storage.collect().rows:
        assert isinstance(row.values, torch.Tensor)
        assert not row.values.requires_grad
        assert row.values.untyped_storage().nbytes() == 4


# --- name_scope --------------------------------------------------------------------------------------------


def test_name_scopes_nest() -> None:
    """Inside name_scope names get its prefix, and the outer ones'."""
    storage = EventStorage()
    with storage.name_scope("head"), storage.name_scope("cls/"):
        storage.put_scalar("loss", 1.0)
    storage.put_scalar("loss", 2.0)

    assert storage.latest().keys() == {"head/cls/loss", "loss"}


def test_name_scope_ends_with_an_exception() -> None:
    """A block that raises leaves no prefix behind."""
    storage = EventStorage()
    with pytest.raises(ZeroDivisionError), storage.name_scope("head"):
        raise ZeroDivisionError

    storage.put_scalar("loss", 1.0)
    assert storage.latest().keys() == {"loss"}


# --- reading on the training thread ------------------------------------------------------------------------


def test_latest_with_smoothing_hint() -> None:
    """The median over the window where a name is smoothed, the last value where it is not."""
    storage = EventStorage()
    for storage.iter, value in enumerate([9.0, 1.0, 2.0, 3.0]):
        storage.put_scalar("loss", value)
        storage.put_scalar("lr", value, smoothing_hint=False)

    assert storage.latest_with_smoothing_hint(3) == {"loss": (2.0, 3), "lr": (3.0, 3)}
    assert storage.latest() == {"loss": (3.0, 3), "lr": (3.0, 3)}


def test_reading_early_neither_loses_nor_doubles() -> None:
    """A value read before the end of its interval is in the history once, and delivered once."""
    storage = EventStorage()
    for storage.iter in range(4):
        storage.put_scalar("loss", torch.tensor(float(storage.iter)))
        assert storage.latest()["loss"] == (float(storage.iter), storage.iter)

    assert scalars(storage) == [(4, {"loss": 1.5})]
    assert storage.history("loss").values() == [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 3)]


def test_reading_between_collect_and_delivery() -> None:
    """Values on their way to the writers are read, in order, and delivered all the same."""
    storage = EventStorage()
    storage.put_scalar("loss", torch.tensor(1.0))
    packet = storage.collect()
    storage.iter = 1
    storage.put_scalar("loss", torch.tensor(2.0))

    assert storage.history("loss").values() == [(1.0, 0), (2.0, 1)]
    assert [event.scalars for event in packet.events()] == [{"loss": 1.0}]  # type: ignore[attr-defined]
    assert scalars(storage) == [(2, {"loss": 2.0})]


def test_unknown_history() -> None:
    """A misspelled name gets a suggestion, or the message that nothing was put."""
    storage = EventStorage()
    with pytest.raises(KeyError, match="no scalar 'loss': nothing was put yet"):
        storage.history("loss")

    storage.put_scalar("loss", 1.0)

    with pytest.raises(KeyError, match=r"no scalar 'los': did you mean 'loss'\?; known are loss"):
        storage.history("los")
