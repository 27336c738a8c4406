"""Apply commands in an ignite engine, by the handlers and evaluators that the program has attached."""

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
    """Save what ignite's Checkpoint handler saves, in the run's directory, for Checkpoint.load_objects."""
    attached = [each for each in _handlers(trainer.native) if isinstance(each, Checkpoint)]
    if not attached:
        if savers(trainer.hooks):
            return builtin.checkpoint(trainer)
        raise CommandError("the engine has no Checkpoint handler of ignite, and the run no CheckpointHook")
    handler = max(attached, key=lambda each: len(each.to_save))
    folder, name = trainer.work_dir.absolute(), f"iter_{trainer.iter}.pt"
    saver = Checkpoint(  # another one, so that the handler keeps as many files of its own as before
        handler.to_save,
        DiskSaver(str(folder), create_dir=False, require_empty=False),
        filename_pattern=name,
        n_saved=None,
    )
    saver(trainer.native)
    return {"path": str(folder / name)}


def validate_again(trainer: HostedTrainer, evaluators: Iterable[tuple[str, ref[Engine]]]) -> dict[str, float]:
    """Run the evaluator of "val" again over the data of its last run, and answer with the metrics."""
    known = [each for mode, kept in evaluators if mode == "val" and (each := kept()) is not None]
    if not known:
        raise CommandError('the bridge knows no evaluator: give attach(engine, evaluators={"val": ...}) one')
    evaluator = known[0]
    loader, length = evaluator.state.dataloader, evaluator.state.epoch_length
    if loader is None:
        raise CommandError("the evaluator of 'val' has not run yet, so its data are not known")
    return validate_aside(trainer, lambda: evaluator.run(loader, epoch_length=length), [loader])


def steer(trainer: HostedTrainer, evaluators: Iterable[tuple[str, ref[Engine]]]) -> None:
    """Give a trainer the checkpoints, validations and schedulers that are attached to the engine."""

    def validate(trainer: HostedTrainer) -> dict[str, float]:
        """Run the evaluator of "val" again over the data of its last run, and answer with the metrics."""
        return validate_again(trainer, evaluators)

    trainer.commands.known.replace(checkpoint)
    trainer.commands.known.replace(validate)
    schedulers = partial(_schedulers, trainer)
    trainer.commands.steppers.append(HostSchedules(trainer, schedulers, partial(_follow, trainer)))


def _schedulers(trainer: HostedTrainer) -> Iterator[BaseParamScheduler]:
    for each in _handlers(trainer.native):
        if isinstance(each, ParamGroupScheduler):
            yield from each.schedulers
        elif isinstance(each, BaseParamScheduler):
            yield each


def _follow(trainer: HostedTrainer, schedules: HostSchedules) -> None:
    """Replace the schedulers among the engine's handlers until the run ends."""
    table: dict[Any, list[Any]] = trainer.native._event_handlers
    former: dict[int, Any] = {}
    for entries in table.values():
        for index, entry in enumerate(entries):
            handler = _inner(entry[0])
            if isinstance(handler, BaseParamScheduler | ParamGroupScheduler):
                call = schedules.around(entry[0])
                call.__dict__["_parent"] = partial(_itself, handler)  # ignite finds a handler to remove by it
                former[id(call)] = entry
                entries[index] = (call, *entry[1:])
    trainer.during_run.callback(_restore, table, former)


def _restore(table: dict[Any, list[Any]], former: dict[int, Any]) -> None:
    for entries in table.values():  # handlers that were removed meanwhile stay removed
        entries[:] = [former.get(id(entry[0]), entry) for entry in entries]


def _handlers(engine: Engine) -> Iterator[Any]:
    """Yield the handlers of the engine as the program has attached them."""
    for entries in engine._event_handlers.values():
        for entry in entries:
            yield _inner(entry[0])


def _inner(fn: Any) -> Any:
    """Return a handler without the wrappers of filters and measurements."""
    parent = getattr(fn, "__dict__", {}).get("_parent")
    return parent() if callable(parent) else fn


def _itself(handler: Any) -> Any:
    return handler
