"""Rows of `hook_cost`: mmcv's learning rate policies and values put into a storage, and the same work by hand."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from math import cos, pi
from typing import Any

from benchmarks.helpers.hook_bench import BY_HAND, OURS, Bench, Collected, remember
from benchmarks.helpers.timing import Case
from eventloop import hooks as lr
from eventloop.hooks.hook import Hook
from eventloop.hooks.lr_updater import LrUpdaterHook
from eventloop.hooks.momentum_updater import MomentumUpdaterHook
from eventloop.metrics import EventStorage
from eventloop.metrics.history import HistoryBuffer

LENGTHS = (0, 1_000, 100_000)
ITERATIONS = 100_000
"""Of the run whose length the policies go by."""
FOUR = ("loss", "time", "data_time", "accuracy")


# --- policies, by iteration --------------------------------------------------------------------------------

HALF = "low + 0.5 * (base - low) * (cos(pi * {0}) + 1)"


def _two_halves(turn: float, begin: str, peak: str, end: str) -> str:
    """Half a cosine up until a part of the run is done, and another one down."""
    up = f"{peak} + 0.5 * ({begin} - {peak}) * (cos(pi * i / ({turn} * n)) + 1)"
    down = f"{end} + 0.5 * ({peak} - {end}) * (cos(pi * (i - {turn} * n) / ({1 - turn} * n)) + 1)"
    return f"{up} if i < {turn} * n else {down}"


BY_ITER: dict[str, Any] = {"by_epoch": False}
WARMUP: dict[str, Any] = {"warmup": "linear", "warmup_iters": 500, "warmup_ratio": 0.001}
POLICIES: dict[str, tuple[Callable[[], LrUpdaterHook], str]] = {
    "Fixed": (lambda: lr.FixedLrUpdaterHook(**BY_ITER), "base"),
    "Step": (
        lambda: lr.StepLrUpdaterHook([30_000, 60_000], **BY_ITER),
        "base * 0.1 ** bisect([30_000, 60_000], i)",
    ),
    "Exp": (lambda: lr.ExpLrUpdaterHook(0.999, **BY_ITER), "base * 0.999**i"),
    "Inv": (lambda: lr.InvLrUpdaterHook(0.01, **BY_ITER), "base * (1 + 0.01 * i) ** -1.0"),
    "Poly": (lambda: lr.PolyLrUpdaterHook(0.9, 1e-4, **BY_ITER), "low + (base - low) * (1 - i / n) ** 0.9"),
    "CosineAnnealing": (
        lambda: lr.CosineAnnealingLrUpdaterHook(min_lr=1e-4, **BY_ITER),
        HALF.format("i / n"),
    ),
    "CosineAnnealing, warm-up": (
        lambda: lr.CosineAnnealingLrUpdaterHook(min_lr=1e-4, **BY_ITER, **WARMUP),
        f"({HALF.format('i / n')}) * (1 - (1 - i / 500) * (1 - 0.001))",
    ),
    "LinearAnnealing": (
        lambda: lr.LinearAnnealingLrUpdaterHook(min_lr=1e-4, **BY_ITER),
        "base + (low - base) * i / n",
    ),
    "FlatCosineAnnealing": (
        lambda: lr.FlatCosineAnnealingLrUpdaterHook(0.75, min_lr=1e-4, **BY_ITER),
        f"base if i < 0.75 * n else {HALF.format('(i - 0.75 * n) / (0.25 * n)')}",
    ),
    "CosineRestart": (
        lambda: lr.CosineRestartLrUpdaterHook([50_000, 50_000], [1.0, 1.0], min_lr=1e-4, **BY_ITER),
        f"{HALF.format('i / 50_000')} if i < 50_000 else {HALF.format('i / 50_000 - 1')}",
    ),
    "Cyclic": (
        lambda: lr.CyclicLrUpdaterHook(),
        _two_halves(0.4, "base", "10 * base", "1e-4 * base"),
    ),
    "OneCycle": (
        lambda: lr.OneCycleLrUpdaterHook(0.1),
        _two_halves(0.3, "base", "25 * base", "1e-4 * base"),
    ),
}
"""Name of the policy in mmcv; ours; and mmcv's formula, of iteration i of n."""


MOMENTA: dict[str, tuple[Callable[[], MomentumUpdaterHook], str]] = {
    "StepMomentumUpdaterHook": (
        lambda: lr.StepMomentumUpdaterHook([30_000, 60_000], min_momentum=0.5, **BY_ITER),
        "max(base * 0.5 ** bisect([30_000, 60_000], i), low)",
    ),
    "CosineAnnealingMomentumUpdaterHook": (
        lambda: lr.CosineAnnealingMomentumUpdaterHook(min_momentum=0.5, **BY_ITER),
        HALF.format("i / n"),
    ),
    "LinearAnnealingMomentumUpdaterHook": (
        lambda: lr.LinearAnnealingMomentumUpdaterHook(min_momentum=0.5, **BY_ITER),
        "base + (low - base) * i / n",
    ),
    "CyclicMomentumUpdaterHook": (
        lambda: lr.CyclicMomentumUpdaterHook(),
        _two_halves(0.4, "base", "0.85 / 0.95 * base", "base"),
    ),
    "OneCycleMomentumUpdaterHook": (
        lambda: lr.OneCycleMomentumUpdaterHook(),
        _two_halves(0.3, "0.95", "0.85", "0.95"),
    ),
}
"""The same for the momentum, by the names of the hooks."""


