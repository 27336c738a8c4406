"""Describe and check the layout of a checkpoint that can be resumed from.

`eventloop.resume` uses it. The error about a value of the wrong type names the key, the expected type and the
value.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import Annotated, Any, TypeVar

import msgspec
from torch import Tensor

from eventloop.commands.messages import Applied
from eventloop.state.keys import NEEDED
from eventloop.util.errors import CheckpointError
from eventloop.util.text import error_text

T = TypeVar("T")

SCHEMA = 2
"""The version of this layout, saved in a checkpoint as `meta.schema`."""

Count = Annotated[int, msgspec.Meta(ge=0)]
GeneratorState = Annotated[list[Any], msgspec.Meta(min_length=1)]
"""The state of one random generator: its kind, such as "torch.cpu", then the parts of its state."""


class RandomState(msgspec.Struct):
    """The states of the global random generators, and of generators that are attributes of modules."""

    python: tuple[int, Tensor, float | None]
    numpy: tuple[str, Tensor, int, int, float]
    torch: Tensor
    cuda: list[Tensor] = []
    modules: dict[str, GeneratorState] = {}


class LoaderState(msgspec.Struct):
    """The states of a loader's own random generators and samplers, by the path of the attribute.

    An example of a path is `loader.generator`.
    """

    generators: dict[str, GeneratorState]
    samplers: dict[str, Any]


class OpenedWith(msgspec.Struct):
    """The random state with which a pass over the train loader was opened; empty before the first pass."""

    rng: RandomState | None = None
    generators: dict[str, GeneratorState] | None = None
    samplers: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if len({self.rng is None, self.generators is None, self.samplers is None}) > 1:
            raise ValueError("Object must have `rng`, `generators` and `samplers`, or none of them")


class ReaderState(msgspec.Struct):
    """The state of the reader that reads a loader's batches, with the keys of `IndexReader`.

    Other readers save other keys, which are not checked here.
    """

    num_workers: Count = 0
    workers: dict[int, list[Tensor]] = {}
    seeded_with: Tensor | None = None
    seeded_here: bool = True


class Position(LoaderState, kw_only=True):
    """The position in the train loader, in the layout of `LoaderPosition.state_dict`."""

    batch_idx: Count
    passes: Count
    samples: Count | None = None
    opened_with: OpenedWith
    evaluated: Count
    loader: ReaderState = msgspec.field(default_factory=ReaderState)
    evaluations: dict[str, dict[str, GeneratorState]] = {}

    def __post_init__(self) -> None:
        if self.batch_idx and self.opened_with.rng is None:
            raise ValueError("Object must have `rng` in `opened_with` if `batch_idx` is more than 0")


class RunSettings(msgspec.Struct):
    """Those settings of the run that a resume needs to convert the position in the loader."""

    loader_length: Count | None = None
    world_size: int | None = None


class SavedSettings(msgspec.Struct):
    """The settings with which the run was built."""

    optimizer: dict[str, list[dict[str, Any]]]
    param_schedulers: list[Any]
    run: RunSettings
    hooks: list[str]
    hook_options: dict[str, dict[str, Any]]
    frozen: list[str] | None = None


class Meta(msgspec.Struct):
    """The counters and settings of the run, and the classes of its optimizers and schedulers."""

    iter: Count
    epoch: Count
    max_iters: Count | None
    max_epochs: Count | None
    optimizer: str | dict[str, str] | None
    param_schedulers: list[str]
    position: Position
    settings: SavedSettings
    parameters: dict[str, list[str]] = {}
    scheduler_optimizers: list[str] = []
    frozen: list[str] | None = None
    needs_hooks: list[str] = []
    arrays: list[list[Any]] = []
    commands: list[Applied] = []


class RankState(msgspec.Struct):
    """The state from which one rank other than rank 0 resumes."""

    rng: RandomState
    position: Position
    buffers: dict[str, Tensor]
    remembered: dict[str, Any] = {}


class Checkpoint(msgspec.Struct):
    """The layout of a checkpoint that can be resumed from, with all of its keys."""

    meta: Meta
    state_dict: dict[str, Any]
    optimizer: Any
    param_schedulers: list[dict[str, Any]]
    hooks: dict[str, Any]
    rng: RandomState
    remembered: dict[str, Any] = {}
    ranks: list[RankState | None] | dict[int, RankState] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ranks, list) and None in self.ranks[1:]:
            raise ValueError("Object must have a state of each rank except the first in `ranks`")


def check_layout(checkpoint: Mapping[str, Any], source: object) -> None:
    """Raise CheckpointError if a trainer of this version of eventloop cannot resume from a checkpoint.

    Args:
        checkpoint: the contents of the checkpoint.
        source: the path of the checkpoint, for the message.
    """
    check_usable(checkpoint, source)
    if _is_of_another_version(checkpoint):
        raise CheckpointError(
            f"{source} has schema {checkpoint['meta'].get('schema')!r}, this version of eventloop reads "
            f"{SCHEMA}: resume it with the version that saved it, or call load_checkpoint(path), which loads "
            "the weights alone"
        )


def check_usable(checkpoint: Mapping[str, Any], source: object) -> None:
    """Raise CheckpointError if no version of eventloop can resume from a checkpoint.

    The search for the newest usable checkpoint then tries an older one. A checkpoint of another version
    passes this check, because a silent fallback to an older checkpoint would train a part of the run again.

    Args:
        checkpoint: the contents of the checkpoint.
        source: the path of the checkpoint, for the message.
    """
    if missing := [key for key in NEEDED if key not in checkpoint]:
        raise CheckpointError(
            f"{source} cannot be resumed from, it has no {', '.join(missing)}: use load_checkpoint to load "
            "its weights"
        )
    if not _is_of_another_version(checkpoint):
        read_as(Checkpoint, checkpoint, f"{source} cannot be resumed from")


def _is_of_another_version(checkpoint: Mapping[str, Any]) -> bool:
    meta = checkpoint["meta"]
    version = meta.get("schema") if isinstance(meta, Mapping) else SCHEMA
    return not isinstance(version, int) or version != SCHEMA


def read_as(kind: type[T], value: object, what: str) -> T:
    """Convert a value to a type of this module; an error names the value at the wrong place.

    Args:
        kind: the type that describes the layout.
        value: the value.
        what: the beginning of the error message, such as "x.pth cannot be resumed from".
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at ")
        place = place.rpartition("`$")[2].strip("`.")  # msgspec ends its message by, say, "`$.meta.iter`"
        wrong_value = reprlib.repr(_at(value, place))
        of = f"of {place} " if place else ""
        raise CheckpointError(f"{what}, the value {of}is wrong: {expected}: {wrong_value}") from error
    except AttributeError as error:  # msgspec treats a tensor as a mapping
        raise CheckpointError(f"{what}, it has a tensor where a mapping is expected") from error


