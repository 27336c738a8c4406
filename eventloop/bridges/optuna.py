"""Define a hook that ends unpromising trials of an Optuna study. It needs optuna (the extra `optuna`)."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

try:
    from optuna import TrialPruned
    from optuna.trial import BaseTrial, Trial
except ImportError as error:
    raise ImportError("OptunaPruningHook needs optuna: pip install 'torch-eventloop[optuna]'") from error

from eventloop.events import COMPLETED, AfterTrain, AfterValEpoch, BeforeTrain
from eventloop.events.priority import Priority
from eventloop.hooks.hook import Hook
from eventloop.state.exchange import decided_by_rank_0
from eventloop.util.checks import check_metric
from eventloop.util.suggest import unreported
from eventloop.util.text import error_text

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer


class Verdict(NamedTuple):
    """Hold the pruner's answer to a report, which rank 0 sends to the other ranks."""

    prune: bool
    error: str = ""
    """The text of an error that the report raised on rank 0, or ""."""


class OptunaPruningHook(Hook):
    """Report a metric of each validation to an Optuna trial, and end the training when its pruner says so.

        def objective(trial):
            lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
            trainer = make_trainer(lr, hooks=[OptunaPruningHook(trial, "loss")])
            with closing(trainer):
                trainer.train()
            return trainer.bus.latest("after_val_epoch").metrics["loss"]

        optuna.create_study(pruner=optuna.pruners.MedianPruner()).optimize(objective, n_trials=20)

    The value is reported with the completed epochs as its step, from 1, or with the completed iterations in a
    run that counts iterations. Validations outside a training are not reported.

    A pruned run is stopped, and has not failed: it ends after its iteration, epoch or validation with all
    closing events, whose reason is "pruned by Optuna: ...". Its last checkpoint is saved, and the writers
    receive all events. Then `train()` closes the bus and raises `optuna.TrialPruned`, which the objective
    must not catch. If an error or a signal ends the run before that, it is raised instead.

    Each report is a transaction in the study's storage, on the training thread. With several ranks only rank
    0 reports; all ranks stop, and all raise `TrialPruned`. The other ranks take `trial=None`. A
    `TorchDistributedTrial` of optuna-integration must be given to all ranks.

    Args:
        trial: the trial that the objective is called with.
        monitor: the metric of the validation; the study's direction says whether less or greater is better.

    Raises:
        TypeError: `trial` is not a trial, or `monitor` is not a name.
        ValueError: the study has several objectives, for which Optuna has no pruning.
        ImportError: optuna is not installed.
    """

    priority = Priority.LOW

    def __init__(self, trial: BaseTrial | None, monitor: str) -> None:
        if trial is not None and not isinstance(trial, BaseTrial):
            raise TypeError(
                f"trial must be the trial that Optuna calls the objective with, got {trial!r}; ranks other "
                "than 0 take None"
            )
        if isinstance(trial, Trial) and (objectives := len(trial.study.directions)) > 1:
            raise ValueError(
                f"trial must belong to a study of one objective, got one of {objectives}: Optuna prunes no "
                "others; train without OptunaPruningHook"
            )
        check_metric("monitor", monitor)
        self._trial, self._monitor = trial, monitor
        self._training = False
        self._pruned = ""
        """The value and the step at which the trial was pruned, as text; "" until then."""

    def check(self, trainer: Trainer) -> None:
        """Refuse a trainer that never reports the metric, and a `trial` that does not fit the rank.

        Raises:
            ValueError: the trainer has no `val_loader`, the validation does not report the metric, rank 0 has
                no trial, or another rank has a plain `Trial`.
        """
        option = f"OptunaPruningHook(monitor={self._monitor!r})"
        if trainer.val_loader is None and not trainer.host:
            raise ValueError(f"{option} needs a validation: give the Trainer a val_loader")
        trainer.monitored.require(self._monitor, option)
        if trainer.rank == 0 and self._trial is None:
            raise ValueError(
                "OptunaPruningHook needs the trial on rank 0, which reports to it, got trial=None"
            )
        if trainer.rank > 0 and isinstance(self._trial, Trial):
            raise ValueError(
                f"OptunaPruningHook takes trial=None or a TorchDistributedTrial on rank {trainer.rank}, "
                f"because rank 0 alone reports, got {self._trial!r}"
            )

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Begin to report validations."""
        self._training = True

    def after_train(self, trainer: Trainer, event: AfterTrain) -> None:
        """Stop reporting validations."""
        self._training = False

    def after_val_epoch(self, trainer: Trainer, event: AfterValEpoch) -> None:
        """Report the metric, and stop the run if the pruner answers that the trial is to be pruned.

        Raises:
            ValueError: the validation does not have the metric (the message suggests one).
            RuntimeError: rank 0 could not reach the study; rank 0 itself raises the study's error.
        """
        if not self._training or self._pruned or event.reason != COMPLETED:
            return
        if self._monitor not in event.metrics:
            ending = unreported(self._monitor, event.metrics)
            raise ValueError(f"OptunaPruningHook monitors {self._monitor!r}, {ending}")
        score, step = float(event.metrics[self._monitor]), event.epoch if trainer.by_epoch else trainer.iter
        if self._should_prune(score, step, several_ranks=trainer.world_size > 1):
            unit = "epoch" if trainer.by_epoch else "iteration"
            self._pruned = f"{self._monitor} is {score:g} at {unit} {step}"
            trainer.during_run.push(lambda *ending: self._raise(trainer, *ending))  # called at the run's end
            trainer.stop(f"pruned by Optuna: {self._pruned}")

    def _should_prune(self, score: float, step: int, *, several_ranks: bool) -> bool:
        """Report the score, and return the pruner's answer, which all ranks receive from rank 0.

        Only rank 0 reports to the study; a `TorchDistributedTrial` on another rank waits for it there.
        Rank 0 also sends the error of its report, so that the other ranks do not wait for an answer forever.
        Rank 0 raises that error itself, and each other rank a RuntimeError with its text.

        Args:
            several_ranks: whether the run has several ranks; then this is a collective.
        """
        if not several_ranks:
            return self._report(score, step)
        failure: Exception | None = None
        try:
            own_verdict = Verdict(self._report(score, step))
        except Exception as error:
            failure, own_verdict = error, Verdict(False, error_text(error))
        verdict = decided_by_rank_0(lambda: own_verdict)
        if failure is not None:
            raise failure
        if verdict.error:
            raise RuntimeError(f"rank 0 could not report to the Optuna study: {verdict.error}")
        return verdict.prune

    def _report(self, score: float, step: int) -> bool:
        """Report the score to this rank's trial, and return its answer; False without a trial."""
        if self._trial is None:  # on a rank other than 0
            return False
        self._trial.report(score, step)
        return bool(self._trial.should_prune())

    def _raise(
        self,
        trainer: Trainer,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close the bus and raise TrialPruned, unless an error or a signal ends the program."""
        if error is None and not trainer.ends_program and trainer.stop_signal is None:
            trainer.bus.close()  # the error leaves the objective, and nothing else would end the threads
            raise TrialPruned(self._pruned)
