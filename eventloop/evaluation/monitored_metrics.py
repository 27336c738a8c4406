"""Check before the first training iteration that the validation reports the metrics that hooks monitor."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from copy import copy
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parameter import is_lazy

from eventloop.checkpoint.weights import save_modes_and_buffers
from eventloop.data.loader_info import named_loaders, of_loader, persists, to_device, why_not_by_index
from eventloop.data.loader_state import has_state_dict, random_state, samplers_of, set_random_state
from eventloop.data.rng import module_generators, set_module_generators
from eventloop.data.trainer_parts import TrainerParts
from eventloop.evaluation.batch_sizes import samples_of
from eventloop.evaluation.compiled_outputs import run_step
from eventloop.evaluation.evaluation import Evaluation, Evaluator, Metric, save_fields
from eventloop.evaluation.other_weights import name_of_pass, other_weights
from eventloop.state.exchange import raised_together
from eventloop.state.undo import Undo
from eventloop.util.checks import at_least
from eventloop.util.suggest import near, need_of
from eventloop.util.text import error_text

logger = logging.getLogger("eventloop")

_CLASSIFICATION_LOSSES = (F.cross_entropy, F.nll_loss)
_CLASSIFICATION_MODULES = (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)
_NOTE = (
    "raised before the training, by a batch of val_loader: the trainer has no loss_fn and no val_step, so a "
    "validation calls model(inputs) of batches (inputs, target); sanity_val=0 skips this batch"
)


class MonitoredMetrics:
    """Check the metrics that hooks monitor, when the trainer is built or in a sanity validation.

    Args:
        trainer: the trainer.
        sanity_val: the number of batches of the sanity validation. None validates one batch, if the name of a
            metric could not be checked when the trainer was built.
        own_val_step: whether the user has given a `val_step`, which may report any metrics.

    Raises:
        TypeError, ValueError: `sanity_val` is not an int of at least 0, or there is no `val_loader` for it.
    """

    def __init__(self, trainer: TrainerParts, sanity_val: int | None, *, own_val_step: bool) -> None:
        _check_sanity_val(sanity_val, trainer.val_loader)
        self._trainer, self.sanity_val = trainer, sanity_val
        # whether to run `val_step` on a batch before the training: the trainer's own one needs batches
        # (inputs, target), and without a `loss_fn` the training may succeed with batches of any other form
        self._tries_step = trainer.loss_fn is None and not own_val_step and trainer.val_loader is not None
        self._certain, self._possible = reported_names(trainer.evaluator, trainer.loss_fn, own_val_step)
        self._required: list[tuple[str, str]] = []  # each metric, and the option of a hook that names it
        self._unchecked: list[tuple[str, str]] = []  # the required metrics that may turn out to be absent

    def shorten(self, batches: int) -> None:
        """Limit the sanity validation to `batches` batches, as in a `fast_dev_run`."""
        if self.sanity_val is not None:
            self.sanity_val = min(self.sanity_val, batches)

    def require(self, metric: str, option: str) -> None:
        """Check that the validation can report a metric; hooks call this in their `check`.

        Args:
            metric: the metric's name.
            option: the option that names it, for the error, such as "CheckpointHook(save_best='accuracy')".

        Raises:
            ValueError: the validation does not report the metric.
        """
        if self._possible is not None and metric not in (possible := self._with_prefixes(self._possible)):
            raise ValueError(self._unreported(metric, option, possible))
        self._required.append((metric, option))
        if metric not in self._with_prefixes(self._certain):
            self._unchecked.append((metric, option))

    def sanity_check(self, *, validates: bool) -> None:
        """Validate a few batches before a run's first iteration, and look for the monitored metrics.

        No event is emitted: handlers would count, log and swap weights for a validation that is not part of
        the run. Random states, buffers, modes, metrics and evaluators are restored; other changes made by
        `val_step` are not. By default a loader that may not start again, such as an iterator, is not used. A
        resumed run is not checked.

        Args:
            validates: whether the run will validate.

        Raises:
            ValueError: a metric is missing.
            Exception: an error of the user's code, if `sanity_val` was given. By default the error is logged
                and the names are not checked, because an evaluator may need more than one batch.
        """
        trainer, batches = self._trainer, self.sanity_val
        if trainer.iter or trainer.stopping:
            return
        if batches is None and validates and self._tries_step and _can_be_repeated(trainer):
            self._try_val_step()
        if batches is None:
            batches = self._default_batches()
        if batches:
            logger.info(
                "a sanity validation of %d batch%s comes before training: trainer.sanity_checking is True, "
                "and sanity_val=0 skips it",
                batches,
                "" if batches == 1 else "es",
            )
            self._check_required(batches)

    def _default_batches(self) -> int:
        """Return the batches to validate by default: 1 if that checks a metric and can be undone, else 0."""
        if not self._unchecked:
            return 0
        if _can_be_repeated(self._trainer):
            return 1
        logger.info(
            "not checked before training: whether the validation reports %s. The val_loader may not "
            "restart, or the model is lazy; Trainer(sanity_val=1) checks it all the same",
            self._unchecked_names(),
        )
        return 0

    def _check_required(self, batches: int) -> None:
        """Validate `batches` batches, and raise ValueError if they lack a monitored metric."""
        metrics = self._validate(batches)
        if metrics is None:
            return
        names = {of_loader(weights, name) for name in metrics for weights in self._weights}
        # all of them: even "accuracy", which is certain with F.cross_entropy, is absent for soft targets
        for metric, option in self._required:
            if metric not in names:
                advice = f" This is of a sanity validation of {batches} batches; sanity_val=0 skips it."
                raise ValueError(self._unreported(metric, option, names) + advice)

    def _try_val_step(self) -> None:
        """Run the trainer's own `val_step` on one batch of each loader, without evaluators.

        With a user's train step or loop the trainer does not know the structure of the batches. Without this
        call an error of `val_step` would come only after the first epoch.
        """
        trainer = self._trainer
        undo = Undo()
        # undo twice: an interrupt may skip one of the two exits
        with undo, undo, trainer.clock.excluding(), raised_together("the first validation batch"):
            _prepare(undo, trainer)
            _run_val_step(trainer)

    def _validate(self, batches: int) -> Mapping[str, float] | None:
        """Return the metrics of `batches` batches; None if that failed and the user has not asked for it."""
        trainer = self._trainer
        try:
            undo = Undo()
            # undo twice: an interrupt may skip one of the two exits
            with undo, undo, trainer.clock.excluding():
                _prepare(undo, trainer)
                return _metrics_of(trainer, batches)
        except Exception as error:
            if self.sanity_val is not None:
                error.add_note(f"raised by the sanity validation before training, sanity_val={batches}")
                raise
            logger.warning(
                "the sanity validation of one batch failed, so it is not checked whether the validation "
                "reports %s: %s; sanity_val=0 skips it",
                self._unchecked_names(),
                error_text(error),
            )
            return None

    def _unchecked_names(self) -> str:
        return ", ".join(repr(metric) for metric, _ in self._unchecked)

    def _with_prefixes(self, names: Iterable[str]) -> set[str]:
        """Return metrics' names with the prefixes of all passes of a validation, such as "clean/accuracy"."""
        return {of_loader(each, name) for name in names for each in self._passes}

    @property
    def _passes(self) -> list[str]:
        """The names of the passes of a validation: over each loader, with each of `_weights`."""
        loaders = [*named_loaders(self._trainer.val_loader)] or [""]
        return [name_of_pass(weights, loader) for weights in self._weights for loader in loaders]

    @property
    def _weights(self) -> list[str]:
        """The prefixes of the weights that are evaluated: "" for the model's own, "ema" for an average."""
        return ["", *other_weights(self._trainer.hooks)]

    def _unreported(self, metric: str, option: str, names: Iterable[str]) -> str:
        """Return the text of an error: the metric is not among `names`, with a suggestion and a remedy."""
        known, lower = sorted(names), metric.lower()
        similar = [name for name in known if lower in name.lower() or name.lower() in lower]
        suggestion = near(metric, known) or (f": did you mean {similar[0]!r}?" if similar else ".")
        # from the last pass on: the first one may have no prefix, with which every name begins
        prefixes = (of_loader(each, "") for each in reversed(self._passes))
        prefix = next((each for each in prefixes if metric.startswith(each)), "")
        return (
            f"{option} needs the metric {metric!r}, which the validation does not report{suggestion} It "
            f"reports {', '.join(known) or 'nothing'}. Other names come from "
            f"evaluator={{{metric.removeprefix(prefix)!r}: ...}} or val_step=...{need_of(metric)}"
        )


