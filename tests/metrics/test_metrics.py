"""Numbers of a run: what is put is delivered, each at its own iteration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from eventloop.events import ScalarsLogged
from eventloop.metrics import EventStorage
from eventloop.metrics.history import HistoryBuffer
from eventloop.metrics.rows import Place
from eventloop.metrics.shapes import SHAPES_LIMIT
from eventloop.metrics.storage import CHECK_EVERY, COLLECT_AT, PENDING_LIMIT


def logged(storage: EventStorage) -> list[Any]:
    """What is delivered of everything put since the last time."""
    return storage.collect(Place(100, 10)).events()


def scalars(storage: EventStorage) -> list[tuple[int, dict[str, float]]]:
    """The step and the scalars of each event."""
    return [(event.step, event.scalars) for event in logged(storage)]


# --- histories ---------------------------------------------------------------------------------------------


def test_history_of_the_last_iterations() -> None:
    """Windows are counted in iterations, not in values: a value put every 10th counts where it was put."""
    history = HistoryBuffer()
    for iteration in range(0, 50, 10):
        history.update(float(iteration), iteration)

    assert history.window(20) == [30.0, 40.0]
    assert (history.median(20), history.avg(20), history.latest()) == (35.0, 35.0, 40.0)
    assert history.window(1) == [40.0]


def test_history_is_bounded_and_its_global_average_is_not() -> None:
    """A history keeps the last `max_length` values; `global_avg` and `len` are over all of them."""
    history = HistoryBuffer(max_length=2)
    for iteration in range(4):
        history.update(float(iteration), iteration)

    assert history.values() == [(2.0, 2), (3.0, 3)]
    assert (history.global_avg(), len(history)) == (1.5, 4)


def test_empty_history() -> None:
    """Asked for a number, an empty history is an error that says so."""
    empty = HistoryBuffer()
    for ask in (
        empty.latest, empty.current, empty.mean, empty.min, empty.max, lambda: empty.avg(1),
        lambda: empty.median(1), empty.global_avg,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the history is empty"):
            ask()


def test_mmengines_statistics() -> None:
    """`mean`, `min` and `max` are of a window, in iterations as every window is, or of all that is kept."""
    history = HistoryBuffer(max_length=4)
    for iteration, value in enumerate([9.0, 4.0, 1.0, 3.0, 2.0]):
        history.update(value, 10 * iteration)

    assert (history.mean(20), history.min(20), history.max(window_size=30)) == (2.5, 2.0, 3.0)
    assert (history.mean(), history.min(), history.max(), history.current()) == (2.5, 1.0, 4.0, 2.0)
    assert history.statistics("max", 20) == 3.0
    assert history.statistics("mean", window_size=1) == history.statistics("current") == 2.0


@pytest.mark.parametrize("values", [[1.0, float("nan")], [float("nan"), 1.0]])
def test_the_extremes_of_a_history_with_a_nan(values: list[float]) -> None:
    """Wherever it stands, a NaN in the window is what the least and the greatest are."""
    history = HistoryBuffer()
    for value in values:
        history.update(value)

    assert math.isnan(history.min())
    assert math.isnan(history.max())


def test_a_statistic_that_is_not_there() -> None:
    """Its name is refused with the one that was meant."""
    history = HistoryBuffer()
    history.update(1.0)

    with pytest.raises(ValueError, match="a history has no statistic 'maen': did you mean 'mean'"):
        history.statistics("maen")


def test_values_without_an_iteration() -> None:
    """As in fvcore the iteration may be left out: the values count on, from 0 or from the last one that was given."""
    history = HistoryBuffer()
    for value in (1.0, 2.0):
        history.update(value)
    history.update(3.0, 10)
    history.update(4.0)

    assert history.values() == [(1.0, 0), (2.0, 1), (3.0, 10), (4.0, 11)]
    assert history.avg(2) == 3.5


def test_a_window_of_nothing() -> None:
    """A window has at least one iteration."""
    history = HistoryBuffer()
    history.update(1.0, 0)

    for ask in (history.avg, history.median, history.mean, history.min, history.max):
        with pytest.raises(ValueError, match=r"a window must be at least 1 .*got 0"):
            ask(0)


def test_history_without_room() -> None:
    """A history that could hold nothing is refused."""
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        HistoryBuffer(0)


# --- what is delivered -------------------------------------------------------------------------------------


def test_a_smoothed_name_says_its_mean(bus: Any) -> None:
    """A name with a smoothing hint is delivered once an interval: its mean, at its last iteration."""
    storage = EventStorage()
    for storage.iter in range(4):
        storage.put_scalar("loss", float(storage.iter))

    assert scalars(storage) == [(4, {"loss": 1.5})]


def test_a_name_that_is_put_alone_and_with_others_has_one_mean() -> None:
    """Also where each way was taken once: a name is what it is, however it is put."""
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    storage.iter = 1
    storage.put_scalars({"loss": 2.0, "accuracy": 0.5})

    assert scalars(storage) == [(2, {"loss": 1.5, "accuracy": 0.5})]


def test_names_of_an_interval_of_one_iteration_are_one_event() -> None:
    """With and without a hint, put together and alone; what was put for another iteration is one of its own."""
    storage = EventStorage()
    storage.iter = 3
    storage.put_scalars({"loss": 2.0, "accuracy": 0.5})
    storage.put_scalar("lr", 0.1, smoothing_hint=False)
    storage.put_scalar("late", 7.0, cur_iter=1)

    assert scalars(storage) == [(2, {"late": 7.0}), (4, {"loss": 2.0, "accuracy": 0.5, "lr": 0.1})]


def test_other_values_are_delivered_each() -> None:
    """Without a smoothing hint every value is delivered, at the iteration it was put for."""
    storage = EventStorage()
    for storage.iter in range(3):
        storage.put_scalar("lr", storage.iter / 10, smoothing_hint=False)

    assert scalars(storage) == [(1, {"lr": 0.0}), (2, {"lr": 0.1}), (3, {"lr": 0.2})]


def test_two_values_of_one_iteration_are_delivered_each() -> None:
    """A name put twice in an iteration without a smoothing hint loses neither value."""
    storage = EventStorage()
    storage.put_scalar("lr", 1.0, smoothing_hint=False)
    storage.put_scalar("lr", 2.0, smoothing_hint=False)

    assert scalars(storage) == [(1, {"lr": 1.0}), (1, {"lr": 2.0})]


def test_a_late_value_keeps_its_iteration() -> None:
    """A value put for an earlier iteration is delivered at that one."""
    storage = EventStorage(start_iter=9)
    storage.put_scalar("slow", 1.0, smoothing_hint=False, cur_iter=4)
    storage.put_scalar("fast", 2.0, smoothing_hint=False)

    assert [(event.iter, event.step, event.scalars) for event in logged(storage)] == [
        (4, 5, {"slow": 1.0}), (9, 10, {"fast": 2.0}),
    ]  # fmt: skip


def test_values_of_a_validation_have_their_own_mode_and_step() -> None:
    """A value put in a validation is at the completed iterations, and apart from training's of the same name."""
    storage = EventStorage(start_iter=9)
    storage.put_scalar("loss", 1.0)
    storage.iter, storage.mode, storage.epoch = 10, "val", 1
    storage.put_scalar("loss", 2.0)

    assert [(e.mode, e.iter, e.step, e.epoch, e.scalars) for e in logged(storage)] == [
        ("train", 9, 10, 0, {"loss": 1.0}), ("val", 10, 10, 1, {"loss": 2.0}),
    ]  # fmt: skip


