"""Patch other engines so that each trainer that a program creates with them gets a bridge."""

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
"""The supported engines, each with the packages that contain it."""

NO_ENTRY_POINT = (
    "Lightning starts the script again for each rank, and finds no entry point of eventloop there: install "
    "eventloop again (pip install -e . in a checkout), or start the ranks by torchrun -m eventloop run"
)
LIGHTNING_ATTRIBUTE = "_eventloop_callback"
"""The attribute in which a Lightning trainer has our callback between its runs."""
MMENGINE_ATTRIBUTE = "_eventloop_hook"
"""The attribute in which a runner of MMEngine has our hook between its runs."""
TRANSFORMERS_ATTRIBUTE = "_eventloop_callback"
"""The attribute in which a Transformers trainer has our callback, with its index in the list of callbacks."""


def any_installed() -> bool:
    """Return whether a package of one of the engines can be imported."""
    return any(find_spec(name) is not None for names in PACKAGES.values() for name in names)


@contextmanager
def attached(attacher: Attacher) -> Iterator[None]:
    """Attach a bridge to each trainer that is created within the block, once its engine is imported."""
    with ExitStack() as changes:
        patches: dict[str, Callable[[Attacher, ExitStack, ModuleType], None]] = {
            "lightning.pytorch.trainer.connectors.callback_connector": _lightning_trainers,
            "pytorch_lightning.trainer.connectors.callback_connector": _lightning_trainers,
            "lightning.pytorch.trainer.call": _lightning_runs,
            "pytorch_lightning.trainer.call": _lightning_runs,
            "transformers.trainer": _transformers,
            "ignite.engine": _ignite,
            "mmengine.runner": _mmengine,
        }
        actions = {name: partial(patch, attacher, changes) for name, patch in patches.items()}
        changes.enter_context(after_import(actions))
        yield


def lightning_callback(attacher: Attacher) -> Any:
    """Return a new bridge to Lightning.

    Return None if Lightning is too old, with the reason in `attacher.problems`.
    """
    bridge = attacher.bridge("Lightning", "lightning")
    try:
        callback = bridge and bridge.EventLoopCallback(**attacher.arguments())
    except ImportError as error:  # the constructor of the callback checks Lightning's version
        attacher.problems["Lightning"] = str(error)
        return None
    if callback is not None:
        attacher.follow(callback._attachment)
        callback._options["followed"] = attacher.follow  # also for the copies in ranks started by `spawn`
    return callback


