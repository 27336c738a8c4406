"""A decorator for handlers that run on one rank, and must not make the other ranks wait."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from eventloop.assembly.attach import rank_and_world_size
from eventloop.util.checks import at_least
from eventloop.util.functions import handler_name, is_coroutine_function

F = TypeVar("F", bound=Callable[..., Any])
_COLLECTIVES = ("c10d", "_c10d_functional")


def on_rank(rank: int = 0) -> Callable[[F], F]:
    """Run a handler, or a hook's method, on one rank; on the others the call does nothing.

        @bus.on("after_val_epoch")
        @on_rank(0)
        def show(trainer, event): ...

    A collective in such a handler (`all_reduce`, `barrier`, those in a forward or backward pass of
    DistributedDataParallel) would wait forever for the other ranks, so it raises an error. Run the collective
    in a handler of all ranks, and only the rest on one rank; use `model.module` where the model of one rank
    suffices. After a refused backward pass DistributedDataParallel itself cannot go on. Coroutine functions,
    which run in the background, are guarded as well.

    Raises:
        TypeError: `rank` is not an int, or the decorated object is not a function.
        ValueError: `rank` is negative.
        RuntimeError: raised by the handler, when it calls a collective.
    """
    at_least("the rank of @on_rank(rank)", rank, 0)

    def decorate(fn: F) -> F:
        if not callable(fn):
            raise TypeError(f"on_rank decorates a function, got {fn!r}")
        return cast(F, _on_rank(rank, fn))

    return decorate


def _on_rank(rank: int, fn: Any) -> Any:
    if is_coroutine_function(fn):

        @wraps(fn)
        async def run_in_background(*args: Any) -> Any:
            own, world_size = rank_and_world_size()
            if own != rank:
                return None
            if world_size == 1:
                return await fn(*args)
            return await _run_guarded(fn(*args), _NoCollectives(handler_name(fn), rank))

        return run_in_background

    @wraps(fn)
    def run(*args: Any) -> Any:
        own, world_size = rank_and_world_size()
        if own != rank:
            return None
        if world_size == 1:
            return fn(*args)
        with _NoCollectives(handler_name(fn), rank):
            return fn(*args)

    return run


@types.coroutine
def _run_guarded(coroutine: Coroutine[Any, Any, Any], refusing: _NoCollectives) -> Generator[Any, Any, Any]:
    """Run a coroutine step by step, with the guard on only while a step runs.

    The guard belongs to the thread, which runs other tasks while this coroutine waits.
    """
    step = partial(coroutine.send, None)
    while True:
        # not by `with`, which also sets flags of the whole process, used by the training thread
        _push_mode(refusing)
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
        finally:
            _pop_mode()
        try:
            step = partial(coroutine.send, (yield awaited))
        except BaseException as error:  # the coroutine also handles its cancellation
            step = partial(coroutine.throw, error)


class _NoCollectives(TorchDispatchMode):
    """Raise an error for every operator of torch.distributed that reaches PyTorch's dispatcher."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._rank = name, rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _COLLECTIVES:
            raise RuntimeError(
                f"{self._name} runs on rank {self._rank} only, and its {func} would wait forever for the "
                "other ranks: do the collective in a handler that all ranks run"
            )
        return func(*args, **(kwargs or {}))
