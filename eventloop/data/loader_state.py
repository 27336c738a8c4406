"""Save and restore states that determine the order of a loader's next pass, except global generators.

`position`, the readers and the evaluations use it. The state has two parts. Each maps a place, which is
the path of an attribute such as "sampler.generator", to a state:

- `generators`: generators of Python, NumPy and torch that are attributes of the loader, its sampler, its
  batch sampler or its dataset, but not of their parts, such as transforms or nested datasets;
- `samplers`: the states of samplers with `state_dict` and `load_state_dict`, and of an IterableDataset with
  these methods that is read in this process.

All of this is also found in the DataLoaders that are attributes of a loader, which combines or wraps them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset

from eventloop.data.loader_info import dispatches, is_of_torchdata, parts_of, why_not_by_index
from eventloop.data.rng import generators_in, put_states, rng_state, set_rng_state, states_of

_errors: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # results of `state_dict_error`


def samplers_of(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the samplers of a loader and of its parts, each once, by the path of the attribute.

    The paths are `sampler`, `batch_sampler.sampler` and `batch_sampler`.
    """
    return _found(parts_of(loader), _samplers)


def _datasets(part: Any) -> list[tuple[str, Any]]:
    return [("dataset", getattr(part, "dataset", None))]


def _samplers(part: Any) -> list[tuple[str, Any]]:
    batch_sampler = getattr(part, "batch_sampler", None)
    return [
        ("sampler", getattr(part, "sampler", None)),
        ("batch_sampler.sampler", getattr(batch_sampler, "sampler", None)),
        ("batch_sampler", batch_sampler),
    ]


