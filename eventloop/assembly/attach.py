"""Create a trainer's directory, build its hooks and writers, and attach them to its bus."""

from __future__ import annotations

import errno
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isroutine, signature
from pathlib import Path
from typing import Any

import torch.distributed as dist

from eventloop.assembly.argument_checks import register_bus
from eventloop.assembly.dev_run import is_omitted
from eventloop.assembly.evaluator_run import builds_evaluator, refuse_training
from eventloop.assembly.hook_owner import owning_hooks
from eventloop.bus import Bus
from eventloop.data.limits import Accumulator
from eventloop.data.trainer_parts import TrainerParts
from eventloop.events.run import Run
from eventloop.processes.dry_run import plan_file
from eventloop.registry import HOOKS, WRITERS, build, find_class
from eventloop.state.exchange import decided_by_rank_0, raised_together
from eventloop.temporary.names import temporary_path
from eventloop.util.checks import check_path
from eventloop.util.suggest import suggest
from eventloop.util.terminal import in_notebook, is_terminal

FOREIGN = frozenset({"lightning", "pytorch_lightning", "transformers", "ignite", "mmengine"})
"""The packages of other engines, whose callbacks `Foreign` can run."""
DEFAULT_HOOKS = {
    "runtime_info": "RuntimeInfoHook",
    "optimizer": "OptimizerHook",
    "timer": "IterTimerHook",
    "sampler_seed": "DistSamplerSeedHook",
    "logger": "LoggerHook",
    "param_scheduler": "ParamSchedulerHook",
    "checkpoint": "CheckpointHook",
    "garbage_collection": "GarbageCollectionHook",
    "preemption": "PreemptionHook",
    "costs": "CostsHook",
    "trace": "TraceHook",
}
"""The class of each default hook, by the hook's name, which is also the key of its state in a checkpoint."""


def make_work_dir(work_dir: str | Path | None) -> Path:
    """Create the directory of the run's files; by default a new one under `runs/`, named by the time.

    Rank 0 chooses the new directory for all ranks, and an error of one rank is raised on all: without
    `work_dir` this is a collective. With it, each rank creates the directory on its own. In a dry run, a
    directory that does not exist yet is replaced by a temporary one.

    Raises:
        TypeError: `work_dir` is not a path.
        OSError: the directory cannot be created or written.
    """
    if work_dir is not None:
        check_path("work_dir", work_dir)
    path = Path("runs") if work_dir is None else Path(work_dir)
    if (plan := plan_file()) is not None:
        exists = work_dir is not None and path.exists()
        return path if exists else Path(tempfile.mkdtemp(dir=plan.parent))
    if work_dir is not None:
        _open_directory(path)
        return path
    with raised_together("creating the directory of the run"):  # also on a rank that sees another disk
        named = path / time.strftime("%Y%m%d_%H%M%S")
        with _naming(named):
            path = free_directory(named)
        _open_directory(path)
    return path


def _open_directory(path: Path) -> None:
    """Create a directory if it does not exist, and check that a file can be written to it."""
    with _naming(path):
        if path.is_file():
            raise FileExistsError(errno.EEXIST, "it is a file")
        path.mkdir(parents=True, exist_ok=True)
        probe = temporary_path(path / "probe", "tmp")
        probe.touch()
        probe.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Make a context whose OSErrors name the directory of the run."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            error.errno, f"work_dir {str(path)!r} cannot be written: {error.strerror or error}"
        ) from error


def free_directory(path: Path) -> Path:
    """Create a new directory, and return its path on all ranks; if the name is taken, add a number to it."""
    return decided_by_rank_0(lambda: _make_free(path))


def _make_free(path: Path) -> Path:
    """Create the directory, or one with the next free number if another run has it; return its path."""
    free, number = path, 1
    while True:
        try:
            free.mkdir(parents=True)
            return free
        except FileExistsError:  # another run began in this second
            number += 1
            free = path.with_name(f"{path.name}-{number}")


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank and world size of this process; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def facts_of(trainer: TrainerParts) -> Run:
    """Return the facts about a run that writers receive when it begins."""
    return Run(
        work_dir=str(trainer.work_dir.absolute()),
        start_iter=trainer.iter,
        start_epoch=trainer.epoch,
        max_iters=trainer.max_iters,
        max_epochs=trainer.max_epochs,
        iters_per_epoch=trainer.counting.iterations(trainer.limits.length("train", trainer.train_loader)),
        rank=trainer.rank,
        world_size=trainer.world_size,
    )


def default_writers() -> list[dict[str, Any]]:
    """Return the configs of the default writers: a ConsoleWriter in a terminal or a notebook, else none.

    It writes to standard error, so that standard output has only the program's own output. A notebook shows
    standard error in red, so there it writes to standard output.
    """
    if in_notebook():
        return [{"type": "ConsoleWriter"}]
    return [{"type": "ConsoleWriter", "stream": sys.stderr}] if is_terminal(sys.stderr) else []


def attach_all(
    trainer: TrainerParts,
    hooks: Sequence[Any],
    writers: Sequence[Any] | None,
    default_hooks: Mapping[str, Any],
) -> tuple[list[Any], list[Any]]:
    """Build configs, name the hooks, and subscribe hooks and writers; writers only on rank 0.

    In a dev run the parts for which `is_omitted` is true are built and checked, and not subscribed.

    Args:
        trainer: the trainer.
        hooks, writers: objects or configs; None for the default writers.
        default_hooks: changes of the default hooks; see `_with_defaults`.

    Returns:
        The hooks, and the writers.

    Raises:
        TypeError, ValueError: an object is not a hook or writer, a name is unknown, or two hooks share a
            name.
    """
    own = [build(h, HOOKS) if isinstance(h, Mapping) else h for h in hooks]
    for hook in own:
        check_attachable(hook, "hook")
    named = _with_defaults(
        own, default_hooks, by_epoch=trainer.by_epoch, has_optimizer=trainer.optimizer is not None
    )
    attached = [hook for _, hook in named]
    with owning_hooks(trainer, attached):
        _name_hooks(named)
        trainer.hooks = attached
        _count(trainer)
        for hook in attached:
            check_owner(hook, trainer.host)
            hook.check(trainer)
        register_bus(trainer.bus)
        return attached, _attach(trainer, attached, writers)


def _count(trainer: TrainerParts) -> None:
    """Find the hook that makes the optimizer's steps, which are iterations with `unit="update"`.

    This is done before the hooks are checked, as they read the length of the run then.
    """
    counting = trainer.counting
    steppers = [hook for hook in trainer.hooks if isinstance(hook, Accumulator)]
    counting.batches_per_step = max((hook.cumulative_iters for hook in steppers), default=1)
    if counting.unit == "batch":
        return
    if not steppers:
        raise ValueError(
            'unit="update" makes an iteration one step of the optimizer, got a trainer without a hook that '
            "makes the steps: leave out default_hooks=dict(optimizer=None), and give OptimizerHook("
            "cumulative_iters=...) the batches of a step; or leave unit out"
        )
    if counting.batches_per_step > 1:
        counting.accumulator, counting.batches_per_iter = steppers[0], counting.batches_per_step
    length = counting.iterations(trainer.limits.length("train", trainer.train_loader))
    if trainer.max_epochs is not None and length is not None:
        trainer.max_iters = trainer.max_epochs * length
    trainer.facts.run = facts_of(trainer)


def _attach(trainer: TrainerParts, hooks: list[Any], writers: Sequence[Any] | None) -> list[Any]:
    """Subscribe the hooks and the writers, which are built and checked first; return the writers."""
    dev_run, evaluator = bool(trainer.fast_dev_run), builds_evaluator()
    for hook in hooks:
        if not ((dev_run or evaluator) and is_omitted(hook)):
            hook.attach(trainer.bus)
    if evaluator:
        refuse_training(trainer.bus)
        return []
    if writers is None:
        writers = default_writers() if trainer.rank == 0 else []
    built = [build(w, WRITERS) if isinstance(w, Mapping) else w for w in writers]
    check_writers(built)
    for writer in built:
        if trainer.rank == 0 and not (dev_run and is_omitted(writer)):
            writer.attach(trainer.bus, trainer.facts)
    return built


def check_owner(hook: Any, host: str) -> None:
    """Refuse a hook whose work another engine does, if that engine (the host) drives the trainer."""
    if host and (owns := getattr(hook, "owns", "")):
        raise ValueError(
            f"{type(hook).__name__} does {owns} itself, which {host} does here: leave the hook out, and set "
            f"this up in {host}"
        )


def check_bus_owners(bus: Bus, host: str) -> None:
    """Refuse a bus with handlers of a hook whose work another engine does, as `check_owner` does."""
    for event in {name for row in bus.stats() for name in row.event.split(", ")} - {"*"}:
        for handler in bus.signal(event).handlers:
            check_owner(getattr(handler.fn, "__self__", None), host)


