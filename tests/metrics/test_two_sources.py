"""Names that two sources put in one iteration, whose values have one mean."""

from __future__ import annotations

import pytest

from eventloop.metrics import EventStorage


def test_a_name_put_by_two_sources_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Once a name, if the values differ; one source may put twice, and other names with it in other iterations."""
    storage = EventStorage()
    for storage.iter in range(3, 6):
        storage.put_scalars({"loss": 0.5, "time": 5.0})
        storage.put_floats(("time", "data_time"), [0.1, 0.0])
        storage.put_scalar("loss", 0.5)
        for value in (1.0, 2.0):
            storage.put_scalar("twice", value)
        storage.put_scalars({"other": 1.0, f"with_{storage.iter}": 1.0})

    for _ in range(2):
        storage.collect().events()
        storage.put_scalars({"loss": 0.5, "time": 5.0})
        storage.put_scalar("time", 0.1)

    (record,) = caplog.records
    assert record.getMessage() == (
        "metric 'time' was put by two sources in iteration 3, such as the train step and a hook: the log has the mean "
        "of both; give one of them another name"
    )


def test_batches_of_a_validation_may_put_other_names(caplog: pytest.LogCaptureFixture) -> None:
    """They have one iteration, and are not taken for two sources."""
    storage = EventStorage()
    storage.mode = "val"
    storage.put_scalars({"boxes": 1.0, "masks": 2.0})
    storage.put_scalar("boxes", 3.0)

    (event,) = storage.collect().events()

    assert event.scalars == {"boxes": 2.0, "masks": 2.0}  # type: ignore[attr-defined]
    assert caplog.text == ""
