"""Rows of `hook_cost`: hooks that look into the model, and the same work by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.helpers.hook_bench import (
    BY_HAND,
    HISTORY,
    INTERVAL,
    OURS,
    Bench,
    Collected,
    Heads,
    remember,
)
from benchmarks.helpers.timing import Case
from eventloop.events import AfterValEpoch, AfterValIter, BeforeTrain, ImageLogged
from eventloop.hooks.activation_stats import ActivationStats
from eventloop.hooks.visualization import PADDING, VisualizationHook

THRESHOLD = 0.05
LAYERS = ("heads.0", "heads.1")
STATISTICS = tuple(f"activation/{name}/{what}" for name in LAYERS for what in ("mean", "std", "near_zero"))
VALIDATED = tuple(AfterValIter(batch_idx=index) for index in range(INTERVAL))


def activation_stats(bench: Bench) -> list[Case]:
    """The activations of two layers in one iteration of ten, whose forward pass is in both times; in the other nine
    nothing is done."""
    trainer, hook, inputs = bench.trainer(), ActivationStats("heads.*", interval=INTERVAL), torch.rand(4, 8)
    hook.before_train(trainer, BeforeTrain())
    watch = hook._subscription
    assert watch is not None
    remember(trainer.metrics, STATISTICS, HISTORY, smoothing_hint=False)
    own, turns = Collected(trainer.metrics), itertools.count()
    ours = {"watch": watch, "model": trainer.model, "inputs": inputs, **own.names}
    forward = "watch.install(); model(inputs); watch.remove()"

    def put() -> None:
        if next(turns) % INTERVAL == 0:
            for name in LAYERS:
                hook._record(trainer, name, inputs)

    model, kept = Heads(), list[Any]()
    by_hand = {"look": lambda: _looked_at(model, inputs, kept)}
    return [
        bench.iterations(OURS, "pass", ours, part=10, end=f"{forward}; {Collected.SOURCE}", after=own.settle),
        bench.iterations(BY_HAND, "pass", by_hand, part=10, end="look()", after=kept.clear),
        bench.background(put, trainer.metrics, part=10),
    ]


def _looked_at(model: Heads, inputs: torch.Tensor, kept: list[Any]) -> None:
    """A forward pass whose outputs are looked at."""

    def look(module: torch.nn.Module, given: Any, output: torch.Tensor) -> None:
        with torch.no_grad():
            near_zero = (output.abs() <= THRESHOLD).float().mean()
            kept.append((*torch.std_mean(output, correction=0), near_zero))

    handles = [head.register_forward_hook(look) for head in model.heads]
    model(inputs)
    for handle in handles:
        handle.remove()


def visualization(bench: Bench) -> list[Case]:
    """A grid of 16 images of 32 x 32 pixels, drawn in one batch of ten of a validation, and sent to a writer; the other
    nine are not due. By hand the grid is padded and put together at once, and kept."""
    images = torch.rand(16, 3, 32, 32)
    trainer, hook = bench.trainer(), VisualizationHook(interval=INTERVAL)

    async def write(event: ImageLogged) -> None:
        """Takes images, so that they are drawn."""

    trainer.bus.subscribe(write, ImageLogged)
    trainer.batch = (images, torch.zeros(16))
    names = {"hook": hook, "trainer": trainer, "events": VALIDATED, "epoch": AfterValEpoch()}
    kept: list[torch.Tensor] = []
    return [
        bench.iterations(
            OURS,
            "hook.after_val_iter(trainer, event)",
            names,
            part=10,
            head="for event in events",
            end="hook.after_val_epoch(trainer, epoch)",
            after=trainer.bus.flush,
        ),
        bench.iterations(
            BY_HAND,
            "pass",
            {"keep": kept.append, "grid": _grid, "images": images},
            part=10,
            end="keep(grid(images))",
            after=kept.clear,
        ),
        bench.background(_drawing(hook, trainer), trainer.metrics, part=10, media=True),
    ]


def _drawing(hook: VisualizationHook, trainer: Any) -> Callable[[], None]:
    turns = itertools.cycle(VALIDATED)
    return lambda: hook.after_val_iter(trainer, next(turns))


def _grid(images: torch.Tensor) -> torch.Tensor:
    """Sixteen square images, each stretched to all the bytes there are, as a square."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    pixels = ((images - low) / (high - low) * 255 + 0.5).to(torch.uint8)
    _, channels, height, _ = pixels.shape
    padded = F.pad(pixels, (0, PADDING, 0, PADDING)).unflatten(0, (4, 4)).permute(2, 0, 3, 1, 4)
    size = 4 * (height + PADDING)
    square: torch.Tensor = padded.reshape(channels, size, size)
    return square[:, :-PADDING, :-PADDING]


ROWS: dict[str, Callable[[Bench], list[Case]]] = {
    f"ActivationStats, every {INTERVAL}, with its forward": activation_stats,
    f"VisualizationHook, every {INTERVAL} of a validation": visualization,
}
"""As `hook_rows.ROWS`."""
