"""Save and restore random generators: the global ones, and those of a loader or a model.

`position`, the readers and checkpoints use it. States consist of plain values and tensors, so `torch.load`
reads them with `weights_only=True`.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

_CONTAINERS = frozenset({list, tuple, dict})
_LONG, _MOST = 32, 500  # greatest number of items of a container, and of objects, that are searched
_OTHERS = frozenset({"torch", "numpy", "eventloop", "logging", "threading", "multiprocessing", "functools"})
_errors: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # results of `state_dict_error`
_Own = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, also of CUDA if initialised.

    The words of a generator are tensors, because hundreds of Python ints take long to copy and to pickle.
    """
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, _tensor(np.frombuffer(array("I", words), np.uint32)), gauss],
        "numpy": [numpy[0], _tensor(numpy[1]), *numpy[2:]],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the global generators from a state that `rng_state` returned."""
    _put_global(state, random, np.random, torch.default_generator)
    for index, device in _of_devices(state):
        torch.cuda.set_rng_state(device, index)


def check_rng_state(state: Mapping[str, Any]) -> None:
    """Check a state of `rng_state` by loading it into temporary generators, which raise for a wrong one."""
    _put_global(state, random.Random(), np.random.RandomState(), torch.Generator())
    for index, device in _of_devices(state):
        torch.Generator(f"cuda:{index}").set_state(device)


def _put_global(state: Mapping[str, Any], python: Any, numpy: Any, cpu: torch.Generator) -> None:
    version, words, gauss = state["python"]
    python.setstate((version, tuple(_words(words).tolist()), gauss))
    name, words, *rest = state["numpy"]
    numpy.set_state((name, _words(words), *rest))
    cpu.set_state(state["torch"].clone())  # torch reads a state from the start of its storage


def _of_devices(state: Mapping[str, Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the saved states of the CUDA devices that exist here; the checkpoint may have more."""
    if "cuda" in state and torch.cuda.is_available():
        for index, device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            yield index, device.clone()


def samplers_of(loader: Iterable[Any] | None) -> list[Any]:
    """Return a loader's sampler, its batch sampler's sampler, and its batch sampler, each or None."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler]


def generators_of(loader: Iterable[Any] | None) -> list[torch.Generator]:
    """Return the torch generators in the attribute `generator` of a loader and its samplers, each once."""
    owned = [getattr(owner, "generator", None) for owner in (loader, *samplers_of(loader))]
    return list({id(g): g for g in owned if isinstance(g, torch.Generator)}.values())


def set_generators(loader: Iterable[Any] | None, states: list[torch.Tensor]) -> None:
    """Restore a loader's own generators from states in the order of `generators_of`."""
    for generator, state in zip(generators_of(loader), states, strict=False):
        _put_torch(generator, state)


def random_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the state of everything that a pass over a loader may draw from in this process."""
    return {"rng": rng_state(), **own_random_state(loader)}


def own_random_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the state of a loader's own generators and samplers, without the global generators."""
    return {
        "generators": [g.get_state() for g in generators_of(loader)],
        "samplers": samplers_state(loader),
    }


def set_random_state(
    loader: Iterable[Any] | None, state: Mapping[str, Any], *, opening: bool = False
) -> None:
    """Restore the global generators and a loader's own state from a state that `random_state` returned.

    Args:
        opening: whether a pass is opened next; then samplers with a `state_dict` are restored too. Otherwise
            they keep the position to which drawing has brought them: a restored sampler would begin its next
            pass there.
    """
    set_rng_state(state["rng"])
    set_own_random_state(loader, state, opening=opening)


def set_own_random_state(loader: Iterable[Any] | None, state: Mapping[str, Any], *, opening: bool) -> None:
    """Restore a loader's own generators, and its samplers if `opening`; not the global generators."""
    set_samplers(loader, state.get("samplers", {}), opening=opening)
    set_generators(loader, state["generators"])


