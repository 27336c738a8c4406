"""A decorator for handlers that run on one rank only, and so must not call collectives."""

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
"""The namespaces of PyTorch's operators for collectives."""


def on_rank(rank: int = 0) -> Callable[[F], F]:
    """Run a handler, or a hook's method, on one rank; on other ranks the call does nothing.

        @bus.on("after_val_epoch")
        @on_rank(0)
        def show(trainer, event): ...

    A collective in the handler, such as `all_reduce`, `barrier` or those of DistributedDataParallel's forward
    and backward pass, raises an error, because it would wait forever for the other ranks. Run the collective
    in a handler of all ranks, and only the rest on one rank. To run the model on one rank, call
    `model.module`. After a backward pass that raised this error, DistributedDataParallel cannot be used any
    more. The decorated function may be a coroutine function, which runs in the background.

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
    """Wrap a function so that it runs only on one rank, and calls no collectives if there are others."""
    if is_coroutine_function(fn):

        @wraps(fn)
        async def run_in_background(*args: Any) -> Any:
            """Await the function on its rank only, and refuse its collectives if there are other ranks."""
            own_rank, world_size = rank_and_world_size()
            if own_rank != rank:
                return None
            if world_size == 1:
                return await fn(*args)
            return await _run_without_collectives(fn(*args), _NoCollectives(handler_name(fn), rank))

        return run_in_background

    @wraps(fn)
    def run(*args: Any) -> Any:
        """Call the function on its rank only, and refuse its collectives if there are other ranks."""
        own_rank, world_size = rank_and_world_size()
        if own_rank != rank:
            return None
        if world_size == 1:
            return fn(*args)
        with _NoCollectives(handler_name(fn), rank):
            return fn(*args)

    return run


@types.coroutine
def _run_without_collectives(
    coroutine: Coroutine[Any, Any, Any], mode: _NoCollectives
) -> Generator[Any, Any, Any]:
    """Run a coroutine step by step, up to its next `await` each, with `mode` active only within a step.

    The mode acts on the whole thread, on which other tasks run while this coroutine waits.
    """
    run_step = partial(coroutine.send, None)
    while True:
        # `with mode` would also change flags of the whole process, which the training thread uses
        _push_mode(mode)
        try:
            awaited = run_step()
        except StopIteration as end:
            return end.value
        finally:
            _pop_mode()
        try:
            run_step = partial(coroutine.send, (yield awaited))
        except BaseException as error:  # a cancellation too: the coroutine may handle it
            run_step = partial(coroutine.throw, error)


class _NoCollectives(TorchDispatchMode):
    """Raise an error for every operator of torch.distributed that reaches PyTorch's dispatcher."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._rank = name, rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise RuntimeError for a collective, and run any other operator."""
        if func.namespace in _COLLECTIVES:
            raise RuntimeError(
                f"{self._name} runs on rank {self._rank} only, and its {func} would wait forever for the "
                "other ranks: do the collective in a handler that all ranks run"
            )
        return func(*args, **(kwargs or {}))
