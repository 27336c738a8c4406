"""Apply commands in a host's loop: what all bridges refuse, and what their own functions have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch.utils.data import DataLoader

from eventloop.bridges.driven import DrivenTrainer
from eventloop.bridges.hosted import HostedTrainer
from eventloop.checkpoint.weights import save_modes
from eventloop.evaluation.evaluation import before_drawing
from eventloop.optim.optimizers import each_optimizer
from eventloop.optim.param_groups import apply_factors, has_factors, record_last_rates, remove_factors
from eventloop.resume.fast_forward import keys_of
from eventloop.state.undo import Undo


def refuse_loop_commands(trainer: HostedTrainer) -> None:
    """Refuse, by name, the commands that need the trainer's own loop."""
    host = trainer.host
    reasons = {"rollback": f"the loop of {host} fetches its batches itself"}
    if trainer.world_size > 1:
        why = f"{host} trains on {trainer.world_size} ranks, which {host} does not expect to wait"
        reasons |= {"pause": why, "go": why}
    trainer.commands.known.exclude(reasons)


def validate_aside(
    trainer: HostedTrainer, validate: Callable[[], Any], loaders: Iterable[Any] = ()
) -> dict[str, float]:
    """Validate by a call of the host for a command, and return the metrics.

    Random states and the modes of modules are restored, so that the training goes on as it would have done.
    The host's own callbacks are called as in any validation of it.

    Args:
        validate: the call, within which the bridge emits the events of a validation.
        loaders: the loaders of the validation, whose own generators are restored.
    """
    undo = Undo()
    with undo, undo:  # twice: an interrupt may skip one of the two exits
        undo.step(trainer.exit_evaluation)
        undo.step(before_drawing(trainer.model, None, [x for x in loaders if isinstance(x, DataLoader)]))
        save_modes(undo, trainer.model)
        undo.attributes(trainer, "by_command", "batch", "outputs", "failure")
        trainer.by_command, trainer.evaluated = True, {}
        validate()
        return dict(trainer.evaluated)


class HostSchedules:
    """The schedulers of a host, which steps them without the factors of commands.

    Nothing of the host is changed until a command has set a scheduled value, in this run or before a resume.

    Args:
        trainer: the trainer whose optimizers the schedulers write.
        schedulers: returns the host's schedulers now; those of PyTorch have an `optimizer`.
        follow: called with this object, once a run, when the first factor is there: from then on the bridge
            calls `remove` before each step of the host's schedulers and `apply` after it.
    """

    def __init__(
        self,
        trainer: DrivenTrainer,
        schedulers: Callable[[], Iterable[Any]],
        follow: Callable[[HostSchedules], object] = lambda schedules: None,
    ) -> None:
        self._trainer, self._schedulers, self._follow = trainer, schedulers, follow
        self.following = False
        """True once there is a factor, until the run ends."""

    def steps(self, optimizer: Any, option: str) -> bool:
        """Return whether a scheduler of the host writes an option of an optimizer."""
        for scheduler in self._schedulers():
            groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
            if groups is optimizer.param_groups and option in keys_of(scheduler):
                return True
        return False

    def follow_factors(self) -> None:
        """Have the host's schedulers stepped without factors, if there is one."""
        if not has_factors(self._optimizers()):
            return
        self.apply()
        if not self.following:
            self.following = True
            self._trainer.during_run.callback(self._end)
            self._follow(self)

    def remove(self) -> None:
        """Write the values without factors, before the host steps its schedulers."""
        remove_factors(self._optimizers())

    def apply(self) -> None:
        """Write the values with factors, after the host has stepped its schedulers."""
        apply_factors(self._optimizers())
        record_last_rates(self._schedulers())

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of the host that steps schedulers, so that these find the values without factors."""

        @wraps(call)
        def without_factors(*args: Any, **kwargs: Any) -> Any:
            self.remove()
            try:
                return call(*args, **kwargs)
            finally:
                self.apply()

        return without_factors

    def _end(self) -> None:
        self.following = False

    def _optimizers(self) -> list[Any]:
        return list(each_optimizer(self._trainer.optimizer))