def _found(parts: Mapping[str, Any], within: Callable[[Any], list[tuple[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, part in parts.items():
        for place, value in within(part):
            if value is not None and all(value is not other for other in found.values()):
                found[f"{path}.{place}" if path else place] = value
    return found


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, else of each of its parts, else of a part's sampler and dataset.

    Of a part's samplers the first that has the method is called, because a batch sampler passes it on.
    """
    for part in parts_of(loader).values():
        if _set_epoch([part], epoch):
            if part is loader:
                return
            continue
        _set_epoch([sampler for _, sampler in _samplers(part)], epoch)
        _set_epoch([getattr(part, "dataset", None)], epoch)


def _set_epoch(owners: list[Any], epoch: int) -> bool:
    for owner in owners:
        if callable(set_epoch := getattr(owner, "set_epoch", None)):
            set_epoch(epoch)
            return True
    return False


def random_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the states of the global random generators, and of a loader's own generators and samplers."""
    return {"rng": rng_state(), **own_random_state(loader)}


def own_random_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the state of a loader's own generators and samplers, without the global generators."""
    # a sampler may return its live state
    states = {place: copy.deepcopy(each.state_dict()) for place, each in _with_state(loader).items()}
    return {"generators": generator_states(loader), "samplers": states}


def generator_states(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the states of a loader's own generators; this calls no code of loaders and samplers."""
    return states_of(generators_of(loader))


def set_random_state(
    loader: Iterable[Any] | None, state: Mapping[str, Any], *, opening: bool = False
) -> None:
    """Restore the global generators and a loader's own state from a state that `random_state` returned.

    Args:
        loader: the loader.
        state: the saved state.
        opening: whether a pass is opened next; then samplers with a `state_dict` are restored too. Otherwise
            they keep the position that they have reached by drawing.
    """
    set_rng_state(state["rng"])
    set_own_random_state(loader, state, opening=opening)


def set_own_random_state(loader: Iterable[Any] | None, state: Mapping[str, Any], *, opening: bool) -> None:
    """Restore a loader's own generators, and its samplers if `opening`; not the global generators."""
    if opening:
        set_samplers(loader, state["samplers"])
    set_generators(loader, state["generators"])


def set_samplers(loader: Iterable[Any] | None, states: Mapping[str, Any]) -> None:
    """Restore a loader's samplers that have a state, before a pass is opened."""
    for place, sampler in _with_state(loader).items():
        if place in states:
            _load_sampler(sampler, states[place])


def set_generators(loader: Iterable[Any] | None, states: Mapping[str, Any]) -> None:
    """Restore a loader's own generators for which a state of the same kind was saved.

    Args:
        loader: the loader.
        states: the states by the path of the attribute that held the generator.
    """
    put_states(generators_of(loader), states)


def saves_itself(loader: Any) -> bool:
    """Return whether a loader can save its own position: its `state_dict` works, and it can load one."""
    return has_state_dict(loader) and not state_dict_error(loader)


def has_state_dict(owner: object) -> bool:
    """Return whether an object has the methods `state_dict` and `load_state_dict`."""
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))


def state_dict_error(loader: Any) -> str:
    """Return the error that a loader's `state_dict` raises, as accelerate's does; "" if it works.

    `state_dict` is called once for each loader. It is not called for torchdata's loaders, where it would
    begin a pass.
    """
    if is_of_torchdata(loader):
        return ""
    try:
        known = _errors.get(loader)
    except TypeError:  # the loader is not hashable
        return _state_error(loader)
    if known is None:
        known = _errors[loader] = _state_error(loader)
    return known


def state_falls_short(loader: Any) -> bool:
    """Return whether this package finds the place of a loader more exactly than the loader's own state.

    - torchdata's StatefulDataLoader over a data set without a state: the state is a number of batches.
      torchdata 0.11 counts the batches of a stream twice, so that the second resume within a pass skips too
      many. It does not save the random states of workers, and may draw the order of the samples again at
      another time.
    - Accelerate's DataLoaderDispatcher: rank 0 reads ahead for all ranks, and the state of the data set is as
      far ahead. A resumed run leaves samples out, and at the end of a pass the ranks wait for each other.
    """
    return dispatches(loader) or any(
        isinstance(part, DataLoader) and is_of_torchdata(part) and not has_state_dict(part.dataset)
        for part in parts_of(loader).values()
    )


def has_own_state(loader: Any) -> bool:
    """Return whether a loader resumes by its own state, which is of one rank."""
    return saves_itself(loader) and not state_falls_short(loader)


def reads_by_index(loader: Any) -> bool:
    """Return whether a pass over a loader is resumed by its lists of indices alone."""
    return why_not_by_index(loader) is None and not has_own_state(loader)


def reset_iterators(loader: Any) -> None:
    """Let torchdata's loaders open their next pass like a second one, which draws a seed.

    The first pass of a process does not, where the loader was asked for its state before, as Accelerate does.
    """
    for part in parts_of(loader).values():
        if isinstance(part, DataLoader) and is_of_torchdata(part):
            part.load_state_dict({})  # type: ignore[attr-defined]


def _state_error(loader: Any) -> str:
    now = rng_state()
    try:
        loader.state_dict()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        set_rng_state(now)
    return ""


def generators_of(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return a loader's own generators, by the path of the attribute."""
    parts = parts_of(loader)
    named = {path or "loader": part for path, part in parts.items()}
    return generators_in({**named, **_found(parts, _samplers), **_found(parts, _datasets)})


def stateful_parts(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the parts of a loader that a pass moves and a `state_dict` saves, by the path of the attribute.

    They are the samplers with a `state_dict`, and each IterableDataset that has one and is read by no worker.
    """
    parts = parts_of(loader)
    samplers = {place: each for place, each in _found(parts, _samplers).items() if has_state_dict(each)}
    return samplers | _found(parts, _streamed_here)


def _streamed_here(part: Any) -> list[tuple[str, Any]]:
    dataset = getattr(part, "dataset", None)
    here = isinstance(dataset, IterableDataset) and not getattr(part, "num_workers", 0)
    return [("dataset", dataset)] if here and saves_itself(dataset) else []


def _with_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the `stateful_parts`; none if the loader saves its own state, because that includes theirs."""
    parts = stateful_parts(loader)
    return {} if parts and has_own_state(loader) else parts


def _load_sampler(sampler: Any, state: Any) -> None:
    """Restore a sampler to its state at the opening of a pass.

    For some samplers, such as torchdata's, the state is a position within a pass, and before a pass begins it
    is the end of the former pass. Such a sampler is iterated once, finds nothing left, and then begins its
    next pass at the start.
    """
    sampler.load_state_dict(copy.deepcopy(state))  # the sampler may keep and change it
    now = rng_state()
    if next(iter(sampler), None) is not None:
        sampler.load_state_dict(copy.deepcopy(state))
    set_rng_state(now)
