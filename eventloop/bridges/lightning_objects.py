"""The module and the logger of a Lightning trainer that serves callbacks in our trainer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch


def make_module(pl: Any, model: torch.nn.Module) -> Any:
    """Return the model as a LightningModule: itself, or one that has the model's own parts."""
    if isinstance(model, pl.LightningModule):
        return model

    class Shared(pl.LightningModule):  # type: ignore[misc]
        """A LightningModule with the parameters, buffers and children of another module."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

    Shared.__name__ = Shared.__qualname__ = type(model).__name__
    shared = Shared()
    for parts in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        shared.__dict__[parts] = getattr(model, parts)
    return shared


def make_logger(pl: Any, trainer: Any) -> Any:
    """Return a logger whose numbers go to the metrics of our trainer."""
    base: Any = import_module(f"{pl.__name__}.loggers").Logger

    class MetricsLogger(base):  # type: ignore[misc]
        """Put what is logged into `trainer.metrics`, which the writers get."""

        @property
        def name(self) -> str:
            return "eventloop"

        @property
        def version(self) -> int:
            return 0

        def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            trainer.metrics.put_scalars(dict(metrics), smoothing_hint=False)

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            """Nothing: the program knows its parameters."""

    return MetricsLogger()
