"""Save and restore the position of a trainer in its loader, so that a run can resume within an epoch.

The trainer owns one `LoaderPosition`; the train loop opens passes through it, and checkpoints contain its
state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch.utils.data import DataLoader

from eventloop.data.index_reader import IndexReader
from eventloop.data.limits import Accumulator
from eventloop.data.loader_info import named_loaders, of_loader, to_device
from eventloop.data.loader_state import (
    generator_states,
    generators_of,
    own_random_state,
    random_state,
    reads_by_index,
    reset_iterators,
    set_epoch,
    set_generators,
    set_random_state,
    set_samplers,
)
from eventloop.data.readers import Reader, reader_of
from eventloop.data.resumable_loader import rest_of, samples_of_step
from eventloop.data.rng import put_states, set_rng_state, without_state
from eventloop.data.trainer_parts import TrainerParts, Within

logger = logging.getLogger("eventloop")

_NONE = object()


class LoaderPosition:
    """The position in the train loader: the number of the pass, and the random state at its begin.

    The order of a shuffled pass is decided when it is opened. After a resume the pass is opened again with
    the random state of the first opening, the batches that were already trained on are skipped
    (`eventloop.data.readers`), and then the random state of the checkpoint is restored.
    """

    def __init__(self, trainer: TrainerParts) -> None:
        self._trainer = trainer
        self._passes = 0  # the number of passes that were opened, the interrupted one of a resume included
        self.length: int | None = None
        """The number of batches of the current pass, if it is known."""
        self.batches = 0
        """The number of batches of the current pass before the current iteration, or the next one."""
        self._opened_with: dict[str, Any] = {}  # the random state with which the current pass was opened
        # from a checkpoint, kept until the loader is opened: the states of its generators and samplers, and
        # the state of its reader
        self._own: dict[str, Mapping[str, Any]] = {}
        self._loader_state: Mapping[str, Any] | None = None
        self._resuming = False
        self._opened_at: tuple[int, int] | None = None  # iteration and epoch at the opening of the pass
        self._current: tuple[Any, Reader] | None = None  # the loader of the last pass, and its reader
        self._by_index: WeakKeyDictionary[Any, Reader] = WeakKeyDictionary()  # readers with live workers
        # cleared by a finalizer, because the trainer is part of reference cycles: if a loader and the queues
        # of its workers are collected together, the workers get no signal to end; each costs a wait of 5 s
        finalize(self, self._by_index.clear).atexit = False
        self.skipped = 0
        """The number of batches of the current pass that are left out: an earlier run trained on them, or a
        rollback skips them."""
        self.to_skip = 0
        """How many of the next batches, of this pass and later ones, a rollback skips."""
        self._passed = 0  # the number of batches in the passes before the current one
        # from a checkpoint: how many samples of the pass all ranks together have trained on
        self._samples: int | None = None
        # how many samples fewer they are than the first `self.batches` batches of this loader have: it has
        # batches of another size, and continues within a batch
        self._short = 0
        self.evaluated = 0
        """The number of scheduled evaluations completed since the last training iteration."""

    @property
    def at_end(self) -> bool:
        """Return whether the epoch has no batch left; False if its number of batches is not known.

        A run measured in iterations has one epoch, which ends with its last iteration.
        """
        trainer = self._trainer
        if not trainer.by_epoch:
            return trainer.iter >= (trainer.max_iters or 0)
        return self.length is not None and self.batches >= self.length

    @property
    def left(self) -> int | None:
        """Return the number of batches that the pass has left; None if its length is not known."""
        return None if self.length is None else self.length - self.batches

    @property
    def passed(self) -> int:
        """Return the number of batches that the run has passed since its begin, skipped ones included."""
        return self._passed + self.batches

    def batches_of(self, iterations: int) -> int:
        """Return the number of batches in the last iterations; the last iteration of a pass may have fewer.

        Args:
            iterations: how many iterations before the present position are counted.
        """
        counting, in_pass, length = self._trainer.counting, self.batches, self.length
        whole, iters_a_pass = counting.batches_per_iter, counting.iterations(length)
        if whole == 1 or not length or not iters_a_pass:
            return iterations * whole
        earlier = iterations - -(-in_pass // whole)  # those in passes before the current one
        if earlier <= 0:
            return in_pass + earlier * whole
        passes, rest = divmod(earlier, iters_a_pass)  # the rest is the end of a pass
        return in_pass + passes * length + (length - (iters_a_pass - rest) * whole if rest else 0)

    def end_pass(self) -> None:
        """Set the position to the begin of the next pass."""
        self._passed = self.passed
        self.batches = self.evaluated = 0

    def skip_one(self) -> None:
        """Count a batch that a rollback skips."""
        self.to_skip -= 1
        self.skipped += 1

    @property
    def resuming(self) -> bool:
        """Return whether the next pass continues an interrupted one."""
        return self._resuming

    def go_on(self) -> None:
        """Let the next `open` continue the current pass, if a stop has interrupted it."""
        self._resuming = self.batches > 0

    def open(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Open a pass over the train loader, and return its batches; of a resumed pass only the rest.

        The reader opens it at the end, after everything that a pass reads at its begin was restored.
        """
        self.length = self._trainer.limits.length("train", loader)
        skip = self.skipped = self.batches if self._resuming else 0  # batches of a resumed pass to leave out
        self._resuming = False
        self._restore_own(loader, opening=not skip)
        self._rewind(loader, skip)
        reader = self._reader(loader)
        if self._loader_state is not None:
            # after an earlier pass (a resumed one counts already) a loader of torchdata, new in this process,
            # must not open this pass as its first, for which it draws no seed
            if self._passes > bool(skip):
                reset_iterators(loader)
            reader.load_state_dict(loader, self._loader_state)
            self._loader_state = None
        if not skip:
            self._passed = self.passed
            self.batches = self._short = 0
            self._passes += 1
        self._seed_sampler(loader, self._passes - 1)
        if not skip:
            self._opened_with = random_state(loader)
            self._opened_at = self._trainer.iter, self._trainer.epoch
        limit = self._trainer.limits.cut("train", loader)
        if self._short and isinstance(reader, IndexReader) and isinstance(loader, DataLoader):
            # the pass continues within a batch of this loader, so the rest is divided into other batches
            rest = rest_of(loader, self._trained_on(skip) or 0, self._trainer.data_ranks)
            self.length = skip + len(rest) if limit is None else min(limit, skip + len(rest))
            return reader.open(loader, skip, self._opened_with, limit, rest)
        return reader.open(loader, skip, self._opened_with, limit)

    def _rewind(self, loader: Iterable[Any], skip: int) -> None:
        """Restore the random state of a pass that is opened again because its first iteration failed."""
        here = self._trainer.iter, self._trainer.epoch
        if not skip and here == self._opened_at and self._current is not None and self._current[0] is loader:
            set_random_state(loader, self._opened_with, opening=True)
            self._passes -= 1

    def _restore_own(self, loader: Iterable[Any], *, opening: bool) -> None:
        """Restore the states of the loader's generators and samplers after a resume.

        Args:
            loader: the loader.
            opening: whether a new pass is opened; then the samplers are restored. If a pass is continued, the
                reader restores them, with the state of the pass's begin.
        """
        if "generators" in self._own:
            _restore(generators_of(loader), self._own.pop("generators"))
        samplers = self._own.pop("samplers", {})
        if opening:
            set_samplers(loader, samplers)

    def _reader(self, loader: Iterable[Any]) -> Reader:
        """Return the reader of a loader: the same one as before, if there was one."""
        if self._current is None or self._current[0] is not loader:
            reader = self._by_index.get(loader) if isinstance(loader, DataLoader) else None
            self._current = loader, reader or reader_of(loader)
        reader = self._current[1]
        if isinstance(reader, IndexReader):
            self._by_index[loader] = reader
        return reader

    def _seed_sampler(self, loader: Iterable[Any], number: int) -> None:
        """Call `set_epoch` with the number of the pass, unless `DistSamplerSeedHook` does so."""
        if not self._trainer.by_epoch:
            set_epoch(loader, number)

    def state_dict(self, within: Within = "") -> dict[str, Any]:
        """Return the state from which `open` continues the pass.

        Args:
            within: "iter" or "epoch" if an iteration or epoch has just ended and is not counted yet, else "".

        Raises:
            TypeError: the loader's own state contains values that could not be loaded with
                `weights_only=True`.
        """
        batches = self.batches
        counting = self._trainer.counting
        batch_idx = {"": batches, "iter": batches + counting.batches, "epoch": 0}[within]
        loader = self._loader_state
        if loader is None:
            loader = {} if self._current is None else self._current[1].state_dict(self._current[0], batch_idx)
        return {
            "batch_idx": batch_idx,
            "samples": self._trained_on(batch_idx),
            "passes": self._passes,
            "passed": self._passed + (batches if within == "epoch" else batch_idx),
            **({"to_skip": self.to_skip} if self.to_skip else {}),
            "batches_per_iter": counting.batches_per_iter,
            # the next pass is opened with another state
            "opened_with": {} if within == "epoch" else self._opened_with,
            **own_random_state(self._trainer.loader),
            **self._own,
            "evaluated": 0 if within else self.evaluated,
            "loader": loader,
            "evaluations": {mode: generator_states(each) for mode, each in self._evaluated_on().items()},
        }

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present position, and the generators of the loaders."""
        attributes = dict(vars(self))
        loaders = [self._trainer.loader, *self._evaluated_on().values()]
        generators = [(loader, generator_states(loader)) for loader in loaders]

        def restore() -> None:
            """Restore the position and the generators of the loaders, as they were at the snapshot."""
            vars(self).update(attributes)
            for loader, states in generators:
                set_generators(loader, states)

        return restore

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position, and the generators of the loaders, without calling loaders or samplers.

        Args:
            state: the result of `state_dict`.

        Raises:
            Exception: a generator refuses its state, which is malformed.
        """
        self.batches = int(state["batch_idx"])
        self._samples, self._short = state.get("samples"), 0
        self._passes = int(state["passes"])
        self._passed = int(state.get("passed", 0)) - self.batches
        self.to_skip = int(state.get("to_skip", 0))
        self._opened_with = dict(state["opened_with"])
        self._opened_at = None
        self._own = {"generators": state["generators"], "samplers": state["samplers"]}
        self._loader_state = state.get("loader", {})
        self.evaluated = int(state["evaluated"])
        self._resuming = self.batches > 0
        generators = generators_of(self._trainer.loader)
        if self._opened_with:  # a malformed state is refused now, not when the pass is opened
            set_rng_state(self._opened_with["rng"])
            put_states(generators, self._opened_with["generators"])
        if self._trainer.loader is not None:  # an evaluation before the next pass may draw from them
            _restore(generators, self._own.pop("generators"))
        evaluations = state.get("evaluations", {})
        for mode, loader in self._evaluated_on().items():
            if mode in evaluations:
                _restore(generators_of(loader), evaluations[mode])

    def _evaluated_on(self) -> dict[str, Iterable[Any]]:
        """Return the evaluation loaders by mode, or by "val/name" if a mode has several.

        The train loader is left out if it is used for evaluations, too.
        """
        trainer = self._trainer
        loaders = {"val": trainer.val_loader, "test": trainer.test_loader}
        return {
            of_loader(mode, name) if name else mode: loader
            for mode, given in loaders.items()
            for name, loader in named_loaders(given).items()
            if loader is not trainer.loader
        }

    def _trained_on(self, batch_idx: int) -> int | None:
        """Return the number of samples on which all ranks together have trained; None if it is unknown.

        Args:
            batch_idx: the number of batches of the current pass on which each rank has trained.
        """
        loader = self._trainer.loader if self._current is None else self._current[0]
        step = self._samples_of_step(loader)
        return step and (batch_idx * step - self._short if batch_idx else 0)

    def _samples_of_step(self, loader: Any) -> int | None:
        """Return the number of samples in one batch of every rank together; None if it is unknown."""
        return samples_of_step(loader, self._trainer.data_ranks) if reads_by_index(loader) else None

    def move_to(self, loader: Any, lengths: tuple[int, int] | None, *, same_data: bool) -> str:
        """Convert a saved position to one in this run's loader, whose batches may have another size.

        The pass continues at the next sample. If the number of samples that were trained on is unknown, or
        the data set has another length, it continues at the same fraction of the batches.

        Args:
            loader: the loader of this run.
            lengths: the number of batches in a pass of the checkpoint's run and of this run; None if they are
                equal, or unknown.
            same_data: whether this run's data set is as long as the checkpoint's.

        Returns:
            Where the pass continues, for the log; "" at the beginning of a pass.
        """
        if not self.batches:
            return ""
        step, samples = self._samples_of_step(loader), self._samples
        if same_data and step and samples:
            if samples == self.batches * step:
                return "the steps have the same samples"
            rest = rest_of(loader, samples, self._trainer.data_ranks)
            self.batches = max(1, len(loader) - len(rest))
            self._short = self.batches * step - samples
            return f"the pass continues after {samples} of its samples, with {step} samples in a step"
        if lengths is not None:
            self.batches = self.batches * lengths[1] // max(lengths[0], 1)
            self._resuming = self.batches > 0
        return (
            "the pass continues after the same fraction of its batches: samples may come twice, or not at all"
        )

    def drop_states_of_ranks(self, *, begins_again: bool) -> None:
        """Drop the states of samplers, which are valid only for a run with the same number of ranks.

        Args:
            begins_again: whether to begin the interrupted pass again, because the state of the loader is
                valid only for the same number of ranks, too.
        """
        self._own.pop("samplers", None)
        if self._opened_with:
            self._opened_with["samplers"] = {}
        if begins_again:
            self._passes -= self._resuming
            self.batches, self._resuming = 0, False
            self._loader_state, self._opened_with = None, {}


