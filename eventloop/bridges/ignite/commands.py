"""Apply commands such as `checkpoint` by the handlers and evaluators of an ignite engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ref

from ignite.engine import Engine
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers.param_scheduler import BaseParamScheduler, ParamGroupScheduler

from eventloop.bridges.host_commands import HostSchedules, validate_aside
from eventloop.bridges.hosted import HostedTrainer
from eventloop.steering import builtin
from eventloop.steering.protocols import CommandError, Saving, savers


def checkpoint(trainer: HostedTrainer) -> dict[str, str] | Saving:
    """Save the objects of the engine's Checkpoint handler in the run's directory; answer with the path.

    `Checkpoint.load_objects` loads the file. Without such a handler, a CheckpointHook of the run saves.
    """
    checkpoint_handlers = [fn for fn in _handlers(trainer.native) if isinstance(fn, Checkpoint)]
    if not checkpoint_handlers:
        if savers(trainer.hooks):
            return builtin.checkpoint(trainer)
        raise CommandError("the engine has no Checkpoint handler of ignite, and the run no CheckpointHook")
    handler = max(checkpoint_handlers, key=lambda candidate: len(candidate.to_save))
    folder, name = trainer.work_dir.absolute(), f"iter_{trainer.iter}.pt"
    saver = Checkpoint(  # a separate one: this file does not count in the handler's own `n_saved`
        handler.to_save,
        DiskSaver(str(folder), create_dir=False, require_empty=False),
        filename_pattern=name,
        n_saved=None,
    )
    saver(trainer.native)
    return {"path": str(folder / name)}


def validate_again(trainer: HostedTrainer, evaluators: Iterable[tuple[str, ref[Engine]]]) -> dict[str, float]:
    """Run the evaluator of "val" again over the data of its last run, and answer with the metrics."""
    references = [reference for mode, reference in evaluators if mode == "val"]
    evaluator = next((engine for reference in references if (engine := reference()) is not None), None)
    if evaluator is None:
        raise CommandError('the bridge knows no evaluator: give attach(engine, evaluators={"val": ...}) one')
    loader, length = evaluator.state.dataloader, evaluator.state.epoch_length
    if loader is None:
        raise CommandError("the evaluator of 'val' has not run yet, so its data are not known")
    return validate_aside(trainer, lambda: evaluator.run(loader, epoch_length=length), [loader])


def steer(trainer: HostedTrainer, evaluators: Iterable[tuple[str, ref[Engine]]]) -> None:
    """Make a trainer's commands `checkpoint`, `validate` and `set` use the handlers of its ignite engine."""

    def validate(trainer: HostedTrainer) -> dict[str, float]:
        """Run the evaluator of "val" again over the data of its last run, and answer with the metrics."""
        return validate_again(trainer, evaluators)

    trainer.commands.known.replace(checkpoint)
    trainer.commands.known.replace(validate)
    schedulers = partial(_schedulers, trainer)
    trainer.commands.steppers.append(HostSchedules(trainer, schedulers, partial(_follow, trainer)))


def _schedulers(trainer: HostedTrainer) -> Iterator[BaseParamScheduler]:
    """Yield the schedulers that are attached to the engine, and each of a group."""
    for handler in _handlers(trainer.native):
        if isinstance(handler, ParamGroupScheduler):
            yield from handler.schedulers
        elif isinstance(handler, BaseParamScheduler):
            yield handler


def _follow(trainer: HostedTrainer, schedules: HostSchedules) -> None:
    """Wrap the schedulers among the engine's handlers by `schedules.around` until the run ends."""
    table: dict[Any, list[Any]] = trainer.native._event_handlers
    original_entries: dict[int, Any] = {}
    for entries in table.values():
        for index, entry in enumerate(entries):
            handler = _inner(entry[0])
            if isinstance(handler, BaseParamScheduler | ParamGroupScheduler):
                call = schedules.around(entry[0])
                # `remove_event_handler` of ignite compares `_parent()` with the handler to be removed
                call.__dict__["_parent"] = partial(_itself, handler)
                original_entries[id(call)] = entry
                entries[index] = (call, *entry[1:])
    trainer.during_run.callback(_restore, table, original_entries)


def _restore(table: dict[Any, list[Any]], original_entries: dict[int, Any]) -> None:
    """Put back the entries of an engine's table of handlers that `_follow` has replaced.

    Args:
        original_entries: the former entries, by the id of the function that has replaced the handler.
    """
    for entries in table.values():  # a handler that was removed during the run stays removed
        entries[:] = [original_entries.get(id(entry[0]), entry) for entry in entries]


def _handlers(engine: Engine) -> Iterator[Any]:
    """Yield the handlers of the engine as the program has attached them."""
    for entries in engine._event_handlers.values():
        for entry in entries:
            yield _inner(entry[0])


def _inner(fn: Any) -> Any:
    """Return the handler that a wrapper calls; wrappers are those of event filters and measurements."""
    parent = getattr(fn, "__dict__", {}).get("_parent")
    return parent() if callable(parent) else fn


def _itself(handler: Any) -> Any:
    return handler
