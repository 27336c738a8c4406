"""Rows of `hook_cost`: hooks that call functions or the garbage collector, and the same work by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from benchmarks.helpers.hook_bench import BY_HAND, EVENTS, INTERVAL, OURS, Bench
from benchmarks.helpers.timing import Case
from eventloop.events import AfterTrain, AfterTrainIter, BeforeTrain
from eventloop.hooks.callback import CallbackHook, ClosureHook, _adapted
from eventloop.hooks.garbage_collection import GarbageCollectionHook

COLLECTED = 1000
"""Iterations with each kind of collection in them: 100, of which 10 of the middle generation, of which 1 of all."""


def of_trainer(trainer: Any) -> None:
    """A function that does nothing."""


def of_both(trainer: Any, event: AfterTrainIter) -> None:
    """Do nothing, with the trainer and the event."""


def callback(bench: Bench) -> list[Case]:
    """A function of trainer and event, which the bus calls itself."""
    return _called(bench, CallbackHook(after_train_iter=of_both), "fn(trainer, event)")


def closure(bench: Bench) -> list[Case]:
    """A function that takes the trainer alone, as in mmcv.

    The bus calls a wrapper that takes trainer and event, and the wrapper calls the function.
    """
    return _called(bench, ClosureHook("after_train_iter", of_trainer), "fn(trainer)")


def _called(bench: Bench, hook: CallbackHook, by_hand: str) -> list[Case]:
    fn, trainer = hook._functions["after_train_iter"], bench.trainer(hooks=[hook])
    names = {"call": _adapted(fn), "fn": fn, "trainer": trainer, "event": EVENTS[7]}
    return [
        bench.iterations(OURS, "call(trainer, event)", names),
        bench.iterations(BY_HAND, by_hand, names),
    ]


def garbage_collection(bench: Bench) -> list[Case]:
    """1000 iterations that leave no garbage, with a collection after every tenth.

    What exists is frozen at the beginning of a block, also in the case by hand, and unfrozen after it,
    because the peers freeze nothing.
    """
    trainer, hook = bench.trainer(), GarbageCollectionHook(interval=INTERVAL)
    hook.before_train(trainer, BeforeTrain())
    bench.stack.callback(hook.after_train, trainer, AfterTrain(reason="completed"))
    hook._freeze_objects()
    gc.unfreeze()
    due = range(INTERVAL - 1, COLLECTED, INTERVAL)
    events = [AfterTrainIter(iter=index, batch_idx=index) for index in due]
    names = {"hook": hook, "trainer": trainer, "events": events, "freeze": gc.freeze, "once": range(1)}
    body = "freeze()\nfor event in events: hook.after_iter(trainer, event)"
    by_hand = (
        "freeze()\nfor event in events: "
        "collect(2 if event.iter % 1000 == 999 else 1 if event.iter % 100 == 99 else 0)"
    )
    return [
        bench.over(OURS, "for _ in once", body, COLLECTED, names, gc.unfreeze),
        bench.over(
            BY_HAND, "for _ in once", by_hand, COLLECTED, {**names, "collect": gc.collect}, gc.unfreeze
        ),
    ]


ROWS: dict[str, Callable[[Bench], list[Case]]] = {
    "CallbackHook, a function of both": callback,
    "ClosureHook, a function of the trainer": closure,
    f"GarbageCollectionHook, every {INTERVAL}": garbage_collection,
}
"""As `hook_rows.ROWS`."""