def test_values_between_two_iterations() -> None:
    """What is put between two iterations has the next one as `iter` and the completed ones as `step`."""
    storage = EventStorage(start_iter=10)
    storage.in_iteration = False
    storage.put_scalar("epoch_score", 1.0)

    assert [(event.iter, event.step) for event in logged(storage)] == [(10, 10)]


def test_the_events_carry_the_maxima() -> None:
    """The counters of the run are on the events that are made later."""
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)

    assert logged(storage) == [ScalarsLogged(step=1, scalars={"loss": 1.0}, max_iters=100, max_epochs=10)]


def test_nothing_is_delivered_twice() -> None:
    """A second `collect` has only what was put since the first."""
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    logged(storage)

    assert logged(storage) == []


# --- what may be put ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [2, 2.0, True + 1, torch.tensor(2), torch.tensor([2.0]), torch.tensor([[2.0]], dtype=torch.float64)],
    ids=repr,
)
def test_numbers(value: Any) -> None:
    """Ints, floats and tensors of one element of any type are numbers."""
    storage = EventStorage()
    storage.put_scalar("x", value)

    assert storage.latest() == {"x": (2.0, 0)}


def test_numpy_numbers() -> None:
    """NumPy's scalars and arrays of one element are numbers too."""
    numpy = pytest.importorskip("numpy")
    storage = EventStorage()
    storage.put_scalars({"a": numpy.float32(2), "b": numpy.int64(3), "c": numpy.array([4.0])})

    assert {name: value for name, (value, _) in storage.latest().items()} == {"a": 2.0, "b": 3.0, "c": 4.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"scalar 'x' must be one number, got a tensor of shape \(3,\)"),
        ("2", "scalar 'x' must be a number or a tensor of one element, got '2'"),
        (None, "got None"),
        ([1.0], r"got \[1.0\]"),
    ],
)
def test_what_is_no_number(value: Any, message: str) -> None:
    """Anything else is refused where it is put."""
    with pytest.raises(TypeError, match=message):
        EventStorage().put_scalar("x", value)