def reported_names(
    evaluators: Mapping[str, Evaluator], loss_fn: object, own_val_step: bool
) -> tuple[set[str], set[str] | None]:
    """Return the names of the metrics that a validation certainly reports, and of those that it may report.

    Returns:
        The two sets; None in place of the second one if a `val_step` or an evaluator may report any names. An
        evaluator of torchmetrics whose `compute` returns a tensor reports one number, under its own name.
    """
    certain = {name for name, evaluator in evaluators.items() if _returns_one_number(evaluator)}
    all_known = not own_val_step and len(certain) == len(evaluators)
    if not own_val_step and loss_fn is not None:
        certain.add("loss")
    possible = set(certain)
    if not own_val_step and not evaluators:
        possible.add("accuracy")
        if loss_fn in _CLASSIFICATION_LOSSES or isinstance(loss_fn, _CLASSIFICATION_MODULES):
            certain.add("accuracy")
    return certain, possible if all_known else None


def _returns_one_number(evaluator: Evaluator) -> bool:
    """Return whether an evaluator is one of torchmetrics whose `compute` is annotated to return a tensor."""
    compute = getattr(type(evaluator), "compute", None)
    is_torchmetric = getattr(compute, "__module__", "").startswith("torchmetrics.")
    return is_torchmetric and getattr(compute, "__annotations__", {}).get("return") is torch.Tensor


