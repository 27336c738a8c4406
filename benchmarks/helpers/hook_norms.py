"""Rows of `hook_cost`: hooks for batch norm layers, and the same work by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from benchmarks.helpers.hook_bench import AFTER_ITER, BY_HAND, OURS, Bench
from benchmarks.helpers.hook_ranks import SYNCED, Partner, synced_by_hand
from benchmarks.helpers.timing import Case
from eventloop.events import AfterTrainEpoch
from eventloop.hooks.precise_bn import PreciseBN
from eventloop.hooks.sync_buffers import SyncBuffersHook

PASS = 20
"""Batches of a pass."""


class Normed(nn.Sequential):
    """Five linear layers, each with batch norm behind it."""

    def __init__(self) -> None:
        super().__init__(
            *(layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()))
        )


def batches() -> list[torch.Tensor]:
    """Return the batches of one pass."""
    return [torch.rand(32, 64) for _ in range(PASS)]


def precise_bn(bench: Bench) -> list[Case]:
    """A pass of 20 batches, of which each has its share: forward passes, what is looked at in them, and the statistics
    written. By hand, other buffers and random states are not put back, for there are none that change."""
    hook = PreciseBN(num_iter=PASS, data_loader=batches(), forward=lambda model, batch: model(batch))
    trainer = bench.trainer(Normed().train(), hooks=[hook])
    model, given = Normed().train(), batches()
    names, once = {"hook": hook, "trainer": trainer, "once": range(1)}, {"once": range(1)}
    by_hand = {"update": lambda: population_by_hand(model, given), **once}
    return [
        bench.over(OURS, "for _ in once", "hook.update_stats(trainer)", PASS, names, _nothing),
        bench.over(BY_HAND, "for _ in once", "update()", PASS, by_hand, _nothing),
    ]


@torch.no_grad()
def population_by_hand(model: nn.Module, given: list[torch.Tensor]) -> None:
    """Put the mean and variance of all that the layers are given into their running statistics."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)]
    sums = {layer: [torch.zeros(64, dtype=torch.float64) for _ in range(2)] for layer in layers}
    tracked = [_tensor(layer.num_batches_tracked).clone() for layer in layers]

    def look(layer: nn.BatchNorm1d, args: tuple[torch.Tensor]) -> None:
        inputs = args[0].double()
        sums[layer][0] += inputs.sum(0)
        sums[layer][1] += inputs.square().sum(0)

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(look).remove)
        for batch in given:
            model(batch)
    values = sum(map(len, given))
    for layer, count in zip(layers, tracked, strict=True):
        mean, squares = (each / values for each in sums[layer])
        _tensor(layer.running_mean).copy_(mean)
        _tensor(layer.running_var).copy_(squares - mean.square())
        _tensor(layer.num_batches_tracked).copy_(count)


def _tensor(buffer: torch.Tensor | None) -> torch.Tensor:
    assert buffer is not None
    return buffer


def precise_bn_ahead(bench: Bench) -> list[Case]:
    """An iteration after which no pass is due."""
    hook = PreciseBN(interval=1000, by_epoch=False)
    trainer = bench.trainer(Normed().train(), hooks=[hook])
    body = "if (trainer.iter + 1) % 1000 == 0: raise RuntimeError"
    return [
        bench.iterations(OURS, AFTER_ITER, {"hook": hook, "trainer": trainer}, head="for event in events"),
        bench.iterations(BY_HAND, body, {"trainer": trainer}),
    ]


def sync_buffers(bench: Bench) -> list[Case]:
    """The buffers of 50 batch norm layers made equal on two ranks, over gloo on this machine, at the end of an epoch.
    By hand one collective for each type, too."""
    partner = bench.partner = Partner(bench)
    trainer, hook = bench.trainer(partner.model()), SyncBuffersHook()
    trainer.world_size = 2  # which it would have found in the group, made when all is there
    event = AfterTrainEpoch(reason="completed")

    def epoch() -> None:
        trainer.iter += 1
        hook.after_train_epoch(trainer, event)

    buffers = [*partner.model().buffers()]
    return [
        partner.case(OURS, epoch, SYNCED),
        partner.case(BY_HAND, lambda: synced_by_hand(buffers), BY_HAND),
    ]


def _nothing() -> Any: ...


ROWS: dict[str, Callable[[Bench], list[Case]]] = {
    f"PreciseBN, each of a pass of {PASS}": precise_bn,
    "PreciseBN, no pass due": precise_bn_ahead,
    "SyncBuffersHook, an epoch of two ranks": sync_buffers,
}
"""As `hook_rows.ROWS`."""
