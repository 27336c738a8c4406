"""A hook that emits a description of the run, and records the numbers of the train steps as metrics."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from eventloop.assembly.description import options_of
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter, BeforeRun, BeforeTrainIter, RunInfo
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.hooks.log_text import log_text
from eventloop.metrics.scalar_value import unlogged, with_log_vars
from eventloop.model.summary import count_text, import_torchinfo
from eventloop.optim.optimizers import classes_text
from eventloop.util.checks import check_bools

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")


class RuntimeInfoHook(Hook):
    """Emit `run_info` at the start, and record every number in `trainer.outputs` as a metric.

        default_hooks=dict(runtime_info=dict(info={"seed": "7", "experiment": "baseline"}))

    The numbers stay on their device, and the training thread waits for none of them. If the outputs have a
    mapping `log_vars`, as those of mmcv's models, its numbers are recorded under the names in the mapping.

    Args:
        info: more entries of `run_info`, such as a seed, an experiment's name or a config's text.
        model_summary: True logs `trainer.model_summary` of the first batch, before the first iteration.

    Raises:
        TypeError: `model_summary` is not a bool.
        ImportError: `model_summary` is True, and torchinfo is not installed.
    """

    priority = Priority.VERY_HIGH

    def __init__(self, info: dict[str, str] | None = None, model_summary: bool = False) -> None:
        check_bools(model_summary=model_summary)
        self._info = dict(info or {})
        self._model_summary = model_summary
        self._outputs_checked = False  # whether the first outputs were searched for unlogged numbers
        if model_summary:
            import_torchinfo()

    def attach(self, bus: Bus) -> None:
        """Subscribe the event methods and, with `model_summary`, a handler that logs the summary once."""
        super().attach(bus)
        if self._model_summary:
            bus.subscribe(self._log_summary, BeforeTrainIter, priority=self.priority, once=True)

    def _log_summary(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        if trainer.rank == 0:
            log_text(trainer, "model_summary", trainer.model_summary(trainer.batch))

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Emit `run_info` with a description of the run."""
        if not trainer.bus.wants(RunInfo):
            return
        device_of_model = next((p.device for p in trainer.model.parameters()), "cpu")
        facts = {
            "model": type(trainer.model).__name__,
            "parameters": count_text(trainer.model),
            "optimizer": classes_text(trainer.optimizer) or "none",
            "schedulers": ", ".join(type(s).__name__ for s in trainer.schedulers) or "none",
            "device": str(trainer.device or device_of_model),
            "work_dir": str(trainer.work_dir),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "plan": str(trainer.bus),
        }
        trainer.announce(
            RunInfo,
            mode=trainer.mode,
            step=trainer.iter,
            info={**facts, **self._info},
            config=trainer.config,
            options={} if trainer.begun is None else options_of(trainer, trainer.state.settings),
        )

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Record every number that the train step has returned as a metric."""
        outputs = trainer.outputs
        is_mapping = type(outputs) is dict or isinstance(outputs, Mapping)
        if not is_mapping:  # OptimizerHook raises the error about other outputs
            return
        if not self._outputs_checked:
            self._warn_unlogged(outputs)
        if "log_vars" in outputs:
            outputs = with_log_vars(outputs)
        if names_of_host := trainer.logged_by_host:  # another engine logs metrics of these names
            outputs = {f"outputs/{k}" if k in names_of_host else k: value for k, value in outputs.items()}
        trainer.metrics.put_numbers(outputs)

    def _warn_unlogged(self, outputs: Mapping[str, Any]) -> None:
        """Log a warning in the first iteration if numbers in nested mappings are not recorded."""
        self._outputs_checked = True
        if names := unlogged(outputs):
            logger.warning(
                "the train step returned %s as mappings of numbers, which are not logged: return the numbers "
                "with 'loss', or in a mapping named log_vars",
                " and ".join(map(repr, names)),
            )
