"""A hook's text reaches whoever reads along, once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from eventloop.events import TextLogged
from eventloop.hooks.log_text import log_text
from eventloop.training.trainer import Trainer

Make = Callable[..., Trainer]


def test_text_is_an_event_where_somebody_takes_texts(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """And is not logged a second time."""
    caplog.set_level(logging.INFO, "eventloop")
    trainer = make_trainer()

    with trainer.bus.capture(TextLogged) as seen:
        log_text(trainer, "timing", "fast")

    assert [(e.name, e.text, e.mode, e.step) for e in seen if isinstance(e, TextLogged)] == [
        ("timing", "fast", "train", 0)
    ]
    assert not caplog.records


@pytest.mark.parametrize(("rank", "expected"), [(0, ["fast"]), (1, [])])
def test_text_is_logged_where_nobody_does(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, rank: int, expected: list[str]
) -> None:
    """On rank 0."""
    caplog.set_level(logging.INFO, "eventloop")
    trainer = make_trainer()
    trainer.rank = rank

    log_text(trainer, "timing", "fast")

    assert [record.getMessage() for record in caplog.records] == expected
