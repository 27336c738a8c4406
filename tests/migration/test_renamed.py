"""Former names of arguments and attributes: each error says the new name, and the new name exists."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from eventloop import Bus
from eventloop.bridges import DrivenTrainer
from eventloop.hooks import CostsHook
from eventloop.metrics import EventStorage
from eventloop.registry import build
from eventloop.writers import EventLogWriter, VisdomWriter
from tests.support.trainers import MakeTrainer

ARGUMENTS = [
    (CostsHook, "interval", "interval_seconds"),
    (CostsHook, "log_every", "log_seconds"),
    (EventLogWriter, "fsync_interval", "fsync_seconds"),
    (VisdomWriter, "retry_interval", "retry_seconds"),
]


@pytest.mark.parametrize(("cls", "former", "new"), ARGUMENTS)
def test_a_former_argument_in_a_call(cls: Callable[..., Any], former: str, new: str) -> None:
    """A constructor names the argument that replaced it, and its unit."""
    with pytest.raises(TypeError, match=f"{cls.__name__} has no argument '{former}': use {new}=.* seconds"):
        cls(**{former: 30})
    assert new in inspect.signature(cls).parameters


@pytest.mark.parametrize(("cls", "former", "new"), ARGUMENTS)
def test_a_former_argument_in_a_config(cls: type, former: str, new: str) -> None:
    """A config gets the text of the call."""
    with pytest.raises(ValueError, match=f"{cls.__name__} has no argument '{former}': use {new}=.* seconds"):
        build({"type": cls.__name__, former: 30})


def test_a_former_argument_of_a_default_hook(make_trainer: MakeTrainer) -> None:
    """The trainer's options of the default hooks get it, too."""
    with pytest.raises(
        (TypeError, ValueError), match="CostsHook has no argument 'log_every': use log_seconds="
    ):
        make_trainer(default_hooks={"costs": {"log_every": 30}})


@pytest.mark.parametrize(
    ("cls", "former", "new"),
    [
        (Bus, "keep_left", "on_undelivered"),
        (DrivenTrainer, "note_rates", "record_rates"),
        (EventStorage, "settle", "read_collected"),
        (EventStorage, "look_for_lost_loss", "check_losses"),
    ],
)
def test_a_former_method(cls: type, former: str, new: str) -> None:
    """Reading a former name raises an AttributeError with the new one; for `hasattr` it is absent."""
    with pytest.raises(AttributeError, match=f"{cls.__name__} has no attribute '{former}': use {new}"):
        getattr(cls, former)
    assert callable(getattr(cls, new))
    assert not hasattr(cls, former)


def test_a_former_attribute() -> None:
    """So do names that only objects have."""
    storage = EventStorage()
    with Bus() as bus, bus.subscribe(print, "after_train_iter") as subscription:
        for owner, former, new in (subscription, "lane", "subscriber"), (storage, "relieve", "post_pending"):
            with pytest.raises(AttributeError, match=f"has no attribute '{former}': use {new}"):
                getattr(owner, former)
            assert hasattr(owner, new)
