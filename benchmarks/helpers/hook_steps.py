"""The optimizer's hooks for `hook_cost`, in 16 bits too, and the same work by hand. The losses are there: no forward
pass is timed, but autocast is entered and left around where it would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.helpers.hook_bench import AFTER_ITER, BY_HAND, INTERVAL, OURS, Bench, Collected
from benchmarks.helpers.timing import Case
from eventloop.events import AfterTrainIter, BeforeTrainIter
from eventloop.hooks.amp import AmpOptimizerHook, Fp16OptimizerHook, GradientCumulativeFp16OptimizerHook
from eventloop.hooks.gradient_cumulative import GradientCumulativeOptimizerHook
from eventloop.hooks.optimizer import OptimizerHook

MAX_NORM = 35.0
WINDOW = 4
"""Iterations a step, where gradients are accumulated."""
ZERO, STEP = "optimizer.zero_grad(set_to_none=True)", "optimizer.step()"
BOTH = f"hook.before_train_iter(trainer, begin); {AFTER_ITER}"


def steps_in(bench: Bench) -> int:
    """Return how many losses a block has: a whole number of intervals and of windows."""
    return max(bench.number // 200, 1) * INTERVAL * 2


def optimizer(bench: Bench) -> list[Case]:
    """zero_grad, backward and step of SGD."""
    return _steps(bench, OptimizerHook(), f"{ZERO}; loss.backward(); {STEP}")


def clipped(bench: Bench) -> list[Case]:
    """The same with gradients clipped by their norm, which is put."""
    hook = OptimizerHook(grad_clip={"max_norm": MAX_NORM})
    body = f"{ZERO}; loss.backward(); keep(clip(parameters, {MAX_NORM})); {STEP}"
    return _steps(bench, hook, body, clip=clip_grad_norm_)


def gradient_cumulative(bench: Bench) -> list[Case]:
    """The same with a step every 4 iterations."""
    body = f"(loss / {WINDOW}).backward(); count += 1\nif count % {WINDOW} == 0: {STEP}; {ZERO}"
    return _steps(bench, GradientCumulativeOptimizerHook(cumulative_iters=WINDOW), body)


def bfloat16(bench: Bench) -> list[Case]:
    """Autocast to bfloat16, whose losses are not scaled."""
    body = f"with autocast('cpu', dtype=bfloat16): pass\n{ZERO}; loss.backward(); {STEP}"
    return _steps(
        bench,
        AmpOptimizerHook(dtype="bfloat16"),
        body,
        BOTH,
        autocast=torch.autocast,
        bfloat16=torch.bfloat16,
    )


def dynamic_scale(bench: Bench) -> list[Case]:
    """Autocast to float16, losses scaled by a scale that moves and is put."""
    body = (
        f"{ZERO}; scale(loss).backward(); scaler.step(optimizer); scaler.update(); keep(scaler.get_scale())"
    )
    return _scaled(bench, AmpOptimizerHook(dtype="float16"), body, torch.amp.GradScaler("cpu"))


def static_scale(bench: Bench) -> list[Case]:
    """The same with a scale of 512 that stays, and is not put."""
    body = f"{ZERO}; scale(loss).backward(); scaler.step(optimizer); scaler.update(512.0)"
    return _scaled(bench, Fp16OptimizerHook(), body, torch.amp.GradScaler("cpu", init_scale=512.0))


def cumulative_static_scale(bench: Bench) -> list[Case]:
    """The same with a step every 4 iterations."""
    body = (
        f"scale(loss / {WINDOW}).backward(); count += 1"
        f"\nif count % {WINDOW} == 0: scaler.step(optimizer); scaler.update(512.0); {ZERO}"
    )
    hook = GradientCumulativeFp16OptimizerHook(cumulative_iters=WINDOW)
    return _scaled(bench, hook, body, torch.amp.GradScaler("cpu", init_scale=512.0))


def _scaled(bench: Bench, hook: AmpOptimizerHook, body: str, scaler: torch.amp.GradScaler) -> list[Case]:
    names = {"autocast": torch.autocast, "float16": torch.float16, "scaler": scaler, "scale": scaler.scale}
    return _steps(bench, hook, f"with autocast('cpu', dtype=float16): pass\n{body}", BOTH, **names)


def _steps(
    bench: Bench, hook: OptimizerHook, by_hand: str, ours: str = AFTER_ITER, **names: Any
) -> list[Case]:
    """Return our case of a hook that steps, and the case by hand.

    Args:
        by_hand: the code for one loss.
        ours: the calls of the hook for one loss.
        names: the variables of `by_hand`.
    """
    return [_hooked(bench, hook, ours), _by_hand(bench, by_hand, names)]


def _hooked(bench: Bench, hook: OptimizerHook, body: str) -> Case:
    """Return our case of `body` for each loss of a block, with a collection every 10 iterations."""
    count = steps_in(bench)
    job = bench.losses(count)
    trainer = bench.trainer(job.model, optimizer=job.optimizer, default_hooks={"optimizer": hook})
    own = Collected(trainer.metrics)
    tens: list[list[dict[str, torch.Tensor]]] = []

    def again() -> None:
        own.settle()
        job.make(count)
        tens[:] = [job.outputs[first : first + INTERVAL] for first in range(0, count, INTERVAL)]

    again()
    names = {
        "hook": hook,
        "trainer": trainer,
        "tens": tens,
        "begin": BeforeTrainIter(iter=7, batch_idx=7),
        "event": AfterTrainIter(iter=7, batch_idx=7),
        **own.names,
    }
    body = f"for trainer.outputs in ten: {body}\n{Collected.SOURCE}"
    return bench.over(OURS, "for ten in tens", body, count, names, again)


def _by_hand(bench: Bench, body: str, names: dict[str, Any]) -> Case:
    count = steps_in(bench)
    job, kept = bench.losses(count), list[Any]()
    bound = {
        "outputs": job.outputs,
        "optimizer": job.optimizer,
        "parameters": [*job.model.parameters()],
        "keep": kept.append,
        "count": 0,
        **names,
    }

    def again() -> None:
        kept.clear()
        job.make(count)

    return bench.over(BY_HAND, "for output in outputs", f"loss = output['loss']\n{body}", count, bound, again)


ROWS: dict[str, Callable[[Bench], list[Case]]] = {
    "OptimizerHook": optimizer,
    "OptimizerHook, grad_clip": clipped,
    "GradientCumulativeOptimizerHook": gradient_cumulative,
    "AmpOptimizerHook, bfloat16": bfloat16,
    "AmpOptimizerHook, float16": dynamic_scale,
    "Fp16OptimizerHook": static_scale,
    "GradientCumulativeFp16OptimizerHook": cumulative_static_scale,
}
"""As `hook_rows.ROWS`."""
