"""Create the Lightning trainer, module and logger that Lightning's callbacks receive in our trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from eventloop.bridges.lightning.counters import validates_every_epoch
from eventloop.optim.optimizers import each_optimizer


def make_module(pl: Any, model: torch.nn.Module) -> Any:
    """Return the model if it is a LightningModule, else a LightningModule that shares the model's parts."""
    if isinstance(model, pl.LightningModule):
        return model

    class Shared(pl.LightningModule):  # type: ignore[misc]
        """Share the parameters, buffers and children of a module that is no LightningModule."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        def validation_step(self) -> None:
            """Do nothing; Lightning counts the batches of validations only for a module with this method."""

    Shared.__name__ = Shared.__qualname__ = type(model).__name__
    shared = Shared()
    for parts in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        shared.__dict__[parts] = getattr(model, parts)
    return shared


def make_logger(pl: Any, trainer: Any) -> Any:
    """Return a Lightning logger that passes its numbers to our trainer's metrics."""
    base: Any = import_module(f"{pl.__name__}.loggers").Logger

    class MetricsLogger(base):  # type: ignore[misc]
        """Put logged numbers into `trainer.metrics`, from which our writers receive them."""

        @property
        def name(self) -> str:
            return "eventloop"

        @property
        def version(self) -> int:
            return 0

        def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            trainer.metrics.put_scalars(dict(metrics), smoothing_hint=False)

        def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
            """Do nothing: our trainer does not log hyperparameters."""

    return MetricsLogger()


def make_trainer(pl: Any, trainer: Any, module: Any, callbacks: Sequence[Any]) -> Any:
    """Return a Lightning trainer whose state is that of a running `fit`, with the options of our trainer."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    has_progress_bar = any(isinstance(callback, pl.callbacks.ProgressBar) for callback in callbacks)
    with _quiet(pl):
        native = pl.Trainer(
            max_epochs=trainer.max_epochs or -1,
            max_steps=-1 if trainer.by_epoch else trainer.max_iters,
            logger=make_logger(pl, trainer),
            callbacks=list(callbacks),
            enable_checkpointing=False,
            enable_progress_bar=has_progress_bar,
            enable_model_summary=False,
            use_distributed_sampler=False,
            check_val_every_n_epoch=1 if validates_every_epoch(trainer) else 2,
            log_every_n_steps=10,
            limit_val_batches=0 if trainer.val_loader is None else 1.0,
            strategy=pl.strategies.SingleDeviceStrategy(str(device)),
            default_root_dir=str(trainer.work_dir),
            accelerator="cuda" if device.type == "cuda" else "cpu",
            devices=1,
        )
    native.strategy._lightning_module = native.strategy.model = module
    native.strategy.optimizers = [
        optimizer for optimizer in each_optimizer(trainer.optimizer) if optimizer is not None
    ]
    module._trainer = native
    states = import_module(f"{pl.__name__}.trainer.states")
    native.state.fn, native.state.status = states.TrainerFn.FITTING, states.TrainerStatus.RUNNING
    native.training = True
    native.fit_loop.min_epochs, native.fit_loop.max_epochs = 0, trainer.max_epochs or -1
    return native


@contextmanager
def _quiet(pl: Any) -> Iterator[None]:
    """Silence Lightning's log lines about the devices that its trainer finds, as our trainer chooses them."""
    names = (pl.__name__.partition(".")[0], pl.__name__, f"{pl.__name__}.utilities.rank_zero")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
