"""Priorities: the numbers, the names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from eventloop import Priority
from eventloop.bus import Bus


def get_priority(priority: Any) -> int:
    """Return the priority that a bus gives to a handler."""
    bus = Bus()
    bus.subscribe(lambda event: None, "after_train_iter", priority=priority)
    return bus.plan("after_train_iter")[0].priority


NUMBERS = {
    "HIGHEST": 0,
    "VERY_HIGH": 10,
    "HIGH": 30,
    "ABOVE_NORMAL": 40,
    "NORMAL": 50,
    "BELOW_NORMAL": 60,
    "LOW": 70,
    "VERY_LOW": 90,
    "LOWEST": 100,
}


def test_bands_have_mmengines_numbers() -> None:
    """The named bands are MMEngine's."""
    assert {member.name: member.value for member in Priority} == NUMBERS


@pytest.mark.parametrize(
    ("priority", "number"),
    [
        ("VERY_LOW", 90),
        ("very_low", 90),
        ("Very_Low", 90),
        ("  very low ", 90),
        (Priority.LOW, 70),
        (0, 0),
        (100, 100),
        (33, 33),
    ],
)
def test_name_member_or_number_is_its_number(priority: Priority | int | str, number: int) -> None:
    """A name may be written in any case, with a space for the underscore; a number is itself."""
    assert get_priority(priority) == number
    assert type(get_priority(priority)) is int


@pytest.mark.parametrize("priority", [-1, 101])
def test_number_out_of_range_is_refused(priority: int) -> None:
    """The error names the range and the number given."""
    with pytest.raises(ValueError, match=rf"between 0 \(runs first\) and 100 \(runs last\), got {priority}"):
        get_priority(priority)


def test_misspelled_name_is_refused_with_a_suggestion() -> None:
    """The error names the nearest name."""
    with pytest.raises(ValueError, match=r"unknown priority name 'very_hihg': did you mean VERY_HIGH\?"):
        get_priority("very_hihg")


@pytest.mark.parametrize("priority", [True, None, 1.5, b"LOW"])
def test_a_bad_priority_is_refused(priority: Any) -> None:
    """A bool is not a number here, and a float is not an int; a name like no other is refused with the names."""
    with pytest.raises(TypeError, match=r"must be a Priority, its name or an int in 0\.\.100"):
        get_priority(priority)
    with pytest.raises(ValueError, match="unknown priority name 'xyz': names are HIGHEST, VERY_HIGH, HIGH"):
        get_priority("xyz")
