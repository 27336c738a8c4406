"""Leave modules in eval mode during a training that were in eval mode before it, such as a frozen BatchNorm.

The trainer uses this module.
"""

from __future__ import annotations

import logging

import torch

from eventloop.checkpoint.weights import unwrap

logger = logging.getLogger("eventloop")


_WHOLE_MODEL = (
    "%s was in eval mode and is trained in train mode, with all its modules: to leave some in eval mode call "
    "model.train(), then eval() of these, before the training"
)


class TrainingModes:
    """Record which modules are trained in eval mode, and set the modes at each epoch.

        model[1].eval()         # a frozen BatchNorm
        trainer.train()         # it normalizes by its running statistics, and does not update them

    A module that is in eval mode when the training begins stays in eval mode. If the model itself is in eval
    mode, as `from_pretrained` returns it, all modules are trained in train mode. In a second run, a module
    gets another mode only if its mode was changed between the runs: a mode that a handler sets within a run
    lasts for an epoch, except in `before_run` and `before_train`.
    """

    def __init__(self) -> None:
        self._eval_modules: list[torch.nn.Module] = []
        # whether each module was in train mode at the end of the last run in which the model itself was
        self._last_modes: dict[torch.nn.Module, bool] = {}
        self._is_running = False
        self._message: tuple[int, str] | None = None  # the level and text to log at the next epoch

    def begin_run(self, model: torch.nn.Module) -> None:
        """Record the modules in eval mode at the begin of a run; after the first run, only changed modes."""
        self._is_running = True
        if self._last_modes:
            self._record_changes(unwrap(model), self._last_modes)
        else:
            self.record_modes(model)

    def end_run(self, model: torch.nn.Module) -> None:
        """Record the modes of all modules at the end of a run; a second call does nothing."""
        inner_model = unwrap(model)
        if self._is_running and inner_model.training:
            self._last_modes = {module: module.training for module in inner_model.modules()}
        self._is_running = False

    def record_modes(self, model: torch.nn.Module) -> None:
        """Record the modules in eval mode before the first epoch, unless the model itself is in eval mode."""
        inner_model = unwrap(model)
        modes = {name: module.training for name, module in inner_model.named_modules()}
        self._eval_modules, self._message = [], None
        if all(modes.values()):
            return
        if inner_model.training:
            self._set_eval([module for module in inner_model.modules() if not module.training], inner_model)
        else:
            level = logging.WARNING if any(modes.values()) else logging.INFO
            self._message = level, _WHOLE_MODEL % type(inner_model).__name__

    def _record_changes(self, inner: torch.nn.Module, last_modes: dict[torch.nn.Module, bool]) -> None:
        """Record the modules whose mode has changed since the end of the last run.

        Nothing is recorded if the model itself is in eval mode, as after an evaluation by hand.
        """
        modules = list(inner.modules())
        changed_modules = {module for module in modules if module.training != last_modes.get(module, True)}
        if inner.training and changed_modules:
            still_eval = [module for module in self._eval_modules if module not in changed_modules]
            newly_eval = [module for module in changed_modules if not module.training]
            self._set_eval(still_eval + newly_eval, inner)

    def _set_eval(self, modules: list[torch.nn.Module], inner: torch.nn.Module) -> None:
        """Record modules of the model `inner` that are trained in eval mode, and a message about them."""
        self._eval_modules = modules
        self._message = None
        if modules:
            modes = {name: module not in modules for name, module in inner.named_modules()}
            level = logging.WARNING if any(map(_is_trainable_subtree, modules)) else logging.INFO
            self._message = level, f"left in eval mode while training: {_names(modes)}"

    def set(self, model: torch.nn.Module) -> None:
        """Set the recorded modules to eval mode and all others to train mode, at the begin of an epoch."""
        if self._message:
            logger.log(*self._message)
            self._message = None
        model.train()
        for module in self._eval_modules:
            module.training = False  # not `eval()`, which would change the modules within it, too


def _is_trainable_subtree(module: torch.nn.Module) -> bool:
    """Return whether a module has child modules and at least one parameter with `requires_grad`."""
    return any(True for _ in module.children()) and any(p.requires_grad for p in module.parameters())


def _names(modes: dict[str, bool]) -> str:
    """Return the names of the first eight modules in eval mode whose parents are in train mode, as a text.

    Args:
        modes: by module name, whether the module is in train mode.
    """
    names = []
    for name, is_training in modes.items():
        parent = name.rpartition(".")[0]
        if not is_training and modes.get(parent, True):
            names.append(name)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
