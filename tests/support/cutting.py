"""Raise KeyboardInterrupt before each line or instruction of some modules in turn, as the handler of a signal may."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType, ModuleType
from typing import Any, Literal


def cut_at(
    place: int,
    modules: Collection[ModuleType],
    work: Callable[[], object],
    each: Literal["line", "opcode"] = "line",
) -> bool:
    """Raise KeyboardInterrupt before the n-th line, or instruction, of these modules that `work` runs.

    Return False if it runs fewer.

    Raises:
        AssertionError: `work` has not raised the interrupt.
    """
    files, left = {str(module.__file__) for module in modules}, place

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = each == "opcode"
        if event == each:
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert left >= 0, f"the interrupt at {each} {place} was lost"
    return False


def each_cut(
    modules: Collection[ModuleType], work: Callable[[], object], each: Literal["line", "opcode"] = "line"
) -> Iterator[int]:
    """Do `work` again and again, and yield the number of the line or instruction at which it was cut."""
    place = 0
    while cut_at(place, modules, work, each):
        yield place
        place += 1