def test_a_name_that_is_no_text() -> None:
    """Is refused where it is put, by itself and in a mapping."""
    names: Any = {3: 1.0}
    with pytest.raises(TypeError, match="the name of a scalar must be a str, got 3"):
        EventStorage().put_scalar(*names.popitem())
    with pytest.raises(TypeError, match="the name of a scalar must be a str, got None"):
        EventStorage().put_scalars({"x": 1.0, None: 1.0})  # type: ignore[dict-item]


def test_one_hint_a_name() -> None:
    """A name that is smoothed here and not there would be delivered by halves."""
    storage = EventStorage()
    storage.put_scalar("x", 1.0)

    with pytest.raises(ValueError, match="'x' was put with smoothing_hint=True before"):
        storage.put_scalar("x", 1.0, smoothing_hint=False)


def test_a_refused_value_refuses_those_put_with_it() -> None:
    """Of several values one of which is refused none is put."""
    storage = EventStorage()

    with pytest.raises(TypeError, match="scalar 'y' must be one number, got a tensor of shape \\(2,\\)"):
        storage.put_scalars({"x": 1.0, "y": torch.zeros(2)})

    assert storage.latest() == {}


def test_a_name_put_alone_and_with_others() -> None:
    """One name, put by itself and together with another: its values are one series, in the order they were put."""
    storage = EventStorage()
    storage.put_scalars({"x": 1.0, "y": 5.0})
    storage.put_scalar("x", 2.0)
    storage.iter = 1
    storage.put_scalar("x", 6.0)

    assert storage.history("x").values() == [(1.0, 0), (2.0, 0), (6.0, 1)]
    assert scalars(storage) == [(1, {"y": 5.0}), (2, {"x": 3.0})]


def test_the_numbers_among_other_values() -> None:
    """What is no single number is left out of `put_numbers`, under the scope that is open."""
    storage = EventStorage()
    with storage.name_scope("step"):
        storage.put_numbers(
            {"loss": torch.tensor(1.5), "n": 3, "array": np.ones(1), "logits": torch.zeros(4), "text": "none"}
        )

    assert {name: value for name, (value, _) in storage.latest().items()} == {
        "step/loss": 1.5, "step/n": 3.0, "step/array": 1.0
    }  # fmt: skip


