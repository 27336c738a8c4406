"""Apply commands while another engine (the host) runs the training loop; all bridges share this code."""

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
    """Exclude the commands that need our own loop: `rollback`, and on several ranks `pause` and `go`."""
    host = trainer.host
    reasons = {"rollback": f"the loop of {host} fetches its batches itself"}
    if trainer.world_size > 1:
        reason = f"{host} trains on {trainer.world_size} ranks, which {host} does not expect to wait"
        reasons |= {"pause": reason, "go": reason}
    trainer.commands.known.exclude(reasons)


def validate_aside(
    trainer: HostedTrainer, validate: Callable[[], Any], loaders: Iterable[Any] = ()
) -> dict[str, float]:
    """Run a validation of the host because of a command, and return its metrics.

    Afterwards restore random states and the modes of modules, so that the training continues as it would have
    done without the command. The host calls its own callbacks, as in any of its validations.

    Args:
        validate: the function that runs the validation, while the bridge emits the events of a validation.
        loaders: the loaders of the validation, whose own random generators are restored.
    """
    undo = Undo()
    with undo, undo:  # twice: an interrupt may skip one of the two exits
        undo.step(trainer.exit_evaluation)
        data_loaders = [loader for loader in loaders if isinstance(loader, DataLoader)]
        undo.step(before_drawing(trainer.model, None, data_loaders))
        save_modes(undo, trainer.model)
        undo.attributes(trainer, "by_command", "batch", "outputs", "failure")
        trainer.by_command, trainer.evaluated = True, {}
        validate()
        return dict(trainer.evaluated)


class HostSchedules:
    """Keep a factor of the command `set`, such as `lr*=0.5`, in force while a host steps its schedulers.

    The schedulers must compute from values without factors. So the factors are removed before each of their
    steps and applied again after it. Nothing of the host is changed until there is a factor, set in this run
    or before a resume.

    Args:
        trainer: the trainer whose optimizers the schedulers write.
        schedulers: returns the present schedulers of the host; those of PyTorch have an `optimizer`.
        follow: called with this object, once a run, when there is a first factor. From then on the bridge
            must call `remove` before each step of the host's schedulers and `apply` after it.
    """

    def __init__(
        self,
        trainer: DrivenTrainer,
        schedulers: Callable[[], Iterable[Any]],
        follow: Callable[[HostSchedules], object] = lambda schedules: None,
    ) -> None:
        self._trainer, self._schedulers, self._follow = trainer, schedulers, follow
        self.following = False
        """True from the first factor of a run until the run ends."""

    def steps(self, optimizer: Any, option: str) -> bool:
        """Return whether a scheduler of the host writes an option, such as "lr", of an optimizer."""
        for scheduler in self._schedulers():
            groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
            if groups is optimizer.param_groups and option in keys_of(scheduler):
                return True
        return False

    def follow_factors(self) -> None:
        """If a command has set a factor, apply it, and from now on around each step of the schedulers."""
        if not has_factors(self._optimizers()):
            return
        self.apply()
        if not self.following:
            self.following = True
            self._trainer.during_run.callback(self._end)
            self._follow(self)

    def remove(self) -> None:
        """Give the optimizers their values without factors, before the host steps its schedulers."""
        remove_factors(self._optimizers())

    def apply(self) -> None:
        """Multiply the optimizers' values by the factors, after the host has stepped its schedulers."""
        apply_factors(self._optimizers())
        record_last_rates(self._schedulers())  # for programs that read `scheduler.get_last_lr()`

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the host that steps schedulers, so that it runs while factors are removed."""

        @wraps(call)
        def without_factors(*args: Any, **kwargs: Any) -> Any:
            """Call the function while factors are removed; apply them again also after an error."""
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