def policy(bench: Bench, name: str) -> list[Case]:
    """The rate of one param group, set before an iteration."""
    make, formula = POLICIES[name]
    return _policy(bench, make(), formula, "lr", base=0.01, low=1e-4)


def momentum(bench: Bench, name: str) -> list[Case]:
    """The momentum of one param group, set before an iteration."""
    make, formula = MOMENTA[name]
    return _policy(bench, make(), formula, "momentum", base=0.9, low=0.5)


def _policy(bench: Bench, hook: Hook, formula: str, key: str, *, base: float, low: float) -> list[Case]:
    job = bench.losses(1)
    trainer = bench.trainer(job.model, optimizer=job.optimizer, hooks=[hook])
    body = f"value = {formula}\nfor group in groups: group['{key}'] = value"
    by_hand = {
        "i": 7,
        "n": ITERATIONS,
        "base": base,
        "low": low,
        "groups": bench.losses(1).optimizer.param_groups,
        "cos": cos,
        "pi": pi,
        "bisect": bisect_right,
    }
    names = {"hook": hook, "trainer": trainer}
    return [
        bench.iterations(OURS, "hook.before_train_iter(trainer, event)", names, head="for event in events"),
        bench.iterations(BY_HAND, body, by_hand),
    ]


# --- the storage -------------------------------------------------------------------------------------------


LOG_BY_HAND = "logged.append(sum(float(value) for value, _ in histories['loss'][-10:]) / 10)"


def put_scalar(bench: Bench, length: int, *, tensor: bool = False, log: bool = False) -> list[Case]:
    """Put one value into a storage whose history has `length` values.

    With `log`, what the training thread does every 10 iterations to have them logged is timed as well.
    By hand the value is appended to a list in a dict, and the mean of the last 10 is logged.
    """
    value: Any = bench.losses(1).losses[0] if tensor else 0.5
    storage = EventStorage()
    remember(storage, ["loss"], length)
    own = Collected(storage, forget=not length)
    history = [(0.5, index) for index in range(length)]
    logged: list[float] = []
    by_hand = {"histories": {"loss": history}, "value": value, "logged": logged}
    kept = "value.detach()" if tensor else "value"

    def settle() -> None:
        if not log:
            own.collect()
        own.settle()

    def cut() -> None:
        _cut(history, length)
        logged.clear()

    return [
        bench.iterations(
            OURS,
            "put('loss', value)",
            {"put": storage.put_scalar, "value": value, **own.names},
            part=2,
            end=Collected.SOURCE if log else None,
            after=settle,
        ),
        bench.iterations(
            BY_HAND,
            f"histories['loss'].append(({kept}, 7))",
            by_hand,
            part=2,
            end=LOG_BY_HAND if log else None,
            after=cut,
        ),
        bench.background(lambda: storage.put_scalar("loss", value), storage),
    ]


def put_scalars(bench: Bench, length: int) -> list[Case]:
    """Four values in one call, `collect` every 10 iterations included."""
    storage, values = EventStorage(), dict.fromkeys(FOUR, 0.5)
    remember(storage, FOUR, length)
    own = Collected(storage, forget=not length)
    histories = {name: [(0.5, index) for index in range(length)] for name in FOUR}
    body = "for name, value in values.items(): histories[name].append((value, 7))"

    def cut() -> None:
        for history in histories.values():
            _cut(history, length)

    return [
        bench.iterations(
            OURS,
            "put(values)",
            {"put": storage.put_scalars, "values": values, **own.names},
            part=2,
            end=Collected.SOURCE,
            after=own.settle,
        ),
        bench.iterations(BY_HAND, body, {"histories": histories, "values": values}, part=2, after=cut),
        bench.background(lambda: storage.put_scalars(values), storage),
    ]


def history_update(bench: Bench, length: int) -> list[Case]:
    """One value into one history, which is not what a hook calls: the storage does, in the background."""
    history = HistoryBuffer()
    history.extend([0.5] * length, range(length))
    return [bench.iterations(OURS, "update(0.5, 7)", {"update": history.update}, part=2)]


def _cut(history: list[Any], length: int) -> None:
    del history[length:]


PUT = "EventStorage.put_scalar, "
PUT_AND_LOG = "EventStorage.put_scalar, collect every 10, "
ROWS: dict[str, Callable[[Bench], list[Case]]] = {
    **{f"{name} policy": partial(policy, name=name) for name in POLICIES},
    **{name: partial(momentum, name=name) for name in MOMENTA},
    **{f"{PUT}a float, history {length:,}": partial(put_scalar, length=length) for length in LENGTHS},
    **{
        f"{PUT}a tensor, history {length:,}": partial(put_scalar, length=length, tensor=True)
        for length in LENGTHS
    },
    **{
        f"{PUT_AND_LOG}{what}, history {length:,}": partial(
            put_scalar, length=length, tensor=what == "a tensor", log=True
        )
        for what in ("a float", "a tensor")
        for length in LENGTHS
    },
    **{
        f"EventStorage.put_scalars, 4 floats, history {length:,}": partial(put_scalars, length=length)
        for length in LENGTHS
    },
    **{
        f"HistoryBuffer.update, history {length:,}": partial(history_update, length=length)
        for length in LENGTHS
    },
}
"""As `hook_rows.ROWS`."""