def batches_of_update(
    trainer: TrainerParts, accumulator: Accumulator, reading: Iterator[Any]
) -> Iterator[Any]:
    """Yield the second and later batches of an iteration that has several, and add the gradients of each.

    The caller has run the forward pass of the first batch, and runs that of a yielded batch before it
    requests the next. A batch is fetched after the backward pass of the batch before, so that only one batch
    is in memory.

    Args:
        trainer: the trainer, with the outputs of the forward pass in `trainer.outputs`.
        accumulator: the hook that runs backward.
        reading: the pass over the loader, which may end before the iteration has all of its batches.
    """
    counting, clock = trainer.counting, trainer.clock
    accumulator.add_batch(trainer)
    for done in range(1, counting.batches):
        start = perf_counter() - clock.excluded
        if (batch := next(reading, _NONE)) is _NONE:
            counting.batches = done
            return
        trainer.batch, trainer.outputs = to_device(batch, trainer.device), None
        counting.before = done
        clock.charge("data", perf_counter() - clock.excluded - start)
        accumulator.begin_batch(trainer)
        yield trainer.batch
        accumulator.add_batch(trainer)


def _restore(generators: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore a loader's own generators, and warn of generators without a state in the checkpoint."""
    if missing := without_state(generators, saved):
        logger.warning(
            "the samples may not be those of the interrupted run, as the checkpoint has no state of %s: "
            "resume with the loader of that run",
            ", ".join(missing),
        )
    put_states(generators, saved)
