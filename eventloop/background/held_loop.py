"""Find the coroutine that holds an event loop, for which the other coroutine subscribers of the loop wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

from eventloop.background.queues import awaited
from eventloop.background.queues.failures import Report
from eventloop.background.queues.options import LaneOptions
from eventloop.background.queues.subscriber import Lane

_CURE = 'make it a plain function with offload="thread", or await in it what takes long'


class LoopLane(Lane):
    """The queue of a subscriber on an event loop, which knows whether another subscriber holds the loop."""

    def __init__(self, name: str, fn: Callable[..., Any], options: LaneOptions, report: Report) -> None:
        super().__init__(name, fn, options, report)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._called_at = 0.0  # since when the loop has not answered a call; 0.0 if it has
        self._free_at = 0.0  # when another coroutine last let go of the loop
        self._checked = 0.0  # the begin of the delivery for which it was checked whether the loop answers

    def check_stall(self, now: float) -> None:
        """Give up a subscriber whose delivery exceeds `stall_timeout`, unless another one holds the loop."""
        began = self._began
        if not began or now - max(began, self._free_at) <= self.options.stall_timeout:
            return
        if not self._calling and not self._holds_loop:
            if self._checked != began:  # does the loop run at all? the answer is here at the next check
                self._checked = began
                self.wake()
            if self._called_at:
                return
        super().check_stall(now)

    @property
    def _effect(self) -> str:
        return f". It holds the event loop of other coroutines: {_CURE}" if self._holds_loop else ""

    @property
    def stuck(self) -> str:
        """Name the coroutine that holds the event loop for which this one waits, or what it is stuck in."""
        held = self._held_for(perf_counter())
        holder = _task_that_runs(self._loop)
        waits = held >= awaited.STUCK_SECONDS and holder is not self._task
        if self.ended_by not in ("", "closed") or holder is None or not waits:
            return super().stuck
        name = holder.get_name().removeprefix("eventloop ")
        return f"its event loop was held for {held:.1f} s by {name}, for which this is the cure: {_CURE}"

    @property
    def _holds_loop(self) -> bool:
        """Return whether the subscriber's own code runs on the loop now, so that no other coroutine does."""
        task = self._task
        return task is not None and _task_that_runs(self._loop) is task

    def _held_for(self, now: float) -> float:
        return now - self._called_at if self._called_at else 0.0

    def _note_answer(self) -> None:
        """Note on the loop that it answers calls."""
        now = perf_counter()
        if self._held_for(now) > awaited.STUCK_SECONDS:
            self._free_at = now
        self._called_at = 0.0


def _task_that_runs(loop: asyncio.AbstractEventLoop | None) -> asyncio.Task[Any] | None:
    """Return the task whose code runs on a loop now; None if the loop waits. Safe from any thread."""
    return None if loop is None else asyncio.current_task(loop)
