"""Keep modules in eval mode during a training if they were in eval mode before it, such as a BatchNorm."""

from __future__ import annotations

import logging

import torch

from eventloop.checkpoint.weights import unwrap

logger = logging.getLogger("eventloop")


_WHOLE = (
    "%s was in eval mode and is trained in train mode, with all its modules: to leave some in eval mode call "
    "model.train(), then eval() of these, before the training"
)


class TrainingModes:
    """The modes in which modules are trained: a module that is in eval mode before the training stays so.

        model[1].eval()         # a frozen BatchNorm
        trainer.train()         # it normalizes by its running statistics, and does not update them

    A model that is in eval mode itself, as `from_pretrained` leaves it, is trained in train mode as a whole.
    In the next run only those modules have other modes whose mode was changed between the runs: what handlers
    change within a run lasts for an epoch, except in `before_run` and `before_train`.
    """

    def __init__(self) -> None:
        self._eval: list[torch.nn.Module] = []
        # at the end of the last run, unless all were eval
        self._last_modes: dict[torch.nn.Module, bool] = {}
        self._run = False
        self._line: tuple[int, str] | None = None  # for the log, with its level

    def begin_run(self, model: torch.nn.Module) -> None:
        """Record the modules in eval mode after `before_train`, by what was changed since the last run."""
        self._run = True
        if self._last_modes:
            self._change(unwrap(model), self._last_modes)
        else:
            self.record_modes(model)

    def end_run(self, model: torch.nn.Module) -> None:
        """Record the modes at the end of a run that `begin_run` began; it may be called again."""
        inner = unwrap(model)
        if self._run and inner.training:
            self._last_modes = {module: module.training for module in inner.modules()}
        self._run = False

    def record_modes(self, model: torch.nn.Module) -> None:
        """Record the modules that are in eval mode, before the first epoch of a training."""
        inner = unwrap(model)
        modes = {name: module.training for name, module in inner.named_modules()}
        self._eval, self._line = [], None
        if all(modes.values()):
            return
        if inner.training:
            self._set_eval([module for module in inner.modules() if not module.training], inner)
        else:
            level = logging.WARNING if any(modes.values()) else logging.INFO
            self._line = level, _WHOLE % type(inner).__name__

    def _change(self, inner: torch.nn.Module, last_modes: dict[torch.nn.Module, bool]) -> None:
        """Record the modules whose mode differs from that at the end of the last run.

        A model in eval mode as a whole, as an evaluation by hand leaves it, says nothing of its modules.
        """
        changed = {module for module in inner.modules() if module.training != last_modes.get(module, True)}
        if inner.training and changed:
            still_eval = [module for module in self._eval if module not in changed]
            self._set_eval(still_eval + [module for module in changed if not module.training], inner)

    def _set_eval(self, modules: list[torch.nn.Module], inner: torch.nn.Module) -> None:
        self._eval = modules
        modes = {name: module not in modules for name, module in inner.named_modules()}
        level = logging.WARNING if any(map(_is_whole_and_trains, modules)) else logging.INFO
        line = level, f"left in eval mode while training: {_names(modes)}"
        self._line = line if modules else None

    def set(self, model: torch.nn.Module) -> None:
        """Set the model to its modes of training, at the beginning of an epoch."""
        if self._line:
            logger.log(*self._line)
            self._line = None
        model.train()
        for module in self._eval:
            module.training = False


def _is_whole_and_trains(module: torch.nn.Module) -> bool:
    """Return whether a module has child modules and at least one parameter with `requires_grad`."""
    return any(True for _ in module.children()) and any(p.requires_grad for p in module.parameters())


def _names(modes: dict[str, bool]) -> str:
    """Return the names of the outermost modules in eval mode, at most eight."""
    names = [
        name for name, training in modes.items() if not training and modes.get(name.rpartition(".")[0], True)
    ]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