def _check_sanity_val(sanity_val: object, val_loader: object) -> None:
    """Refuse a `sanity_val` that is not an int of at least 0, or that lacks a `val_loader`."""
    if sanity_val is None:
        return
    at_least("sanity_val", sanity_val, 0)
    if sanity_val and val_loader is None:
        raise ValueError(f"sanity_val={sanity_val} needs batches to validate: give the Trainer a val_loader")


# --- the sanity validation ---------------------------------------------------------------------------------


def _can_be_repeated(trainer: TrainerParts) -> bool:
    """Return whether batches can be validated twice: loaders restart, and the model has all its weights."""
    loaders = named_loaders(trainer.val_loader).values()
    all_restart = bool(loaders) and all(map(_restarts, loaders))
    return all_restart and not any(map(is_lazy, trainer.model.parameters()))


def _restarts(loader: Iterable[Any]) -> bool:
    """Return whether each pass over a loader begins at its first batch, in an order that can be restored."""
    if isinstance(loader, list | tuple):
        return True
    return why_not_by_index(loader) is None and all(map(_is_restored, samplers_of(loader).values()))


def _is_restored(sampler: object) -> bool:
    """Return whether a sampler can draw the same samples again; a user's sampler may count its passes."""
    is_pytorchs = type(sampler).__module__.startswith("torch.")
    return is_pytorchs or has_state_dict(sampler) or hasattr(sampler, "set_epoch")


def _metrics_of(trainer: TrainerParts, batches: int) -> Mapping[str, float]:
    """Validate `batches` batches of each loader, and return the metrics."""
    metrics: dict[str, float] = {}
    for name, loader in named_loaders(trainer.val_loader).items():
        reported = _validate_on(trainer, loader, batches).compute()
        metrics |= {of_loader(name, metric): value for metric, value in reported.items()}
    return metrics


def _validate_on(trainer: TrainerParts, loader: Iterable[Any], batches: int) -> Evaluation:
    """Validate `batches` batches of a loader; if this fails on one rank, all ranks raise an error."""
    evaluation = Evaluation(trainer.evaluator, trainer.ignored_outputs, trainer.device)
    # a rank that raised alone would not call `compute`, in which the other ranks would wait for it
    with raised_together("the sanity validation"):
        for batch in islice(_without_persistent_workers(loader), batches):
            trainer.batch = to_device(batch, trainer.device)
            outputs = run_step(trainer.val_step, trainer.batch, compiled=trainer.compiled)
            trainer.outputs = outputs
            evaluation.add(outputs, samples_of(outputs, trainer.batch, trainer.ignored_outputs))
    return evaluation


def _without_persistent_workers(loader: Iterable[Any]) -> Iterable[Any]:
    """Return a loader; if its workers persist, a copy of it whose workers end with the pass.

    Persistent workers would begin the next pass with the random state that this pass leaves.
    """
    if not persists(loader):
        return loader
    one_pass = copy(loader)
    vars(one_pass)["persistent_workers"] = False  # setattr of a DataLoader raises an error
    return one_pass


def _prepare(undo: Undo, trainer: TrainerParts) -> None:
    """Prepare a validation, and let `undo` restore random states, modes, buffers, fields and evaluators."""
    model = trainer.model
    undo.step(set_module_generators, model, module_generators(model))
    for loader in named_loaders(trainer.val_loader).values():
        undo.step(partial(set_random_state, loader, random_state(loader), opening=True))
    for evaluator in trainer.evaluator.values():
        if isinstance(evaluator, Metric):
            undo.step(evaluator.reset)
    undo.attributes(trainer, "mode", "sanity_checking")
    undo.attributes(trainer.clock.waits, "place")
    save_fields(undo, trainer)
    save_modes_and_buffers(undo, model)
    trainer.mode, trainer.sanity_checking = "val", True
    model.eval()


def _run_val_step(trainer: TrainerParts) -> None:
    """Run `val_step` on the first batch of each loader, and add an explanation to its error."""
    for loader in named_loaders(trainer.val_loader).values():
        for batch in islice(_without_persistent_workers(loader), 1):
            trainer.batch = to_device(batch, trainer.device)
            try:
                with torch.no_grad():
                    trainer.val_step(trainer.batch)
            except Exception as error:
                error.add_note(_NOTE)
                raise
