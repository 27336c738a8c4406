"""A hook that computes precise batch norm statistics before the model is evaluated or saved."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from eventloop.checkpoint.weights import save_modes, unwrap
from eventloop.data.loader_info import refuse_samples
from eventloop.data.side_pass import position_of
from eventloop.evaluation.evaluation import save_fields
from eventloop.events import COMPLETED, AfterTrainEpoch, AfterTrainIter, BeforeTrain, BeforeTrainEpoch
from eventloop.hooks.hook import Hook
from eventloop.migration.names import knowing_others
from eventloop.model.batchnorm_statistics import Forward, get_bn_modules, update_bn_stats
from eventloop.state.schema import read_as
from eventloop.state.undo import Undo
from eventloop.util.checks import check_bools, check_optional_bools, positive_or

if TYPE_CHECKING:
    from eventloop.training.trainer import Trainer

logger = logging.getLogger("eventloop")


class PreciseBN(Hook):
    """Replace the running averages of batch norm layers by statistics over many batches.

        PreciseBN(interval=1, num_iter=200)
        PreciseBN(num_iter=None, data_loader=loader_without_augmentation)     # a whole pass, at the end

    The hook makes a pass over data at an interval and at the end of the run; `update_bn_stats` defines the
    statistics. The pass comes after the optimizer and the schedulers, and before the checkpoint and the
    evaluation of the same epoch or iteration, so both use the precise statistics. Training is not affected,
    because layers in training mode normalize by their batch.

    A stopped run makes no pass at its end, and a pass that a stop interrupts changes nothing. When the run is
    continued or resumed, it first makes the interrupted pass. The time of a pass counts as evaluation, not as
    part of an iteration. If the model has no layer to update, a warning is logged once at the start.

    With an `EMAHook` the statistics are those of the model with its own weights, and the average is evaluated
    and saved with these statistics. After the training, compute the statistics of the average by:

        average = ema_hook.ema_model.module
        update_bn_stats(average.train(), loader, None)

    Args:
        interval: epochs or iterations between two passes; -1 makes one pass, at the end of the run.
        num_iter: the number of batches of a pass; a shorter loader is started again. None runs the loader
            once to its end.
        data_loader: the loader for a pass; by default the train loader, whose order in the training does not
            change. A train loader or sampler that keeps its position needs a `data_loader`: an object with
            `state_dict` and `load_state_dict` is refused, a position in other attributes is not detected. A
            `DataLoader` with a `state_dict`, such as torchdata's, is accepted.
        by_epoch: whether `interval` counts epochs; by default True in a run measured in epochs.
        forward: a function `(model, batch)`, run without gradients. By default the trainer's `train_step`, or
            the model on the inputs of `(inputs, target)`. What hooks add to a training step, such as
            autocast, is not done.
        unbiased: True computes the unbiased estimate of the variance, False the variance of the values, as
            fvcore does.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
    """

    priority = 80

    @knowing_others
    def __init__(
        self,
        interval: int = -1,
        num_iter: int | None = 200,
        data_loader: Iterable[Any] | None = None,
        *,
        by_epoch: bool | None = None,
        forward: Forward | None = None,
        unbiased: bool = False,
    ) -> None:
        check_optional_bools(by_epoch=by_epoch)
        check_bools(unbiased=unbiased)
        positive_or(-1, "interval", interval, ", for only at the end,")
        positive_or(None, "num_iter", num_iter, ", for a whole pass,")
        if forward is not None and not callable(forward):
            raise TypeError(f"forward must be a function (model, batch), got {forward!r}")
        if data_loader is not None:
            _check_loader(data_loader, "data_loader")
        self._interval, self._num_iter, self._by_epoch = interval, num_iter, by_epoch
        self._data_loader, self._forward, self._unbiased = data_loader, forward, unbiased
        self._layers_checked = False  # whether the model was searched for batch norm layers
        self._last_pass = -1  # the number of completed iterations at the last pass
        self._interrupted: list[str] = []  # the names of the layers of a pass that a stop interrupted

    def check(self, trainer: Trainer) -> None:
        """Choose the unit of the interval, and refuse a train loader that can be run only once.

        Raises:
            TypeError: the train loader is an iterator, or it or its sampler keeps its position, so a pass
                would take batches from the training.
            ValueError: `by_epoch=True` in a run measured in iterations.
        """
        if self._by_epoch is None:
            self._by_epoch = trainer.by_epoch
        if self._by_epoch and not trainer.by_epoch:
            raise ValueError(
                "PreciseBN(by_epoch=True) in a run measured in iterations has no epoch to run after: "
                "leave by_epoch out, or give the Trainer max_epochs"
            )
        if self._data_loader is None and trainer.train_loader is not None:
            _check_train_loader(trainer.train_loader, "train_loader")

    def settings(self) -> dict[str, Any]:
        """Return the interval, the number of batches of a pass, and the estimate of the variance."""
        return {
            "interval": self._interval,
            "by_epoch": self._by_epoch,
            "num_iter": self._num_iter,
            "unbiased": self._unbiased,
        }

    def before_train(self, trainer: Trainer, event: BeforeTrain) -> None:
        """Make a pass that a stop has interrupted, before the evaluation that was to follow it."""
        if not self._interrupted:
            return
        if self._data_loader is None and trainer.loader is None:
            logger.warning(
                "PreciseBN cannot make the pass that a stop cut short: the loader of a hand-written loop is "
                "known when its first epoch begins, and the evaluation that was due comes before; give "
                "PreciseBN a data_loader, or the Trainer a train_loader"
            )
            return
        undo = Undo()
        with undo, undo:  # twice: an interrupt may skip one of the two exits
            save_modes(undo, unwrap(trainer.model))
            _set_training_modes(trainer, self._interrupted)
            self.update_stats(trainer)

    def before_train_epoch(self, trainer: Trainer, event: BeforeTrainEpoch) -> None:
        """Warn at the first epoch if the model has no batch norm layer in training mode.

        Raises:
            TypeError: the loader of a hand-written loop can be run only once.
        """
        if self._data_loader is None and trainer.loader is not None:
            _check_train_loader(trainer.loader, "the train loader")
        if not self._layers_checked and not get_bn_modules(trainer.model):
            logger.warning(
                "PreciseBN does nothing: %s has no batch norm layer that is in training mode and keeps "
                "running statistics",
                type(unwrap(trainer.model)).__name__,
            )
        self._layers_checked = True

    def after_train_iter(self, trainer: Trainer, event: AfterTrainIter) -> None:
        """Make a pass at the interval and in the last iteration, if the interval counts iterations."""
        if self._by_epoch:
            return
        is_due = self.every_n_train_iters(trainer, self._interval) or self.is_last_train_iter(trainer)
        if is_due and trainer.bus.failing is None:
            self._last_pass = trainer.iter + 1
            self.update_stats(trainer)

    def after_train_epoch(self, trainer: Trainer, event: AfterTrainEpoch) -> None:
        """Make a pass at an interval of epochs, and after the last epoch unless its last iteration made one.

        `after_train_iter` does not know the last iteration if the train loader has no length.
        """
        if event.reason != COMPLETED or trainer.bus.failing is not None:
            return
        is_due = self._by_epoch and self.every_n_epochs(trainer, self._interval)
        is_last = self.is_last_train_epoch(trainer) and self._last_pass != trainer.iter
        if is_due or is_last:
            self._last_pass = trainer.iter
            self.update_stats(trainer)

    def update_stats(self, trainer: Trainer) -> None:
        """Make a pass now, and set the statistics; in a process group all ranks must call this method.

        Raises:
            ValueError, RuntimeError: see `update_bn_stats`; or there is no loader to run.
        """
        loader = self._data_loader if self._data_loader is not None else trainer.loader
        if loader is None:
            raise ValueError("PreciseBN has no data: give it a data_loader, or the Trainer a train_loader")
        layers = get_bn_modules(trainer.model)
        if not layers:
            return
        undo = Undo()
        undo.attributes(trainer.clock.waits, "place")
        with undo, undo, trainer.clock.excluding():  # undo twice: an interrupt may skip one of the two exits
            save_fields(undo, trainer)
            # DistributedDataParallel's collectives would hang if one rank has fewer batches than another
            trainer.model = unwrap(trainer.model)
            batches = update_bn_stats(
                trainer.model,
                loader,
                trainer.fast_dev_run or self._num_iter,
                forward=self._forward_of(trainer),
                device=trainer.device,
                unbiased=self._unbiased,
                stop=lambda: trainer.asked_to_stop,
            )
        names = {layer: name for name, layer in unwrap(trainer.model).named_modules()}
        self._interrupted = [] if batches else [names[layer] for layer in layers]
        if batches:
            logger.info("precise statistics of %d batch norm layers from %d batches", len(layers), batches)
        else:
            logger.info(
                "precise statistics were not computed, because the run is stopping: the running averages stay"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the layers of a pass that a stop has interrupted."""
        return {"missed": list(self._interrupted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; `before_train` then makes a pass that a stop had interrupted.

        Raises:
            CheckpointError: `state` does not have the fields of this hook's state.
        """
        self._interrupted = read_as(_State, state, "PreciseBN cannot take its state").missed

    def _forward_of(self, trainer: Trainer) -> Forward | None:
        """Return the function `(model, batch)` of a pass; None if it is the model on the batch's inputs."""
        step = trainer.custom_step
        if self._forward is not None or step is None:
            return self._forward

        def run_step(model: torch.nn.Module, batch: Any) -> Any:
            """Run the training step; its error gets a note, because the step may do too much."""
            try:
                return step(trainer, batch)
            except Exception as error:
                error.add_note(
                    "PreciseBN ran train_step without gradients; give it forward=lambda model, batch: ... "
                    "where the step does more than a forward pass"
                )
                raise

        return run_step


class _State(msgspec.Struct):
    missed: list[str]


def _set_training_modes(trainer: Trainer, names: list[str]) -> None:
    """Set the modes of training, except eval mode for batch norm layers whose names are not in `names`."""
    model = unwrap(trainer.model)
    trainer.modes.set(model)
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and name not in names:
            module.eval()


def _check_loader(loader: object, name: str) -> None:
    """Refuse an object that is no iterable of batches, and an iterator, which can be run only once."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"PreciseBN: {name} must be an iterable of batches, got {loader!r}")
    refuse_samples(f"PreciseBN: {name}", loader)
    if hasattr(loader, "__next__"):
        raise TypeError(
            f"PreciseBN: {name} is an iterator ({type(loader).__name__}), which can be run only once: give "
            "PreciseBN(data_loader=...) a loader that can be started again"
        )


def _check_train_loader(loader: object, name: str) -> None:
    """Refuse a train loader that a second pass would change: an iterator, or a loader with a position."""
    _check_loader(loader, name)
    if (stateful := position_of(loader)) is not None:
        raise TypeError(
            f"PreciseBN: {name} has a {type(stateful).__name__} with a state_dict, whose position a separate "
            "pass would move: give PreciseBN(data_loader=...) another loader"
        )
