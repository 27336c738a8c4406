"""Save and restore the state of a loader on which the order of its next pass depends.

`position`, the readers and the evaluations use it. The state has two parts. Each is a dict from the path of
an attribute of the loader, such as "sampler.generator", to the state of the object there:

- `generators`: generators of Python, NumPy and torch that are attributes of the loader, its sampler, its
  batch sampler or its dataset, but not of their parts, such as transforms or nested datasets;
- `samplers`: samplers with `state_dict` and `load_state_dict`, and an IterableDataset with these methods that
  is read in this process.

The DataLoaders that a loader combines or wraps, and has as attributes, are searched too. `rng` saves the
global generators.
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
    """Return the dataset of a DataLoader, with the name of the attribute; None in place of a missing one."""
    return [("dataset", getattr(part, "dataset", None))]


def _samplers(part: Any) -> list[tuple[str, Any]]:
    """Return the samplers of a DataLoader with their paths; None in place of a missing one."""
    batch_sampler = getattr(part, "batch_sampler", None)
    return [
        ("sampler", getattr(part, "sampler", None)),
        ("batch_sampler.sampler", getattr(batch_sampler, "sampler", None)),
        ("batch_sampler", batch_sampler),
    ]


def _found(parts: Mapping[str, Any], within: Callable[[Any], list[tuple[str, Any]]]) -> dict[str, Any]:
    """Return the objects in the parts of a loader, each once, by their paths.

    Args:
        parts: the result of `parts_of`: DataLoaders by their paths.
        within: returns the objects in one part, each with its path there, or None.
    """
    objects: dict[str, Any] = {}
    for path, part in parts.items():
        for inner_path, value in within(part):
            if value is not None and all(value is not other for other in objects.values()):
                objects[f"{path}.{inner_path}" if path else inner_path] = value
    return objects


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` of the loader, or else of the DataLoaders in it.

    For a DataLoader without this method, its dataset and one of its samplers are called: the first that has
    the method, because a batch sampler may pass the call on to the sampler in it.
    """
    for part in parts_of(loader).values():
        if _set_epoch([part], epoch):
            if part is loader:
                return
            continue
        _set_epoch([sampler for _, sampler in _samplers(part)], epoch)
        _set_epoch([getattr(part, "dataset", None)], epoch)


def _set_epoch(owners: list[Any], epoch: int) -> bool:
    """Call `set_epoch` of the first object that has it; return False if none has."""
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
    # copied, because a sampler may return a state that it changes later
    states = {path: copy.deepcopy(each.state_dict()) for path, each in _with_state(loader).items()}
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
        opening: whether a pass is opened next; then samplers with a `state_dict` are restored, too. Within a
            pass they are not, because they have advanced with it.
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
    for path, sampler in _with_state(loader).items():
        if path in states:
            _load_sampler(sampler, states[path])


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
        error = _errors.get(loader)
    except TypeError:  # the loader is not hashable
        return _state_error(loader)
    if error is None:
        error = _errors[loader] = _state_error(loader)
    return error


def state_falls_short(loader: Any) -> bool:
    """Return whether another reader restores the position of a loader more exactly than its own state.

    It does so for two kinds of loaders:

    - torchdata's StatefulDataLoader over a data set without a state: the state is a number of batches.
      torchdata 0.11 counts the batches of a stream twice, so that the second resume within a pass skips too
      many. It does not save the random states of workers, and may draw the order of the samples again at
      another time.
    - Accelerate's DataLoaderDispatcher: rank 0 reads ahead for all ranks, and the state of the data set is
      that after the batches read ahead. A resumed run would leave samples out, and at the end of a pass the
      ranks would wait for each other.
    """
    return dispatches(loader) or any(
        isinstance(part, DataLoader) and is_of_torchdata(part) and not has_state_dict(part.dataset)
        for part in parts_of(loader).values()
    )


def has_own_state(loader: Any) -> bool:
    """Return whether a loader resumes by its own state, which is valid for the data of one rank only."""
    return saves_itself(loader) and not state_falls_short(loader)


def reads_by_index(loader: Any) -> bool:
    """Return whether a pass over a loader is resumed by drawing its lists of indices again."""
    return why_not_by_index(loader) is None and not has_own_state(loader)


def reset_iterators(loader: Any) -> None:
    """Let torchdata's loaders open their next pass like a second pass, which draws a seed.

    The first pass of a process draws none if `state_dict` was called before it, as Accelerate does.
    """
    for part in parts_of(loader).values():
        if isinstance(part, DataLoader) and is_of_torchdata(part):
            part.load_state_dict({})  # type: ignore[attr-defined]


def _state_error(loader: Any) -> str:
    """Call a loader's `state_dict`, and return its error, or ""; the global generators stay unchanged."""
    state_before = rng_state()
    try:
        loader.state_dict()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        set_rng_state(state_before)
    return ""


def generators_of(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the random generators that are attributes of a loader and its parts, by their paths."""
    parts = parts_of(loader)
    named = {path or "loader": part for path, part in parts.items()}
    return generators_in({**named, **_found(parts, _samplers), **_found(parts, _datasets)})


def stateful_parts(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the parts of a loader with a state that a pass changes, by the path of the attribute.

    These are the samplers with a `state_dict`, and each IterableDataset with a `state_dict` that is read in
    this process, without workers.
    """
    parts = parts_of(loader)
    samplers = {path: each for path, each in _found(parts, _samplers).items() if has_state_dict(each)}
    return samplers | _found(parts, _streamed_here)


def _streamed_here(part: Any) -> list[tuple[str, Any]]:
    """Return the dataset of a DataLoader if it is a stream with a state that is read in this process."""
    dataset = getattr(part, "dataset", None)
    is_here = isinstance(dataset, IterableDataset) and not getattr(part, "num_workers", 0)
    return [("dataset", dataset)] if is_here and saves_itself(dataset) else []


def _with_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the `stateful_parts`; {} if the loader saves its own state, which includes theirs."""
    parts = stateful_parts(loader)
    return {} if parts and has_own_state(loader) else parts


def _load_sampler(sampler: Any, state: Any) -> None:
    """Restore a sampler to its state at the opening of a pass.

    The state of some samplers, such as torchdata's, is a position in a pass, and before a pass begins it is
    the end of the former pass. Such a sampler is iterated once here: it yields nothing, and then begins its
    next pass at the start. Any other sampler, which yields something, gets its state again.
    """
    sampler.load_state_dict(copy.deepcopy(state))  # the sampler may keep and change it
    state_before = rng_state()
    if next(iter(sampler), None) is not None:
        sampler.load_state_dict(copy.deepcopy(state))
    set_rng_state(state_before)