def _at(value: Any, place: str) -> Any:
    """Return the value at a path such as `meta.position`, or the nearest container on that path."""
    for name, number in re.findall(r"(\w+)|\[(\d+)\]", place):
        key = name or int(number)
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break
    return value


def check_alike(saved: Any, own: Any, what: str) -> None:
    """Refuse a saved value if it, or a value in it, is of another kind than the current value.

    A string does not match a number, for example. None matches any value. A key that only one of two mappings
    has is not checked.

    Args:
        saved, own: the saved value and the current one.
        what: the name of the value, which begins the message.
    """
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        for key in own.keys() & saved.keys():
            check_alike(saved[key], own[key], f"{what}[{key!r}]")
    elif isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        for number, (each, other) in enumerate(zip(saved, own, strict=False)):
            check_alike(each, other, f"{what}[{number}]")
    elif own is None or saved is None or (type(own) is type(saved) and not isinstance(own, Tensor)):
        return  # the same type is the same kind, except for tensors, whose kind depends on their size
    elif (kind := _kind(own)) and kind != _kind(saved):
        raise CheckpointError(
            f"{what} is wrong: expected a {kind}, such as {reprlib.repr(own)}, got {reprlib.repr(saved)}"
        )


def _kind(value: Any) -> str | None:
    """Return the kind of a plain value, such as "number"; None for any other value."""
    if isinstance(value, Number) or (isinstance(value, Tensor) and value.numel() == 1):
        return "number"  # a learning rate may be a tensor
    kinds = {Mapping: "mapping", list: "list", tuple: "list", str: "text"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), None)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise any error of the block as a CheckpointError whose message begins with `what`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {error_text(error)}") from error
