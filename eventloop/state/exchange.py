"""Exchange decisions, errors and Python objects between the ranks of a training, in host memory.

With `decided_by_rank_0` rank 0 makes a decision, and sends it to all ranks, so that they do the same. With
`raised_together` each rank does its own work, and all ranks raise an error if one of them fails. All
exchanges are collectives: every rank must make them in the same order, and waits for the others, for the
timeout of the process group at most. They use gloo. With NCCL, PyTorch would put the objects on the current
GPU, which is the first GPU on every rank whose script has not called `torch.cuda.set_device`.
"""

from __future__ import annotations

import builtins
import logging
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from eventloop.costs.waits import waiting
from eventloop.util.errors import CheckpointError
from eventloop.util.text import error_text

EXCHANGE = "an exchange of values"
"""The name of these waits in the costs."""
T = TypeVar("T")

logger = logging.getLogger("eventloop")

_gloo_group: tuple[Any, Any] | None = None  # the default process group, and the gloo group made for it


def has_other_ranks() -> bool:
    """Return whether torch.distributed is initialised with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather(own: T) -> list[T]:
    """Return a list of the objects that all ranks pass, in the order of the ranks; a collective."""
    if not has_other_ranks():
        return [own]
    ranks = [own] * dist.get_world_size()
    with waiting("ranks", EXCHANGE):
        dist.all_gather_object(ranks, own, group=host_group())
    return ranks


def gather_on_rank_0(own: T) -> list[T] | None:
    """Gather a value of every rank on rank 0.

    Returns:
        The values in the order of the ranks, on rank 0. None on the other ranks, and on rank 0 if a rank
        cannot be reached, which is logged.
    """
    own_rank = dist.get_rank()
    values: list[Any] | None = [None] * dist.get_world_size() if own_rank == 0 else None
    try:
        with waiting("ranks", EXCHANGE):
            dist.gather_object(own, values, dst=0, group=host_group())
    except RuntimeError as error:
        logger.warning("the random state of the other ranks cannot be gathered: %s", error)
        return None
    return values


def decided_by_rank_0(decide: Callable[[], T]) -> T:
    """Call a function on rank 0 alone, and return its result on every rank; a collective.

    An error that the function raises is raised on every rank, with a note that it comes from rank 0. If it
    cannot be pickled, the other ranks raise an error of its nearest base class that can be, with its text.
    Without other ranks this only calls the function.

    If other ranks cannot be reached, rank 0 logs that and keeps its decision, so that it can still complete
    work that needs no other rank, such as a last checkpoint.

    Raises:
        RuntimeError: rank 0 cannot be reached; not raised on rank 0.
    """
    if not has_other_ranks():
        return decide()
    if dist.get_rank() == 0:
        return _decide_and_send(decide)
    box: list[Any] = [None]
    try:
        with waiting("ranks", EXCHANGE):
            dist.broadcast_object_list(box, src=0, group=host_group())
    except RuntimeError as error:
        raise RuntimeError(
            f"{this_rank()} expected a decision of rank 0, which cannot be reached: it has ended, or "
            f"does not make this call: {error}"
        ) from error
    sent: bytes | _Failure = box[0]
    if isinstance(sent, _Failure):
        raise sent.original_error()
    decided: T = pickle.loads(sent)
    return decided


def _decide_and_send(decide: Callable[[], T]) -> T:
    """Call a function on rank 0, send its result or its error to the other ranks, and return or raise it."""
    failure: Exception | None = None
    sent: bytes | _Failure
    try:
        decided = decide()
        # before the exchange: an error within it would leave the other ranks waiting
        sent = pickle.dumps(decided)
    except Exception as error:
        failure, sent = error, _Failure.of(error)
    try:
        with waiting("ranks", EXCHANGE):
            dist.broadcast_object_list([sent], src=0, group=host_group())
    except RuntimeError as error:
        logger.warning("rank 0 cannot send its decision to the other ranks: %s", error)
    if failure is not None:
        raise failure
    return decided


@contextmanager
def raised_together(what: str) -> Iterator[None]:
    """Make a context that raises an error on every rank if its block raises one on some rank.

    Its end is a collective. A rank whose own block raised an error raises that error. All others raise an
    error of the same kind, with the rank, its host and its error in the text. Without other ranks the block
    is executed as it is. Ctrl-C is not exchanged.

    Args:
        what: a name for the work of the block, for the text, such as "the resume".

    Raises:
        RuntimeError: another rank cannot be reached.
    """
    if not has_other_ranks():
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        ranks = gather(None if failure is None else _Failure.of(failure))
    except RuntimeError as error:
        if failure is None:
            raise RuntimeError(
                f"{what} needs all ranks, and {this_rank()} cannot reach another one: it has ended, or does "
                f"not make this call: {error}"
            ) from error
        failure.add_note(f"the other ranks could not be told: {error}")
        ranks = []
    if failure is not None:
        raise failure
    failures = [each for each in ranks if each is not None]
    if failures:
        raise failures[0].error_for_others(what, len(failures))


def this_rank() -> str:
    """Return the number and the host of this rank for messages, such as "rank 1 on host n7"."""
    return f"rank {dist.get_rank()} on host {socket.gethostname()}"


class _Failure(NamedTuple):
    """An error of one rank as it is sent to the others.

    Args:
        rank: the rank and its host.
        pickled: the error; empty if it cannot be pickled.
        fallback: the class of the error that other ranks raise if they cannot unpickle this one: the first of
            the error's class and its bases that every rank has, and that takes a text alone.
        text: the text of the error.
        named: the name of the error's class, and the text.
    """

    rank: str
    pickled: bytes
    fallback: type[Exception]
    text: str
    named: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        """Return the failure of an error, with a builtin class in case it cannot be unpickled."""
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        return cls(this_rank(), pickled, _fallback_class(type(error)), str(error), error_text(error))

    def original_error(self) -> Exception:
        """Return the unpickled error for another rank to raise, with a note of the rank that has raised it.

        If it cannot be unpickled, return an error of the class `fallback` with its text.
        """
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # its class is unknown here, or takes other arguments than `args`
            error = self.fallback(self.text)
        if not isinstance(error, Exception):
            error = self.fallback(self.text)
        # only `decided_by_rank_0` calls this, so it is rank 0, whose decision all ranks wait for
        error.add_note(f"raised on {self.rank}, which decides for all ranks")
        return error

    def error_for_others(self, what: str, count: int) -> Exception:
        """Return the error for a rank whose own block succeeded.

        Args:
            what: the name for the work of the block.
            count: the number of ranks that failed.
        """
        more = f" and on {count - 1} more" if count > 1 else ""
        return self.fallback(f"{what} failed on {self.rank}{more}, so on all ranks: {self.named}")


def _fallback_class(kind: type[Exception]) -> type[Exception]:
    """Return the first class of an error's bases that every rank has, and that takes a text alone.

    These are Python's own errors and CheckpointError; RuntimeError if none of them fits.
    """
    for base in kind.__mro__:
        known = base is CheckpointError or getattr(builtins, base.__name__, None) is base
        try:
            if known and str(base("text")) == "text" and issubclass(base, Exception):
                return base
        except TypeError:  # UnicodeDecodeError takes five arguments
            continue
    return RuntimeError


def host_group() -> Any:
    """Return a gloo group, which exchanges values without the GPU, or None to use the default group.

    The first call is a collective, because it makes the group.
    """
    global _gloo_group
    if dist.get_backend() == "gloo" or not dist.is_gloo_available():
        return None
    world = dist.group.WORLD
    if _gloo_group is None or _gloo_group[0] is not world:
        _gloo_group = world, dist.new_group(backend="gloo")
    return _gloo_group[1]
