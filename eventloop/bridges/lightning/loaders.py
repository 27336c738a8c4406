"""Name the loaders of a Lightning evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def loader_names(trainer: Any, mode: str) -> list[str]:
    """Return the names of the loaders of an evaluation, in the order of Lightning's `dataloader_idx`.

    They are the keys of a mapping of loaders, else "dataloader_idx_0" and so on, as in Lightning's names of
    metrics. The result is [""] for a single loader, and for several whose batches Lightning puts together.

    Args:
        trainer: Lightning's trainer.
        mode: "val" or "test".
    """
    combined = _loop(trainer, mode)._combined_loader
    if combined is None or len(combined.flattened) == 1 or combined._mode != "sequential":
        return [""]
    loaders, count = combined.iterables, len(combined.flattened)
    if isinstance(loaders, Mapping) and len(loaders) == count:
        return [str(name) for name in loaders]
    return [f"dataloader_idx_{index}" for index in range(count)]


def _loop(trainer: Any, mode: str) -> Any:
    if mode == "test":
        return trainer.test_loop
    return trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop
