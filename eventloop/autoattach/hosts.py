"""Attach a bridge to every trainer that a program creates with another engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import Any

from eventloop.autoattach.after_import import after_import
from eventloop.autoattach.attacher import Attacher
from eventloop.autoattach.ignite_runs import IgniteRuns

PACKAGES = {
    "Lightning": ("lightning", "pytorch_lightning"),
    "Transformers": ("transformers",),
    "ignite": ("ignite",),
    "MMEngine": ("mmengine",),
}
"""The supported engines, and their packages."""


NO_ENTRY_POINT = (
    "Lightning starts the script again for each rank, and finds no entry point of eventloop there: install "
    "eventloop again (pip install -e . in a checkout), or start the ranks by torchrun -m eventloop run"
)
LIGHTNING_ATTRIBUTE = "_eventloop_callback"
"""The attribute of a Lightning trainer with our callback, which refers to the trainer itself."""
MMENGINE_ATTRIBUTE = "_eventloop_hook"
"""The attribute of a runner of MMEngine with our hook."""
TRANSFORMERS_ATTRIBUTE = "_eventloop_callback"
"""The attribute of a Transformers trainer with our callback, and with its place in the list of callbacks."""


def any_installed() -> bool:
    """Return whether a package of one of the engines can be imported."""
    return any(find_spec(name) is not None for names in PACKAGES.values() for name in names)


@contextmanager
def attached(attacher: Attacher) -> Iterator[None]:
    """Attach a bridge to each trainer that is created within the block, once its engine is imported."""
    with ExitStack() as changes:
        where: dict[str, Callable[[Attacher, ExitStack, ModuleType], None]] = {
            "lightning.pytorch.trainer.connectors.callback_connector": _lightning_trainers,
            "pytorch_lightning.trainer.connectors.callback_connector": _lightning_trainers,
            "lightning.pytorch.trainer.call": _lightning_runs,
            "pytorch_lightning.trainer.call": _lightning_runs,
            "transformers.trainer": _transformers,
            "ignite.engine": _ignite,
            "mmengine.runner": _mmengine,
        }
        actions = {name: partial(attach, attacher, changes) for name, attach in where.items()}
        changes.enter_context(after_import(actions))
        yield


def lightning_callback(attacher: Attacher) -> Any:
    """Return Lightning's callback for another trainer.

    None if Lightning is too old; `attacher.problems` then has the reason.
    """
    bridge = attacher.bridge("Lightning", "lightning")
    try:
        callback = bridge and bridge.EventLoopCallback(**attacher.arguments())
    except ImportError as error:  # the bridge looks at the version when a callback is made
        attacher.problems["Lightning"] = str(error)
        return None
    if callback is not None:
        attacher.follow(callback._attachment)
        callback._options["followed"] = attacher.follow  # in the copies that ranks get by `spawn`, too
    return callback


def _lightning_trainers(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Create our callback with each Lightning trainer, unless the script has given the trainer one."""
    connector_class = module._CallbackConnector
    configure = connector_class.on_trainer_init

    @wraps(configure)
    def configuring(connector: Any, *args: Any, **kwargs: Any) -> None:
        configure(connector, *args, **kwargs)
        trainer = connector.trainer
        bridge = sys.modules.get("eventloop.bridges.lightning")  # the script may have one
        if bridge is not None and _has(trainer.callbacks, bridge.EventLoopCallback):
            attacher.bridged.add("Lightning")
        elif _starts_ranks(trainer) and not _has_entry_point():
            attacher.problems["Lightning"] = NO_ENTRY_POINT
        else:
            setattr(trainer, LIGHTNING_ATTRIBUTE, lightning_callback(attacher))

    _replace(changes, connector_class, "on_trainer_init", configuring)