def check_attachable(candidate: Any, what: str) -> None:
    """Check that an object can be attached to a bus.

    Args:
        candidate: the object that was given.
        what: "hook" or "writer", for the error.

    Raises:
        TypeError: `candidate` is a class, or no hook or writer.
    """
    if isinstance(candidate, type):
        raise TypeError(
            f"expected a {what}, got the class {candidate.__name__}: write {candidate.__name__}()"
        )
    for kind, own in (("hook", "stateful"), ("writer", "write")):
        if hasattr(candidate, "attach") and hasattr(candidate, own):
            if kind == what:
                return
            name = type(candidate).__name__
            raise TypeError(f"expected a {what}, got {name}, which is a {kind}: it goes to {kind}s=[...]")
    packages = {base.__module__.partition(".")[0] for base in type(candidate).__mro__}
    if theirs := ", ".join(packages & FOREIGN):
        raise TypeError(
            f"expected a {what}, got {type(candidate).__name__} of {theirs}: wrap it, "
            f"eventloop.bridges.foreign.Foreign({type(candidate).__name__}(...))"
        )
    hint = ""
    if what == "hook" and isroutine(candidate):
        hint = ': give CallbackHook(after_train_iter=...), or subscribe it with @bus.on("after_train_iter")'
    elif type(candidate).__module__ != "builtins":
        hint = f": derive its class from eventloop.{what}s.{what.capitalize()}"
    raise TypeError(f"expected a {what} or a config dict(type=...), got {candidate!r}{hint}")


def check_writers(writers: Sequence[Any]) -> None:
    """Check that each object is a writer, listed once and with a name of its own.

    Raises:
        TypeError, ValueError: an object is no writer, is listed twice, or shares its name.
    """
    named: dict[str, Any] = {}
    for writer in writers:
        check_attachable(writer, "writer")
        kind = type(writer).__name__
        name = getattr(writer, "name", None) or kind
        if writer is named.get(name):
            raise ValueError(f"writers= holds the same {kind} twice: list it once")
        if name in named:
            same = type(named[name]) is type(writer)
            takes_name = "name" in signature(type(writer)).parameters
            raise ValueError(
                f"writers= holds two {kind if same else 'writers'} named {name!r}: give the second a name, "
                f"{f'{kind}(name=...)' if takes_name else 'writer.name = ...'}, and a destination of its own"
            )
        named[name] = writer


def _with_defaults(
    own: list[Any], default_hooks: Mapping[str, Any], *, by_epoch: bool, has_optimizer: bool
) -> list[tuple[str | None, Any]]:
    """Return the hooks to attach, each with its name: the default hooks first, then the user's.

    `default_hooks` adds, replaces or removes default hooks. A user's hook that replaces a default hook gets
    its name; the name of other user's hooks is None.
    """
    names = dict.fromkeys(map(id, own))
    named: list[tuple[str | None, Any]] = []
    for name, class_name in DEFAULT_HOOKS.items():
        replaced = next((hook for hook in own if HOOKS.holds(class_name, hook)), None)
        if replaced is not None:
            if default_hooks.get(name) is not None:
                raise ValueError(
                    f"default_hooks has a {name!r}, and hooks another {class_name}: give one of the two"
                )
            names[id(replaced)] = name
        elif name in default_hooks:
            named += _given(name, default_hooks[name], {"type": class_name})
        elif name == "checkpoint":
            named.append((name, find_class(class_name)(interval=1 if by_epoch else 1000)))
        elif name != "optimizer" or has_optimizer:
            named.append((name, find_class(class_name)()))
    for name, given in default_hooks.items():
        if name not in DEFAULT_HOOKS:
            named += _additional(name, given)
    return named + [(names[id(hook)], hook) for hook in own]


def _given(name: str, given: Any, defaults: Mapping[str, Any]) -> list[tuple[str | None, Any]]:
    """Return the name and hook of an argument of the trainer, built if it is a config; [] for None."""
    if given is None:
        return []
    hook = build({**defaults, **given}, HOOKS) if isinstance(given, Mapping) else given
    check_attachable(hook, "hook")
    return [(name, hook)]


def _additional(name: str, given: Any) -> list[tuple[str | None, Any]]:
    """Build a hook that the argument `default_hooks` adds under a new name.

    For example `default_hooks=dict(visualization=dict(type="VisualizationHook"))`.
    """
    if given is None or (isinstance(given, Mapping) and "type" not in given):
        raise ValueError(
            f"default_hooks has no {name!r}{suggest(name, [*DEFAULT_HOOKS])}; a hook of your own needs a "
            "type, or goes to hooks=[...]"
        )
    return _given(name, given, {})


def _name_hooks(named: list[tuple[str | None, Any]]) -> None:
    """Give each hook a name of its own, by which checkpoints store states; refuse equal state names."""
    taken: set[str] = set()
    for default_name, hook in named:
        name = hook.name or default_name or type(hook).__name__
        if name in taken and (hook.stateful or hook.name):
            raise ValueError(
                f"two hooks have the state name {name!r}, so a checkpoint could hold only one of them: "
                f"give one of the {type(hook).__name__}s another name"
            )
        number = 2
        while name in taken:
            name, number = f"{type(hook).__name__} #{number}", number + 1
        taken.add(name)
        hook.name = name
