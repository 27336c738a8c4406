"""The names of callbacks in the rows of the costs, without any of the engines."""

from __future__ import annotations

from eventloop.bridges.row_names import RowNames


def test_the_second_object_of_a_name_has_a_number() -> None:
    """Objects are numbered in the order in which they come, and keep their numbers, also if they are equal."""
    names = RowNames()
    first, second = [1], [1]

    labels = [names.of(each, "Timer") for each in (first, second, first, second)]

    assert labels == ["Timer", "Timer #2", "Timer", "Timer #2"]


def test_names_with_different_suffixes_need_no_number() -> None:
    """A hook of MMEngine and one of the program, both named LoggerHook, have rows that differ by the suffix."""
    names = RowNames()

    labels = [names.of([], "LoggerHook", suffix) for suffix in (" (mmengine)", "")]

    assert labels == ["LoggerHook", "LoggerHook"]
