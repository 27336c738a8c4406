"""The layout of a checkpoint that can be resumed from, which is compared with what was read before anything is loaded."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import Annotated, Any, TypeVar

import msgspec
from torch import Tensor

from eventloop.state.keys import NEEDED
from eventloop.util.errors import CheckpointError
from eventloop.util.text import error_text

T = TypeVar("T")

SCHEMA = 1
"""The version of the layout, in `meta`."""

Count = Annotated[int, msgspec.Meta(ge=0)]
LastStep = Annotated[int, msgspec.Meta(ge=-1)]
"""The last step of a scheduler; PyTorch has -1 in a part of a SequentialLR that has not begun."""
GeneratorState = Annotated[list[Any], msgspec.Meta(min_length=1)]
"""The kind of a generator, then the parts of its state."""


class RandomState(msgspec.Struct):
    """Hold the states of the global generators, and of generators that are attributes of modules."""

    python: tuple[int, Tensor, float | None]
    numpy: tuple[str, Tensor, int, int, float]
    torch: Tensor
    cuda: list[Tensor] = []
    modules: dict[str, GeneratorState] = {}


class Samplers(msgspec.Struct):
    """Hold the states of a loader's samplers, by their places in it."""

    generators: dict[str, GeneratorState] = {}
    states: dict[str, Any] = {}
    numbers: dict[str, int | float] = {}


class OfLoader(msgspec.Struct):
    """Hold the generators and samplers that decide a loader's order, besides the global generators."""

    generators: list[Tensor]
    samplers: Samplers = msgspec.field(default_factory=Samplers)


class Opened(msgspec.Struct):
    """Hold the random state that a pass was opened with; empty before the first pass."""

    rng: RandomState | None = None
    generators: list[Tensor] | None = None
    samplers: Samplers = msgspec.field(default_factory=Samplers)

    def __post_init__(self) -> None:
        if (self.rng is None) is not (self.generators is None):
            raise ValueError("Object must have both `rng` and `generators`, or neither")


class Reading(msgspec.Struct):
    """Hold the state of the reader of a loader."""

    num_workers: Count = 0
    workers: dict[int, list[Tensor]] = {}
    seeded_with: Tensor | None = None
    seeded_here: bool = True
    seeded_earlier: bool = False


class Position(OfLoader, kw_only=True):
    """Hold the position in the train loader."""

    batch_idx: Count
    passes: Count
    opened_with: Opened
    evaluated: Count
    loader: Reading = msgspec.field(default_factory=Reading)
    evaluations: dict[str, OfLoader] = {}

    def __post_init__(self) -> None:
        if self.batch_idx and self.opened_with.rng is None:
            raise ValueError("Object must say in `opened_with` how a pass of more than 0 batches began")


class OfRun(msgspec.Struct):
    """Hold the settings of the run that the resume also calculates with."""

    loader_length: Count | None = None
    world_size: int | None = None


class SavedSettings(msgspec.Struct):
    """Hold the settings that the run was built with."""

    optimizer: dict[str, list[dict[str, Any]]]
    param_schedulers: list[Any]
    run: OfRun = msgspec.field(default_factory=OfRun)
    hooks: list[str] = []
    hook_options: dict[str, dict[str, Any]] = {}


class Meta(msgspec.Struct):
    """Counters, and what the rest is of."""

    iter: Count
    epoch: Count
    max_iters: Count | None
    max_epochs: Count | None
    optimizer: str | dict[str, str] | None
    param_schedulers: list[str]
    position: Position
    parameters: dict[str, list[str]] = {}
    settings: SavedSettings | msgspec.UnsetType = msgspec.UNSET
    needs_hooks: list[str] = []


class OfRank(msgspec.Struct):
    """Hold the state that one rank other than 0 resumes with."""

    rng: RandomState
    position: Position
    buffers: dict[str, Tensor]


class Checkpoint(msgspec.Struct):
    """Hold every key of a checkpoint that can be resumed from."""

    meta: Meta
    state_dict: dict[str, Any]
    optimizer: Any
    param_schedulers: list[dict[str, Any]]
    hooks: dict[str, Any]
    rng: RandomState
    ranks: list[OfRank | None] | None = None

    def __post_init__(self) -> None:
        if None in (self.ranks or [])[1:]:
            raise ValueError("Object must have a state of each rank but the first in `ranks`")


def check_layout(checkpoint: Mapping[str, Any], source: object) -> None:
    """Refuse what cannot be resumed from by any trainer.

    Raises:
        CheckpointError: keys are missing, it is of another version, or a value is of the wrong type: with its key, what
            was expected and what was found.
    """
    check_usable(checkpoint, source)
    if _is_of_another_version(checkpoint):
        raise CheckpointError(
            f"{source} has schema {checkpoint['meta'].get('schema')!r}, this version of eventloop reads {SCHEMA}: "
            "update eventloop"
        )


def check_usable(checkpoint: Mapping[str, Any], source: object) -> None:
    """Refuse what no version of eventloop resumes from, so that an older checkpoint is taken in its place.

    A checkpoint of another version passes: to fall back behind it would train a part of the run again, without the user
    knowing why.

    Raises:
        CheckpointError: keys are missing, or a value is of the wrong type.
    """
    if missing := [key for key in NEEDED if key not in checkpoint]:
        raise CheckpointError(
            f"{source} cannot be resumed from, it has no {', '.join(missing)}: load_checkpoint takes its weights"
        )
    if not _is_of_another_version(checkpoint):
        read_as(Checkpoint, checkpoint, f"{source} cannot be resumed from")


def _is_of_another_version(checkpoint: Mapping[str, Any]) -> bool:
    meta = checkpoint["meta"]
    version = meta.get("schema") if isinstance(meta, Mapping) else SCHEMA
    return not isinstance(version, int) or version != SCHEMA


def read_as(kind: type[T], value: object, what: str) -> T:
    """Return a value as the type that says its layout.

    Args:
        what: what the error begins with.

    Raises:
        CheckpointError: it is not of that layout.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at ")
        place = place.rpartition("`$")[2].strip("`.")
        found = reprlib.repr(_at(value, place))
        of = f"of {place} " if place else ""
        raise CheckpointError(f"{what}, the value {of}is wrong: {expected}: {found}") from error
    except AttributeError as error:  # msgspec takes a tensor for a mapping
        raise CheckpointError(f"{what}, it has a tensor in the place of a mapping") from error


def _at(value: Any, place: str) -> Any:
    """Return the value at `place`, or the innermost mapping that exists."""
    for name, number in re.findall(r"(\w+)|\[(\d+)\]", place):
        key = name or int(number)
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break
    return value


def check_alike(saved: Any, own: Any, what: str) -> None:
    """Refuse a value that is of another kind than the one it is to replace, or has one in it: a text for a number. What
    is None on either side may be anything on the other, and keys that one side has are the affair of those who load it.

    Raises:
        CheckpointError: with the key, what was expected and what was found.
    """
    if isinstance(own, Mapping) and isinstance(saved, Mapping):
        for key in own.keys() & saved.keys():
            check_alike(saved[key], own[key], f"{what}[{key!r}]")
    elif isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        for number, (each, other) in enumerate(zip(saved, own, strict=False)):
            check_alike(each, other, f"{what}[{number}]")
    elif own is not None and saved is not None and (kind := _kind(own)) and kind != _kind(saved):
        raise CheckpointError(
            f"{what} is wrong: expected a {kind}, as {reprlib.repr(own)}, got {reprlib.repr(saved)}"
        )


def _kind(value: Any) -> str | None:
    """Return the kind of a plain value, None for any other, which may have been saved as something plain."""
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
