"""Hooks and writers by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from eventloop import register, registry
from eventloop.hooks import CheckpointHook, Hook, LoggerHook
from eventloop.registry import build, find_class
from eventloop.writers import JSONLWriter
from tests.trainer.conftest import MakeTrainer


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    known = dict(registry._classes)
    yield
    registry._classes.clear()
    registry._classes.update(known)


class Named(Hook):
    """A hook with one argument."""

    def __init__(self, n: int = 1) -> None:
        self.n = n


class Anything(Hook):
    """A hook that takes whatever it is given."""

    def __init__(self, **options: Any) -> None:
        self.options = options


def test_own_classes_are_known() -> None:
    """eventloop's hooks and writers are known by their names."""
    assert find_class("CheckpointHook") is CheckpointHook
    assert find_class("JSONLWriter") is JSONLWriter


def test_registered_classes_are_known() -> None:
    """`@register` makes a class known, and returns it."""
    assert register(Named) is Named
    assert find_class("Named") is Named


def test_build_by_name_or_class() -> None:
    """`type` is a name or the class itself; the rest are arguments."""
    register(Named)

    assert build({"type": "Named", "n": 3}).n == build({"type": Named, "n": 3}).n == 3


def test_a_config_is_left_as_it_was() -> None:
    """A config can be built from twice."""
    config = {"type": Named, "n": 3, "priority": "LOW"}
    build(config)

    assert config == {"type": Named, "n": 3, "priority": "LOW"}


def test_priority_and_name_are_set_on_the_object() -> None:
    """A hook's priority and name need not be arguments of its constructor."""
    hook = build({"type": Named, "priority": "VERY_LOW", "name": "mine"})

    assert (hook.priority, hook.name) == ("VERY_LOW", "mine")


def test_the_name_of_a_config_is_the_name_of_its_state(make_trainer: MakeTrainer) -> None:
    """Two hooks of one class with a state are told apart by the names in their configs."""
    configs = [{"type": CheckpointHook, "name": name} for name in ("often", "seldom")]

    trainer = make_trainer(hooks=configs)

    assert {"often", "seldom"} <= {hook.name for hook in trainer.hooks}


def test_a_bad_priority_in_a_config(make_trainer: MakeTrainer) -> None:
    """A priority that is none is an error when the trainer is built."""
    with pytest.raises(ValueError, match="unknown priority name 'LOWW'"):
        make_trainer(hooks=[{"type": "LoggerHook", "priority": "LOWW"}])


def test_a_writer_has_no_priority() -> None:
    """A priority on a writer would do nothing: it is refused."""
    with pytest.raises(ValueError, match="JSONLWriter has no argument 'priority'"):
        build({"type": "JSONLWriter", "priority": 3})


def test_a_class_that_takes_anything() -> None:
    """A constructor with **options is given what the config has."""
    assert build({"type": Anything, "colour": "red"}).options == {"colour": "red"}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"type": "ChekpointHook"},
            ValueError,
            "unknown type 'ChekpointHook': did you mean 'CheckpointHook'",
        ),
        ({"type": Named, "m": 1, "n": 2}, ValueError, "Named has no argument 'm'"),
        (
            {"type": "CheckpointHook", "intreval": 1},
            ValueError,
            "no argument 'intreval': did you mean 'interval'",
        ),
        ({"n": 1}, TypeError, r"expected an object or a config dict\(type=...\), got {'n': 1}"),
        ({"type": None}, TypeError, "type must be a class or its name, got None"),
        (3, TypeError, "expected an object or a config .*, got 3"),
    ],
)
def test_wrong_configs(config: Any, error: type[Exception], message: str) -> None:
    """A config that cannot be built says what is wrong with it, with a suggestion for a misspelling."""
    with pytest.raises(error, match=message):
        build(config)


def test_registered_classes_are_suggested() -> None:
    """A misspelled class of the user's own is suggested too."""
    register(Named)

    with pytest.raises(ValueError, match="did you mean 'Named'"):
        find_class("Nammed")


def test_a_name_of_eventloops_own() -> None:
    """A class may not take the name of one of eventloop's."""

    class LoggerHook(Hook):
        pass

    with pytest.raises(ValueError, match=r"'LoggerHook' is registered already, by eventloop\.hooks\.logger"):
        register(LoggerHook)


def test_a_notebook_cell_run_twice() -> None:
    """A class defined anew in the same module takes the place of the one before."""

    def define() -> type:
        class Cell(Hook):
            pass

        return register(Cell)

    first, second = define(), define()

    assert first is not second
    assert find_class("Cell") is second


def test_register_on_something_else() -> None:
    """Only classes are registered."""
    with pytest.raises(TypeError, match="@register goes on a class, got"):
        register(LoggerHook())  # type: ignore[type-var]


def test_a_run_from_configs(make_trainer: MakeTrainer) -> None:
    """A trainer built from configs runs as one built from objects."""
    register(Named)
    trainer = make_trainer(
        hooks=[{"type": "Named"}, {"type": "CheckpointHook", "interval": 1, "priority": "VERY_LOW"}],
        writers=[{"type": "JSONLWriter", "filename": "log.jsonl"}],
        default_hooks={"logger": {"type": "LoggerHook", "interval": 1}, "timer": None},
    )

    trainer.train()

    assert (trainer.work_dir / "epoch_2.pth").exists()
    assert (trainer.work_dir / "log.jsonl").read_text().count('{"mode":"train"') == 6
    assert "timer" not in {hook.name for hook in trainer.hooks}