def _lightning_runs(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Wrap the function that makes each run of Lightning trainers, to have our callback among theirs."""
    handle = module._call_and_handle_interrupt

    @wraps(handle)
    def handling(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with _with_our_callback(trainer):
            return handle(trainer, *args, **kwargs)

    _replace(changes, module, "_call_and_handle_interrupt", handling)


@contextmanager
def _with_our_callback(trainer: Any) -> Iterator[None]:
    """Place our callback among a Lightning trainer's, before its checkpoint callbacks, within the block.

    Between runs the list is as the script has made it: the script may compare it, or pass it to another
    trainer.
    """
    callback = vars(trainer).get(LIGHTNING_ATTRIBUTE)
    if callback is None:
        yield
        return
    trainer.callbacks[:] = trainer._callback_connector._reorder_callbacks([*trainer.callbacks, callback])
    try:
        yield
    finally:
        trainer.callbacks[:] = [each for each in trainer.callbacks if each is not callback]


def _starts_ranks(trainer: Any) -> bool:
    """Return whether Lightning will start the script again for each further rank."""
    return type(trainer.strategy.launcher).__name__ == "_SubprocessScriptLauncher"


def _has_entry_point() -> bool:
    """Return whether processes that Lightning starts will find `lightning_ranks.callbacks`."""
    points = entry_points(group="lightning.pytorch.callbacks_factory")
    return any(point.module == "eventloop.autoattach.lightning_ranks" for point in points)


def _transformers(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Create our callback with each Transformers trainer, and have it among its callbacks during calls."""

    class Callback:
        def __new__(cls) -> Any:
            bridge = attacher.bridge("Transformers", "transformers")
            if bridge is None:
                return module.TrainerCallback()
            callback = bridge.EventLoopCallback(**attacher.arguments())
            callback.on_init_end = partial(_join_transformers, attacher, bridge.EventLoopCallback, callback)
            return callback

    reporting = module.get_reporting_integration_callbacks

    @wraps(reporting)
    def with_ours(*args: Any, **kwargs: Any) -> list[Any]:
        return [Callback, *reporting(*args, **kwargs)]

    _replace(changes, module, "get_reporting_integration_callbacks", with_ours)
    for name in ("train", "evaluate", "predict"):
        _replace(changes, module.Trainer, name, _with_transformers_callback(getattr(module.Trainer, name)))


def _join_transformers(
    attacher: Attacher, cls: Any, callback: Any, args: Any, state: Any, control: Any, **kwargs: Any
) -> None:
    """Add our callback to a new Transformers trainer, unless the script has given it one."""
    from eventloop.bridges.transformers.host import find_host

    del callback.on_init_end
    if (found := find_host(callback)) is None:
        return
    trainer, callbacks = found.trainer, found.trainer.callback_handler.callbacks
    others = [each for each in callbacks if each is not callback]
    if _has(others, cls):
        attacher.bridged.add("Transformers")
    else:
        attacher.follow(callback._attachment)
        callback.on_init_end(args, state, control, **kwargs)
        setattr(trainer, TRANSFORMERS_ATTRIBUTE, (callback, callbacks.index(callback)))
        adding = trainer.add_callback  # refuses a second bridge, if it sees the first
        trainer.add_callback = MethodType(_with_transformers_callback(lambda _, each: adding(each)), trainer)
    trainer.callback_handler.callbacks = others


def _with_transformers_callback(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Transformers trainers to have our callback in its old place among theirs.

    Between calls the list is as the script has made it.
    """

    @wraps(call)
    def calling(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        callback, place = vars(trainer).get(TRANSFORMERS_ATTRIBUTE, (None, 0))
        handler = trainer.callback_handler
        if callback is None or any(each is callback for each in handler.callbacks):
            return call(trainer, *args, **kwargs)
        handler.callbacks.insert(place, callback)
        try:
            return call(trainer, *args, **kwargs)
        finally:
            handler.callbacks[:] = [each for each in handler.callbacks if each is not callback]

    return calling


def _ignite(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Attach to each ignite engine at its first run, because ignite does not signal a complete engine."""
    engine = module.Engine
    _replace(changes, engine, "run", IgniteRuns(attacher).attaching(engine.run))


def _mmengine(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Have our hook among those of each runner while it runs; between runs the list is the script's."""
    runner_class = module.Runner

    def running(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def running(runner: Any, *args: Any, **kwargs: Any) -> Any:
            hook = _mmengine_hook(attacher, runner)
            if hook is None or any(each is hook for each in runner.hooks):
                return run(runner, *args, **kwargs)
            runner.register_hook(hook)
            try:
                return run(runner, *args, **kwargs)
            finally:
                runner._hooks[:] = [each for each in runner._hooks if each is not hook]

        return running

    for name in ("train", "val", "test"):
        _replace(changes, runner_class, name, running(getattr(runner_class, name)))


def _mmengine_hook(attacher: Attacher, runner: Any) -> Any:
    """Return our hook for a runner; None if the script has given it one, or MMEngine is too old."""
    bridge = attacher.bridge("MMEngine", "mmengine")
    if bridge is None:
        return None
    hook = vars(runner).get(MMENGINE_ATTRIBUTE)
    if _has([each for each in runner.hooks if each is not hook], bridge.EventLoopHook):
        attacher.bridged.add("MMEngine")
        return None
    if hook is None:
        hook = bridge.EventLoopHook(**attacher.arguments())
        attacher.follow(hook._attachment)
        setattr(runner, MMENGINE_ATTRIBUTE, hook)
    return hook


def _has(hooks: Sequence[Any], cls: type) -> bool:
    return any(isinstance(hook, cls) for hook in hooks)


def _replace(changes: ExitStack, owner: Any, name: str, value: Any) -> None:
    changes.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