def test_no_number_among_the_values() -> None:
    """A step that returned none puts nothing."""
    storage = EventStorage()
    storage.put_numbers({"logits": torch.zeros(4)})

    assert storage.pending == 0


def test_floats_by_a_tuple_of_names() -> None:
    """`put_floats` is `put_scalars` of names and values apart, scopes included."""
    storage = EventStorage()
    storage.put_floats(("a", "b"), [1.0, 2.0])
    with storage.name_scope("in"):
        storage.put_floats(("a", "b"), [3.0, 4.0])

    assert scalars(storage) == [(1, {"a": 1.0, "b": 2.0, "in/a": 3.0, "in/b": 4.0})]


def test_an_interval_over_two_epochs_has_one_mean() -> None:
    """What was put before and after the end of an epoch is one mean, said at the last place."""
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    storage.iter, storage.epoch = 1, 1
    storage.put_scalar("loss", 4.0)

    (event,) = logged(storage)
    assert (event.step, event.epoch, event.scalars) == (2, 1, {"loss": 2.5})


def test_a_history_that_is_held_goes_on() -> None:
    """Whoever was given a history sees what the background reads from then on."""
    storage = EventStorage()
    storage.put_scalar("loss", 0.0)
    history = storage.history("loss")
    for storage.iter in range(1, 5):
        storage.put_scalar("loss", float(storage.iter))
        logged(storage)

    assert [value for value, _ in history.values()] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_floats_and_names_must_be_as_many() -> None:
    """A row that is too short is refused where it is put; a list that is filled in again changes nothing put before."""
    storage, values = EventStorage(), [1.0, 2.0]
    with pytest.raises(ValueError, match="put_floats expects one float per name, got 1 "):
        storage.put_floats(("a", "b"), [1.0])
    storage.put_floats(("a", "b"), values)
    values[:] = [9.0, 9.0]

    assert scalars(storage) == [(1, {"a": 1.0, "b": 2.0})]


def test_a_tensor_that_has_no_tolist() -> None:
    """A subclass such as DTensor, whose `tolist` refuses, is read as well."""

    class Refuses(torch.Tensor):
        def tolist(self) -> Any:
            raise RuntimeError(".tolist() is not supported")

    storage = EventStorage()
    storage.put_scalar("norm", torch.tensor(4.0).as_subclass(Refuses))

    assert storage.latest() == {"norm": (4.0, 0)}


def test_values_that_are_not_collected_are_bounded() -> None:
    """A `collect` is asked for at half of the limit; beyond the limit the histories keep what is not logged."""
    storage, count = EventStorage(), 3 * PENDING_LIMIT
    for storage.iter in range(COLLECT_AT):
        storage.put_scalar("loss", 1.0)
    assert not storage.crowded

    for storage.iter in range(COLLECT_AT, count):
        storage.put_scalar("loss", 1.0)

    assert storage.crowded
    assert storage.pending <= PENDING_LIMIT + CHECK_EVERY
    assert len(storage.history("loss")) == count


def test_many_sets_of_names_are_not_all_remembered() -> None:
    """Names that come in ever other combinations keep their histories, and take no more memory than that."""
    storage = EventStorage()
    for n in range(2 * SHAPES_LIMIT):
        storage.put_scalars({"x": 1.0, f"y{n % 7}": 2.0, f"z{n // 7 % 300}": 3.0})

    assert len(storage.history("x")) == 2 * SHAPES_LIMIT


def test_a_buffer_changed_in_place() -> None:
    """A tensor that its owner goes on changing is delivered as it was when it was put."""
    storage, running = EventStorage(), torch.zeros(())
    for storage.iter in range(3):
        storage.put_scalar("running", running.add_(1), smoothing_hint=False)

    assert scalars(storage) == [(1, {"running": 1.0}), (2, {"running": 2.0}), (3, {"running": 3.0})]