def _lightning_trainers(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Patch Lightning so that each trainer gets our callback, unless the script has given it one."""
    connector_class = module._CallbackConnector
    configure = connector_class.on_trainer_init

    @wraps(configure)
    def configure_and_create(connector: Any, *args: Any, **kwargs: Any) -> None:
        """Configure the trainer's callbacks, and create ours unless the script has given one."""
        configure(connector, *args, **kwargs)
        trainer = connector.trainer
        bridge = sys.modules.get("eventloop.bridges.lightning")  # imported if the script uses it
        if bridge is not None and _has(trainer.callbacks, bridge.EventLoopCallback):
            attacher.bridged.add("Lightning")
        elif _starts_ranks(trainer) and not _has_entry_point():
            attacher.problems["Lightning"] = NO_ENTRY_POINT
        else:
            setattr(trainer, LIGHTNING_ATTRIBUTE, lightning_callback(attacher))

    _replace(changes, connector_class, "on_trainer_init", configure_and_create)


def _lightning_runs(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Patch Lightning so that our callback is in the list of a trainer while that runs, and only then."""
    handle = module._call_and_handle_interrupt

    @wraps(handle)
    def handle_with_callback(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with _with_our_callback(trainer):
            return handle(trainer, *args, **kwargs)

    _replace(changes, module, "_call_and_handle_interrupt", handle_with_callback)


@contextmanager
def _with_our_callback(trainer: Any) -> Iterator[None]:
    """Have our callback in a Lightning trainer's list, before its checkpoint callbacks, within the block.

    Between runs the list has only the script's callbacks: the script may compare it, or pass it to another
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
        _remove(callback, trainer.callbacks)


def _starts_ranks(trainer: Any) -> bool:
    """Return whether Lightning will start the script again for each further rank."""
    return type(trainer.strategy.launcher).__name__ == "_SubprocessScriptLauncher"


def _has_entry_point() -> bool:
    """Return whether `lightning_ranks.callbacks` is installed as an entry point that Lightning looks for."""
    points = entry_points(group="lightning.pytorch.callbacks_factory")
    return any(point.module == "eventloop.autoattach.lightning_ranks" for point in points)


def _transformers(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Patch Transformers so that each trainer gets our callback, and has it in its list while it runs."""

    class Callback:
        """Create our callback when Transformers calls this class; without a bridge, one without effect."""

        def __new__(cls) -> Any:
            """Return our callback, which then joins the trainer that is being created."""
            bridge = attacher.bridge("Transformers", "transformers")
            if bridge is None:
                return module.TrainerCallback()
            callback = bridge.EventLoopCallback(**attacher.arguments())
            callback.on_init_end = partial(_join_transformers, attacher, bridge.EventLoopCallback, callback)
            return callback

    reporting_callbacks = module.get_reporting_integration_callbacks

    @wraps(reporting_callbacks)
    def with_our_callback(*args: Any, **kwargs: Any) -> list[Any]:
        return [Callback, *reporting_callbacks(*args, **kwargs)]

    _replace(changes, module, "get_reporting_integration_callbacks", with_our_callback)
    for name in ("train", "evaluate", "predict"):
        _replace(changes, module.Trainer, name, _with_transformers_callback(getattr(module.Trainer, name)))


def _join_transformers(
    attacher: Attacher, cls: Any, callback: Any, args: Any, state: Any, control: Any, **kwargs: Any
) -> None:
    """Attach our callback to a new Transformers trainer, unless the script has given the trainer a bridge.

    The trainer's constructor calls this as `on_init_end` of our callback.
    """
    from eventloop.bridges.transformers.host import find_host

    del callback.on_init_end
    if (calling := find_host(callback)) is None:
        return
    trainer, callbacks = calling.trainer, calling.trainer.callback_handler.callbacks
    others = [other for other in callbacks if other is not callback]
    if _has(others, cls):
        attacher.bridged.add("Transformers")
    else:
        attacher.follow(callback._attachment)
        callback.on_init_end(args, state, control, **kwargs)
        setattr(trainer, TRANSFORMERS_ATTRIBUTE, (callback, callbacks.index(callback)))
        # our `add_callback` refuses a second bridge, so our callback must be in the list while it is called
        add_callback = trainer.add_callback
        with_ours = _with_transformers_callback(lambda _, added: add_callback(added))
        trainer.add_callback = MethodType(with_ours, trainer)
    trainer.callback_handler.callbacks = others


def _with_transformers_callback(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Transformers trainers so that our callback is in the trainer's list during the call.

    Between calls the list has only the script's callbacks.
    """

    @wraps(call)
    def call_with_callback(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method with our callback in the list, at its place; leave it out afterwards."""
        callback, index = vars(trainer).get(TRANSFORMERS_ATTRIBUTE, (None, 0))
        handler = trainer.callback_handler
        if callback is None or any(present is callback for present in handler.callbacks):
            return call(trainer, *args, **kwargs)
        handler.callbacks.insert(index, callback)
        try:
            return call(trainer, *args, **kwargs)
        finally:
            _remove(callback, handler.callbacks)

    return call_with_callback


def _ignite(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Patch ignite so that each engine gets a bridge when it first runs, once all its handlers were added."""
    engine_class = module.Engine
    _replace(changes, engine_class, "run", IgniteRuns(attacher).wrap_run(engine_class.run))


def _mmengine(attacher: Attacher, changes: ExitStack, module: ModuleType) -> None:
    """Patch MMEngine so that our hook is in the list of each runner while that runs, and only then."""
    runner_class = module.Runner

    def wrap_run(run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Runner.run` so that it runs with our hook."""

        @wraps(run)
        def run_with_hook(runner: Any, *args: Any, **kwargs: Any) -> Any:
            """Run with our hook in the runner's list, and remove it afterwards."""
            hook = _mmengine_hook(attacher, runner)
            if hook is None or any(present is hook for present in runner.hooks):
                return run(runner, *args, **kwargs)
            runner.register_hook(hook)
            try:
                return run(runner, *args, **kwargs)
            finally:
                _remove(hook, runner._hooks)

        return run_with_hook

    for name in ("train", "val", "test"):
        _replace(changes, runner_class, name, wrap_run(getattr(runner_class, name)))


def _mmengine_hook(attacher: Attacher, runner: Any) -> Any:
    """Return our hook for a runner; None if the script has given the runner one, or MMEngine is too old."""
    bridge = attacher.bridge("MMEngine", "mmengine")
    if bridge is None:
        return None
    hook = vars(runner).get(MMENGINE_ATTRIBUTE)
    if _has([other for other in runner.hooks if other is not hook], bridge.EventLoopHook):
        attacher.bridged.add("MMEngine")
        return None
    if hook is None:
        hook = bridge.EventLoopHook(**attacher.arguments())
        attacher.follow(hook._attachment)
        setattr(runner, MMENGINE_ATTRIBUTE, hook)
    return hook


def _has(hooks: Sequence[Any], cls: type) -> bool:
    return any(isinstance(hook, cls) for hook in hooks)


def _remove(member: Any, members: list[Any]) -> None:
    """Remove an object from a list in place, comparing by identity."""
    members[:] = [other for other in members if other is not member]


def _replace(changes: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `changes` is closed."""
    changes.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
