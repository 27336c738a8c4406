"""The methods of a trainer that load checkpoints; `Trainer` inherits them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eventloop.metrics import EventStorage
from eventloop.migration.names import knowing_calls
from eventloop.resume.setting_changes import Changed
from eventloop.resume.state import TrainerState
from eventloop.state.remembered import Get, Remembered, Set

logger = logging.getLogger("eventloop")


class Resumable:
    """Load a checkpoint into a trainer: all of its state, or the weights alone."""

    state: TrainerState
    remembered: Remembered
    metrics: EventStorage
    fast_dev_run: int

    @knowing_calls
    def resume(self, path: str | Path = "auto", changed: Changed = "refuse") -> Path:
        """Load the whole state of a run from a checkpoint, so that `train` continues the run.

        trainer.resume("auto", changed="apply")  # with a learning rate that was edited meanwhile

        With several ranks this is a collective: call it on every rank. A rank waits for the others, for the
        timeout of the process group at most, whose error it then raises. Rank 0 looks for the checkpoint, by
        its own `path`, and every rank reads that one, compared by the SHA-256 of its manifest. Before the
        weights are loaded, their SHA-256 is compared over the ranks, which takes one hash of them on the CPU.
        An error of one rank is raised on all, with the rank and its host, and leaves all as they were.

        If another run is ending in the run's directories, as after a signal, this waits for its last
        checkpoint, up to two minutes. `train` is refused if another run saves there after this call.

        Args:
            path: "auto" for the newest intact checkpoint of the run (if two have the same iteration, the
                regular one rather than the best one), "best" for its best checkpoint (by the first metric of
                `save_best`), or a path. A name alone, such as "iter_50", is also looked for among the run's
                checkpoints, in the directories of all checkpoint hooks. A training that continues from
                another checkpoint than "auto" durably leaves newer checkpoints behind: later calls of "auto"
                follow the new lineage.
            changed: which settings to use where this trainer's differ from the checkpoint's: hyper-parameters
                of the optimizer, arguments of schedulers, options of hooks (`Hook.settings`), batch size,
                lengths of loader and data set, number of processes, autocast, parameters of the optimizers,
                types of buffers, parameters that the script freezes. A state finds its parameter by
                name; a new one begins without a state.

                - "refuse" raises an error that lists them.
                - "keep" uses the checkpoint's hyper-parameters and scheduler arguments.
                - "apply" uses this trainer's: a schedule continues as if it had had these arguments from the
                  first step, also after a learning rate of 0. If that cannot be computed (for a schedule
                  that follows a metric, or whose class is yours), the current value is scaled, and the
                  schedule continues from it.

                All other settings, such as options of hooks, are this trainer's with "keep" and "apply".

                A mapping answers for the settings that it names, and refuses all others:
                `changed={"world_size": "apply"}` lets a job change its number of processes alone. This
                includes what changes with it: `data_ranks`, `loader_length`, the part of a data set of which
                each process has an equal one, and the position in a loader that is of one process.
                `batch_size` includes `loader_length`. Settings of optimizers and schedulers, and frozen
                parameters, that differ need the same answer.

                Within a pass over a map-style DataLoader the run continues at the next sample, with any
                batch size and number of processes: no sample of the pass is repeated or left out, and with
                as many samples in a step as before each step has the same ones. An IterableDataset, and a
                loader that saves its own state, begin the pass again with another number of processes.
                `max_epochs`, `max_iters`, `val_interval`, `val_begin`, `dynamic_intervals` and the choice of
                hooks may always differ. Differences that are not refused are logged, and so is a learning
                rate that stays 0. Each of several ranks continues with its own random state and loader
                position; with another number of ranks the random numbers differ.

        Returns:
            The path of the checkpoint that was read.

        Raises:
            FileNotFoundError: there is no such checkpoint; with several ranks, none that rank 0 finds.
            CheckpointError: the checkpoint cannot be read, has a value of a wrong type, belongs to another
                model or to a run with other settings, or one of its schedules ends before the run does.
                Nothing of it is loaded. With several ranks also: a rank does not find the checkpoint of
                rank 0, or another one at its path, or would load other weights.
            RuntimeError: another rank cannot be reached.
            Exception: a hook raised an error for its state. Nothing is loaded, as a note at the error says.
            TypeError, ValueError: `path` is not a path, or `changed` is neither one of the three nor a
                mapping of settings to them.
        """
        from eventloop.resume.restoring import resume  # with the store of checkpoints, 30 modules

        found = resume(self.state, path, changed)
        self._reset_losses()
        return found

    @knowing_calls
    def load_checkpoint(self, path: str | Path, *, strict: bool = True) -> None:
        """Load only the weights of a checkpoint.

        With several ranks, "auto" and "best" are collectives: rank 0 chooses, and every rank must make the
        call, as in `resume`. A path or a name is loaded by each rank that makes the call, and by no other.

        Args:
            path: as in `resume`, or a file of another program: a `.safetensors` file, or a file that
                `torch.load` reads with `weights_only=True`, with the tensors of a model by name at the top
                level, or at `state_dict`, `model_state_dict` or `model`. A prefix `module.` or `_orig_mod.`
                of all names is removed.
            strict: raise an error for names that only one side has. Without it they are logged, and only
                shapes must agree.

        Raises:
            FileNotFoundError, CheckpointError: as `resume`; with `strict` also for missing or unexpected
                names.
            ImportError: the file is a `.safetensors` file, and safetensors is not installed.
        """
        if self.fast_dev_run and str(path) in ("auto", "best"):  # as at the end of a script
            logger.warning("fast_dev_run saves no checkpoint: load_checkpoint(%r) loads nothing", str(path))
            return
        from eventloop.resume.restoring import load_weights

        load_weights(self.state, path, strict=strict)
        self._reset_losses()

    def remember(self, name: str, get: Get, set: Set) -> None:
        """Save a state that your program keeps in its own variables, and restore it when a run resumes.

            hidden = torch.zeros(1, 32, 128)            # of an RNN, from batch to batch

            def set_hidden(state):
                global hidden                           # nonlocal within a function
                hidden = state

            trainer.remember("hidden", lambda: hidden, set_hidden)

        Every checkpoint has the state that `get` returns then, and `resume` and a rollback give it to `set`;
        call this before `resume`. Each rank has its own state. Names that only the checkpoint or only the
        program has are logged. For the weights alone, `load_checkpoint` sets nothing.

        Args:
            name: the name in the checkpoint, at `remembered`.
            get: a function without arguments that returns tensors, numbers, strings, None, or lists, tuples
                and dicts of these. It is called at once, so that a state that cannot be saved is known now.
            set: a function `(state)` that takes what `get` returned, with tensors of its own on the CPU. If
                the resume fails afterwards, it is called again with the former state.

        Raises:
            TypeError, ValueError: the name is no text, empty or taken, a function takes other arguments, or
                the state cannot be saved.
            Exception: `get` has raised it.
        """
        self.remembered.add(name, get, set)

    def _compare_loader(self, loader: Iterable[Any]) -> None:
        """Compare the loader of a pass that begins with the loader of the run that was resumed.

        A trainer without a `train_loader` knows the loader of a hand-written loop only when the pass begins.
        If the checkpoint was saved between two passes, any loader is accepted. If it was saved within a pass,
        the loader must be the same, unless the argument `changed` of `resume` permits another one.

        Raises:
            CheckpointError: the checkpoint was saved within a pass over another loader.
        """
        resumed = self.state.resumed_with_another(loader)
        if resumed is not None:
            from eventloop.resume.restoring import follow_loader

            follow_loader(self.state, resumed, loader)

    def _reset_losses(self) -> None:
        """Reset the record of losses that are not finite, because the loaded weights have other losses."""
        self.metrics.read_pending()  # pending values belong to the former weights
        self.metrics.losses.reset()