def test_tensors_of_a_cpu_are_not_kept_for_long() -> None:
    """Where nobody collects, or seldom, tensors on the CPU become numbers after a while; those of a device do not, for
    that would wait for it."""
    storage = EventStorage()
    storage.put_scalars(
        {"a": 1.0, "b": 1.0}
    )  # as names that are new are looked at: a meta tensor stands for a device's
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


NAMES = ("time", "data_time")


def test_floats_under_a_scope() -> None:
    """The names that are put in each iteration get the prefix of a scope in it, and no longer after it."""
    storage = EventStorage()
    storage.put_floats(NAMES, [1.0, 2.0])
    with storage.name_scope("inner"):
        storage.put_floats(NAMES, [3.0, 4.0])
    storage.put_floats(NAMES, [5.0, 6.0])

    latest = {name: value for name, (value, _) in storage.latest().items()}
    assert latest == {"time": 5.0, "data_time": 6.0, "inner/time": 3.0, "inner/data_time": 4.0}


def test_floats_with_another_hint() -> None:
    """Floats have a smoothing hint; names that were put without one are refused."""
    storage = EventStorage()
    storage.put_scalars(dict.fromkeys(NAMES, 1.0), smoothing_hint=False)

    with pytest.raises(
        ValueError, match="'time' was put with smoothing_hint=False before: keep one hint per name"
    ):
        storage.put_floats(NAMES, [1.0, 2.0])


def test_a_name_put_alone_and_in_a_mapping_is_one() -> None:
    """`put_scalar` and a `put_scalars` of one name go to one history, and to one mean of an interval."""
    storage = EventStorage()
    storage.put_scalar("loss", 1.0)
    storage.put_scalars({"loss": 3.0})
    storage.put_floats(("loss",), [5.0])

    assert [value for value, _ in storage.history("loss").values()] == [1.0, 3.0, 5.0]
    assert scalars(storage) == [(1, {"loss": 3.0})]


def test_a_view_of_a_large_result_does_not_keep_it() -> None:
    """One element of a large result of the graph is kept without the rest."""
    storage = EventStorage()
    large = torch.ones(1000, requires_grad=True) * 2

    storage.put_scalar("one", large[0])

    (row,) = storage.collect().rows
    value = row.values
    assert isinstance(value, torch.Tensor)
    assert value.untyped_storage().nbytes() == 4


def test_a_value_of_the_graph_keeps_no_graph() -> None:
    """What is put is detached: it keeps no activations alive."""
    storage = EventStorage()
    storage.put_scalar("loss", torch.ones((), requires_grad=True) * 2)

    (row,) = storage.collect().rows
    value = row.values
    assert isinstance(value, torch.Tensor)
    assert not value.requires_grad


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
    """What was read before the end of its interval is in the history once, and delivered once."""
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
    """A misspelled name gets a suggestion, or the word that there is none."""
    storage = EventStorage()
    with pytest.raises(KeyError, match="no scalar 'loss': nothing was put yet"):
        storage.history("loss")

    storage.put_scalar("loss", 1.0)

    with pytest.raises(KeyError, match=r"no scalar 'los': did you mean 'loss'\?; known are loss"):
        storage.history("los")


def test_a_refused_value_leaves_nothing(bus: Any) -> None:
    """A name whose first value was refused is not there."""
    storage = EventStorage()
    with pytest.raises(TypeError, match="scalar 'x' must be a number"):
        storage.put_scalar("x", "bad")  # type: ignore[arg-type]

    assert storage.latest() == {}


def test_giving_up_values_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """What nobody collects is not given up in silence."""
    storage = EventStorage()
    for storage.iter in range(2 * PENDING_LIMIT):
        storage.put_scalar("loss", 1.0)

    assert caplog.text.count("metrics are not collected") == 1
