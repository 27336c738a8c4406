"""A hook that emits the facts of a run, and records the numbers that its train steps return as metrics."""

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

    The numbers stay on their device, and the hook waits for none of them. Those of a mapping `log_vars`
    within the outputs, as mmcv's models return, are recorded under their own names.

    Args:
        info: further facts for `run_info`, such as a seed, an experiment's name or a config's text.
        model_summary: log `trainer.model_summary` of the first batch, before the first iteration.

    Raises:
        TypeError: `model_summary` is not a bool.
        ImportError: `model_summary` is True, and torchinfo is not installed.
    """

    priority = Priority.VERY_HIGH

    def __init__(self, info: dict[str, str] | None = None, model_summary: bool = False) -> None:
        check_bools(model_summary=model_summary)
        self._info = dict(info or {})
        self._model_summary = model_summary
        self._checked = False  # whether the outputs of an iteration were checked
        if model_summary:
            import_torchinfo()

    def attach(self, bus: Bus) -> None:
        """Subscribe the event methods and, if asked, a handler that logs the summary once."""
        super().attach(bus)
        if self._model_summary:
            bus.subscribe(self._log_summary, BeforeTrainIter, priority=self.priority, once=True)

    def _log_summary(self, trainer: Trainer, event: BeforeTrainIter) -> None:
        if trainer.rank == 0:
            log_text(trainer, "model_summary", trainer.model_summary(trainer.batch))

    def before_run(self, trainer: Trainer, event: BeforeRun) -> None:
        """Emit `run_info` with the facts of the run."""
        if not trainer.bus.wants(RunInfo):
            return
        facts = {
            "model": type(trainer.model).__name__,
            "parameters": count_text(trainer.model),
            "optimizer": classes_text(trainer.optimizer) or "none",
            "schedulers": ", ".join(type(s).__name__ for s in trainer.schedulers) or "none",
            "device": str(trainer.device or next((p.device for p in trainer.model.parameters()), "cpu")),
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
        """Record every number that the train step returned as a metric."""
        outputs = trainer.outputs
        # for other types the optimizer hook raises an error
        if type(outputs) is dict or isinstance(outputs, Mapping):
            if not self._checked:
                self._warn_unlogged(outputs)
            outputs = with_log_vars(outputs) if "log_vars" in outputs else outputs
            if taken := trainer.logged_by_host:
                outputs = {f"outputs/{k}" if k in taken else k: value for k, value in outputs.items()}
            trainer.metrics.put_numbers(outputs)

    def _warn_unlogged(self, outputs: Mapping[str, Any]) -> None:
        """Warn, in the first iteration, of numbers in mappings within the outputs."""
        self._checked = True
        if names := unlogged(outputs):
            logger.warning(
                "the train step returned %s as mappings of numbers, which are not logged: return the numbers "
                "with 'loss', or in a mapping named log_vars",
                " and ".join(map(repr, names)),
            )