def check_own_random_state(loader: Iterable[Any] | None, state: Mapping[str, Any]) -> None:
    """Check the states of a loader's own generators by loading them into temporary ones, which raise."""
    for generator, own in zip(generators_of(loader), state["generators"], strict=False):
        _put_torch(_like(generator), own)
    _check_generators(_own_generators(loader), state.get("samplers", {}).get("generators", {}))


def changed_generators(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return which of "python", "numpy" and "torch" differ in two states of `rng_state`."""
    return [name for name in ("python", "numpy", "torch") if not _same(before[name], after[name])]


def samplers_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the state that decides the next pass's order, except global generators and `generators_of`.

    Each entry is a mapping by place, which is the class and number of a sampler or the path of an attribute:

    - `generators`: the states of generators among the attributes of the loader, of its dataset, of its
      samplers, and of their parts;
    - `states`: the states of samplers with `state_dict` and `load_state_dict`;
    - `numbers`: the numbers among the attributes of other samplers, except torch's and those with
      `set_epoch`.

    `states` and `numbers` are empty for a loader that saves its own state, which includes its samplers.
    """
    asks_itself = saves_itself(loader)
    states: dict[str, Any] = {}
    numbers: dict[str, int | float] = {}
    for place, sampler in () if asks_itself else _samplers(loader).items():
        if _has_state_dict(sampler):
            states[place] = copy.deepcopy(sampler.state_dict())  # a sampler may return its live state
        elif not (hasattr(sampler, "set_epoch") or type(sampler).__module__.startswith("torch.")):
            own = vars(sampler).items() if hasattr(sampler, "__dict__") else ()
            numbers |= {f"{place}.{name}": value for name, value in own if type(value) in (int, float)}
    generators = {place: _state_of(generator) for place, generator in _own_generators(loader).items()}
    return {"generators": generators, "states": states, "numbers": numbers}


def set_samplers(loader: Iterable[Any] | None, saved: Mapping[str, Any], *, opening: bool) -> None:
    """Restore a loader's generators, and its samplers if `opening`, from a state of `samplers_state`."""
    for sampler, state in samplers_with_state(loader, saved) if opening else ():
        load_sampler(sampler, state)
    for generator, state in _matching(_own_generators(loader), saved.get("generators", {})):
        _put(generator, state)


def samplers_with_state(loader: Iterable[Any] | None, saved: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the samplers of a loader that have a saved state, each with its state."""
    samplers, states = _samplers(loader), saved.get("states", {})
    places = () if saves_itself(loader) else samplers.keys() & states.keys()
    return [(samplers[place], states[place]) for place in places]


def unrestorable_in(loader: Iterable[Any] | None, saved: Mapping[str, Any]) -> list[str]:
    """Return the places of a loader whose order `set_samplers` cannot restore.

    A saved state does not have them, or has another kind of generator or another number for them.
    """
    own = samplers_state(loader)
    lost = [place for place in own["states"] if place not in saved.get("states", {})]
    for place, state in own["generators"].items():
        if saved.get("generators", {}).get(place, [None])[0] != state[0]:
            lost.append(place)
    numbers = saved.get("numbers", {})
    return lost + [place for place, value in own["numbers"].items() if numbers.get(place, value) != value]


def saves_itself(loader: Any) -> bool:
    """Return whether a loader saves its own position: `state_dict` works, and `load_state_dict` exists."""
    return _has_state_dict(loader) and not state_dict_error(loader)


def state_dict_error(loader: Any) -> str:
    """Return the error that the `state_dict` of a loader raises, as accelerate's does, or "".

    `state_dict` is called once for each loader. It is not called for torchdata's loaders, where it would
    begin a pass.
    """
    if any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__):
        return ""
    try:
        known = _errors.get(loader)
    except TypeError:  # the loader is not hashable
        return _ask(loader)
    if known is None:
        known = _errors[loader] = _ask(loader)
    return known


def _ask(loader: Any) -> str:
    now = rng_state()
    try:
        loader.state_dict()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        set_rng_state(now)
    return ""


def _has_state_dict(owner: object) -> bool:
    return all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))


def _samplers(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return a loader's samplers and the samplers among their attributes, each once, by class and number."""
    found: dict[int, Any] = {}
    left = [sampler for sampler in samplers_of(loader) if sampler is not None]
    while left:
        sampler = left.pop(0)
        if id(sampler) not in found:
            found[id(sampler)] = sampler
            left += [
                value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Sampler)
            ]
    return {f"{type(sampler).__name__}({number})": sampler for number, sampler in enumerate(found.values())}


def module_generators(model: torch.nn.Module) -> dict[str, Any]:
    """Return the states of the generators among the attributes of a model's modules, by name."""
    return {place: _state_of(generator) for place, generator in _of_modules(model).items()}


def set_module_generators(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Restore the modules' generators that have a state of their name and kind from `module_generators`."""
    for generator, state in _matching(_of_modules(model), saved):
        _put(generator, state)


def check_module_generators(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Check the states of the modules' generators by loading them into temporary ones, which raise."""
    _check_generators(_of_modules(model), saved)


def _check_generators(own: Mapping[str, _Own], saved: Mapping[str, Any]) -> None:
    for generator, state in _matching(own, saved):
        _put(_like(generator), state)


def _matching(own: Mapping[str, _Own], saved: Mapping[str, Any]) -> list[tuple[Any, list[Any]]]:
    """Return the generators that have a saved state at their place and of their kind, each with its state."""
    pairs = [(generator, saved[place]) for place, generator in own.items() if place in saved]
    return [(generator, state) for generator, state in pairs if state[0] == _kind(generator)]


def _of_modules(model: torch.nn.Module) -> dict[str, Any]:
    """Return the generators among the attributes of a model's modules.

    Torch's own modules have none, and few others do. The types of attributes are checked first, because this
    runs with each checkpoint.
    """
    owners: dict[str, Any] = {}
    others: set[type] = set()
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("torch."):
            new = {*map(type, vars(module).values())} - others
            others |= {kind for kind in new if not issubclass(kind, _Own)}
            if new - others:
                owners[name] = module
    return _generators_in(owners)


def _own_generators(loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the generators among the attributes of a loader's parts, without those of `generators_of`.

    Its parts are the samplers, the dataset, and their parts such as transforms, other datasets or combined
    loaders.
    """
    owners = _samplers(loader)
    for owner in (getattr(loader, "dataset", None), None if isinstance(loader, DataLoader) else loader):
        owners[type(owner).__name__] = owner
    return _generators_in(owners, generators_of(loader), depth=0 if saves_itself(loader) else 4)


def _generators_in(
    owners: Mapping[str, Any], elsewhere: Iterable[Any] = (), *, depth: int = 0
) -> dict[str, Any]:
    """Return the generators among the attributes of some objects, each once, by the path of the attribute.

    Args:
        owners: the objects by name.
        elsewhere: generators to leave out, because they are saved elsewhere.
        depth: how many levels of attributes of attributes are searched.
    """
    mt19937: Any = np.random.mtrand
    known = {id(g) for g in (*elsewhere, torch.default_generator, mt19937._rand)}
    known.add(id(getattr(random, "_inst", None)))
    seen = {id(owner) for owner in owners.values()}
    found: dict[str, Any] = {}
    left = [(place, owner, depth) for place, owner in owners.items()]
    for place, owner, below in left:
        for name, value in _parts_of(owner):
            if isinstance(value, _Own):
                if id(value) not in known and _has_state(value):
                    known.add(id(value))
                    found[place + name] = value
            elif below and id(value) not in seen and len(seen) < _MOST and _has_parts(value):
                seen.add(id(value))
                left.append((place + name, value, below - (type(value) not in _CONTAINERS)))
    return found


def _parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes or items of an object; nothing for a long container, which holds samples."""
    if type(owner) in _CONTAINERS:
        items = owner.items() if type(owner) is dict else enumerate(owner)
        yield from ((f"[{key!r}]", value) for key, value in (items if len(owner) <= _LONG else ()))
    elif type(owner).__dictoffset__:  # an object without it may compute its `__dict__`
        yield from ((f".{name}", value) for name, value in vars(owner).items())


def _has_parts(value: Any) -> bool:
    """Return whether an object's attributes are searched: the user's objects, and parts of loaders."""
    kind = type(value)
    if kind in _CONTAINERS or isinstance(value, DataLoader | Dataset | Sampler):
        return True
    return bool(kind.__dictoffset__) and not (
        isinstance(value, type | ModuleType | FunctionType | torch.nn.Module)
        or kind.__module__.partition(".")[0] in _OTHERS
    )


def load_sampler(sampler: Any, state: Any) -> None:
    """Restore a sampler to its state at the opening of a pass.

    For some samplers, such as torchdata's, the state is a position within a pass, and before a pass begins it
    is the end of the pass before. Such a sampler is iterated, finds nothing left, and begins its next pass at
    the beginning.
    """
    sampler.load_state_dict(copy.deepcopy(state))  # the sampler may keep and change it
    now = rng_state()
    if next(iter(sampler), None) is not None:
        sampler.load_state_dict(copy.deepcopy(state))
    set_rng_state(now)


def _kind(generator: _Own) -> str:
    """Return the kind of a generator; a state fits generators of the same kind."""
    if isinstance(generator, np.random.Generator):
        return f"Generator({type(generator.bit_generator).__name__})"
    if isinstance(generator, np.random.RandomState):
        return f"RandomState({type(getattr(generator, '_bit_generator', None)).__name__})"
    return "torch" if isinstance(generator, torch.Generator) else "python"


def _like(generator: Any) -> Any:
    """Make another generator that accepts the states of this one."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)())
    if isinstance(generator, np.random.RandomState):
        made_of: Any = generator.get_state(legacy=False)
        return np.random.RandomState(getattr(np.random, made_of["bit_generator"])())
    return random.Random()


def _has_state(generator: _Own) -> bool:
    """Return whether a generator has a state of a known form, unlike random.SystemRandom."""
    return not isinstance(generator, random.Random) or type(generator).getstate is random.Random.getstate


def _state_of(generator: _Own) -> list[Any]:
    kind = _kind(generator)
    if isinstance(generator, torch.Generator):
        return [kind, generator.get_state()]
    if isinstance(generator, np.random.Generator):
        return [kind, _as_tensors(generator.bit_generator.state)]
    if isinstance(generator, np.random.RandomState):
        return [kind, _as_tensors(generator.get_state(legacy=False))]
    version, words, gauss = generator.getstate()
    return [kind, version, _tensor(np.frombuffer(array("I", words), np.uint32)), gauss]


def _put(generator: _Own, state: list[Any]) -> None:
    if isinstance(generator, torch.Generator):
        _put_torch(generator, state[1])
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _as_arrays(state[1], generator.bit_generator.state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_as_arrays(state[1], generator.get_state(legacy=False)))
    else:
        generator.setstate((state[1], tuple(_words(state[2]).tolist()), state[3]))


def _put_torch(generator: torch.Generator, state: torch.Tensor) -> None:
    if generator.get_state().shape == state.shape:  # else it is a state of another kind of device
        generator.set_state(state.clone())  # torch reads a state from the start of its storage


def _as_tensors(state: Any) -> Any:
    """Convert the arrays of a NumPy state to tensors of bytes, a type that every version of torch has."""
    if isinstance(state, Mapping):
        return {key: _as_tensors(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.view(np.uint8).copy())
    return state.item() if isinstance(state, np.generic) else state


def _as_arrays(state: Any, like: Any) -> Any:
    """Convert tensors of bytes back to arrays with the types in `like`, a state of the same generator."""
    if isinstance(state, Mapping):
        return {key: _as_arrays(value, like[key]) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.numpy().view(like.dtype).copy()
    return state


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _tensor(words: Any) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int32).copy())  # torch supports its unsigned types only in part


def _words(tensor: torch.Tensor) -> Any:
    if tensor.dtype != torch.int32:
        raise TypeError(f"the words of a generator's state must be of torch.int32, got {tensor.dtype}")
    return tensor.numpy().view(np.uint32)
