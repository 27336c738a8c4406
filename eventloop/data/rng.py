"""The state of the global random generators, and of those a loader has of its own, as plain values and tensors."""

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
_LONG, _MOST = 32, 500  # items of a container, and objects, that are looked into
_OTHERS = frozenset({"torch", "numpy", "eventloop", "logging", "threading", "multiprocessing", "functools"})
_errors: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # what `error_of_state` has found
_Own = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def rng_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, loadable with `weights_only=True`.

    Their words are tensors: hundreds of Python ints take long to copy and to pickle.
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
    """Put the generators into a state that `rng_state` returned."""
    _put_global(state, random, np.random, torch.default_generator)
    for index, device in _of_devices(state):
        torch.cuda.set_rng_state(device, index)


def check_rng_state(state: Mapping[str, Any]) -> None:
    """Check a state of `rng_state` by loading it into throw-away generators, which raise if it is malformed."""
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
    """What decides the order of a loader, each or None: its sampler, its batch sampler's, its batch sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler]


def generators_of(loader: Iterable[Any] | None) -> list[torch.Generator]:
    """The random generators a loader and its samplers have of their own."""
    owned = [getattr(owner, "generator", None) for owner in (loader, *samplers_of(loader))]
    return list({id(g): g for g in owned if isinstance(g, torch.Generator)}.values())


def set_generators(loader: Iterable[Any] | None, states: list[torch.Tensor]) -> None:
    """Put a loader's own generators into states, in the order of `generators_of`."""
    for generator, state in zip(generators_of(loader), states, strict=False):
        _put_torch(generator, state)


def random_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """The state of everything a pass over a loader may draw from in this process."""
    return {"rng": rng_state(), **own_random_state(loader)}


def own_random_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """The same without the global generators."""
    return {
        "generators": [g.get_state() for g in generators_of(loader)],
        "samplers": samplers_state(loader),
    }


def set_random_state(
    loader: Iterable[Any] | None, state: Mapping[str, Any], *, opening: bool = False
) -> None:
    """Put everything into a state that `random_state` returned.

    Args:
        opening: a pass is opened next: samplers with a `state_dict` are given theirs. Otherwise they are left
            alone: they are where drawing has brought them, and one that is given its place begins its next pass there.
    """
    set_rng_state(state["rng"])
    set_own_random_state(loader, state, opening=opening)


def set_own_random_state(loader: Iterable[Any] | None, state: Mapping[str, Any], *, opening: bool) -> None:
    """The same without the global generators."""
    set_samplers(loader, state.get("samplers", {}), opening=opening)
    set_generators(loader, state["generators"])


def check_own_random_state(loader: Iterable[Any] | None, state: Mapping[str, Any]) -> None:
    """Check the states of a loader's own generators by loading them into throw-away ones."""
    for generator, own in zip(generators_of(loader), state["generators"], strict=False):
        _put_torch(_like(generator), own)
    _check_generators(_own_generators(loader), state.get("samplers", {}).get("generators", {}))


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Which of Python's, NumPy's and torch's generators are not the same in two of `rng_state`."""
    return [name for name in ("python", "numpy", "torch") if not _same(before[name], after[name])]


def samplers_state(loader: Iterable[Any] | None) -> dict[str, Any]:
    """What decides the order of the next pass beside the global generators and those of `generators_of`.

    That is, by place: `generators`, the random generators that are attributes of the loader, of its dataset, of its
    samplers, and of what these are made of; `states`, of samplers with `state_dict` and `load_state_dict`; `numbers`, the attributes that count
    something, of samplers that neither have these nor `set_epoch`. A loader that saves its own state asks its
    samplers itself.
    """
    asks_itself = saves_itself(loader)
    states: dict[str, Any] = {}
    numbers: dict[str, int | float] = {}
    for place, sampler in () if asks_itself else _samplers(loader).items():
        if _has_state_dict(sampler):
            states[place] = copy.deepcopy(sampler.state_dict())  # it may be the live one
        elif not (hasattr(sampler, "set_epoch") or type(sampler).__module__.startswith("torch.")):
            own = vars(sampler).items() if hasattr(sampler, "__dict__") else ()
            numbers |= {f"{place}.{name}": value for name, value in own if type(value) in (int, float)}
    generators = {place: _state_of(generator) for place, generator in _own_generators(loader).items()}
    return {"generators": generators, "states": states, "numbers": numbers}


def set_samplers(loader: Iterable[Any] | None, saved: Mapping[str, Any], *, opening: bool) -> None:
    """Put what is in the same place into a state that `samplers_state` returned; see `set_random_state`."""
    for sampler, state in samplers_given(loader, saved) if opening else ():
        load_sampler(sampler, state)
    for generator, state in _matching(_own_generators(loader), saved.get("generators", {})):
        _put(generator, state)


def samplers_given(loader: Iterable[Any] | None, saved: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the samplers of a loader that have a saved state, each with its state."""
    samplers, states = _samplers(loader), saved.get("states", {})
    places = () if saves_itself(loader) else samplers.keys() & states.keys()
    return [(samplers[place], states[place]) for place in places]


def lost_in(loader: Iterable[Any] | None, saved: Mapping[str, Any]) -> list[str]:
    """The places of a loader where `set_samplers` does not make the order what it was: there is no state for them,
    or a number there is another one, whatever it stands for."""
    own = samplers_state(loader)
    lost = [place for place in own["states"] if place not in saved.get("states", {})]
    for place, state in own["generators"].items():
        if saved.get("generators", {}).get(place, [None])[0] != state[0]:
            lost.append(place)
    numbers = saved.get("numbers", {})
    return lost + [place for place, value in own["numbers"].items() if numbers.get(place, value) != value]


def saves_itself(loader: Any) -> bool:
    """Return whether a loader saves its own place: it has `state_dict` and `load_state_dict`, and the first works."""
    return _has_state_dict(loader) and not error_of_state(loader)


def error_of_state(loader: Any) -> str:
    """Return the error that the `state_dict` of a loader raises, as accelerate's does, or "". A loader is asked once.

    torchdata's loaders are not asked: that would begin a pass.
    """
    if any(kind.__module__.startswith("torchdata.") for kind in type(loader).__mro__):
        return ""
    try:
        known = _errors.get(loader)
    except TypeError:  # it cannot be a key
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
    """A loader's samplers, and those they are made from, each once, by number and class."""
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
    """The state of the generators that are attributes of a model's modules, by name: of noise, of samples."""
    return {place: _state_of(generator) for place, generator in _of_modules(model).items()}


def set_module_generators(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Put those of the same name and kind into a state that `module_generators` returned."""
    for generator, state in _matching(_of_modules(model), saved):
        _put(generator, state)


def check_module_generators(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Check the states of the modules' generators by loading them into throw-away ones."""
    _check_generators(_of_modules(model), saved)


def _check_generators(own: Mapping[str, _Own], saved: Mapping[str, Any]) -> None:
    for generator, state in _matching(own, saved):
        _put(_like(generator), state)


def _matching(own: Mapping[str, _Own], saved: Mapping[str, Any]) -> list[tuple[Any, list[Any]]]:
    """Return the generators that have a saved state at their place and of their kind, each with its state."""
    pairs = [(generator, saved[place]) for place, generator in own.items() if place in saved]
    return [(generator, state) for generator, state in pairs if state[0] == _kind(generator)]


def _of_modules(model: torch.nn.Module) -> dict[str, Any]:
    """Torch's own modules have none, and few others do: their attributes are looked at by their types first, for this is
    done with each checkpoint."""
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
    """A loader's generators that are attributes, without those of `generators_of`: of its samplers, its dataset, and what
    these are made of, such as transforms, other datasets, or the loaders that it combines."""
    owners = _samplers(loader)
    for owner in (getattr(loader, "dataset", None), None if isinstance(loader, DataLoader) else loader):
        owners[type(owner).__name__] = owner
    return _generators_in(owners, generators_of(loader), depth=0 if saves_itself(loader) else 4)


def _generators_in(
    owners: Mapping[str, Any], elsewhere: Iterable[Any] = (), *, depth: int = 0
) -> dict[str, Any]:
    """The generators that are attributes, each once, without those that have their place elsewhere.

    Args:
        depth: attributes of attributes are looked into so far.
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
    """What an object is made of. Of what is long nothing: it is samples, and looking through them would take its time."""
    if type(owner) in _CONTAINERS:
        items = owner.items() if type(owner) is dict else enumerate(owner)
        yield from ((f"[{key!r}]", value) for key, value in (items if len(owner) <= _LONG else ()))
    elif type(owner).__dictoffset__:  # what has none may answer as it likes when it is asked
        yield from ((f".{name}", value) for name, value in vars(owner).items())


def _has_parts(value: Any) -> bool:
    """Something of the user's, or of torch's what loaders are made of."""
    kind = type(value)
    if kind in _CONTAINERS or isinstance(value, DataLoader | Dataset | Sampler):
        return True
    return bool(kind.__dictoffset__) and not (
        isinstance(value, type | ModuleType | FunctionType | torch.nn.Module)
        or kind.__module__.partition(".")[0] in _OTHERS
    )


def load_sampler(sampler: Any, state: Any) -> None:
    """Give a sampler its state of when a pass was opened.

    For some (torchdata's) that is a place within a pass, and before a pass begins it is the end of the one before. Such
    a one is asked for what is left, which is nothing, and begins its next pass at the beginning.
    """
    sampler.load_state_dict(copy.deepcopy(state))  # it may keep it, and go on in it
    now = rng_state()
    if next(iter(sampler), None) is not None:
        sampler.load_state_dict(copy.deepcopy(state))
    set_rng_state(now)


def _kind(generator: _Own) -> str:
    """What a state of it can be put into."""
    if isinstance(generator, np.random.Generator):
        return f"Generator({type(generator.bit_generator).__name__})"
    if isinstance(generator, np.random.RandomState):
        return f"RandomState({type(getattr(generator, '_bit_generator', None)).__name__})"
    return "torch" if isinstance(generator, torch.Generator) else "python"


def _like(generator: Any) -> Any:
    """Another generator that takes the states of this one."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    if isinstance(generator, np.random.Generator):
        return np.random.Generator(type(generator.bit_generator)())
    if isinstance(generator, np.random.RandomState):
        made_of: Any = generator.get_state(legacy=False)
        return np.random.RandomState(getattr(np.random, made_of["bit_generator"])())
    return random.Random()


def _has_state(generator: _Own) -> bool:
    """Not random.SystemRandom, nor one whose state has a form of its own."""
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
    if generator.get_state().shape == state.shape:  # else it was one of another device
        generator.set_state(state.clone())  # torch reads a state from the start of its storage


def _as_tensors(state: Any) -> Any:
    """A state of NumPy's, its arrays as tensors of bytes, which every version of torch has."""
    if isinstance(state, Mapping):
        return {key: _as_tensors(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.view(np.uint8).copy())
    return state.item() if isinstance(state, np.generic) else state


def _as_arrays(state: Any, like: Any) -> Any:
    """Back again; `like` is a state of the same generator, which knows the types."""
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
    return torch.from_numpy(
        words.view(np.int32).copy()
    )  # torch's unsigned types came late, and are half there


def _words(tensor: torch.Tensor) -> Any:
    if tensor.dtype != torch.int32:
        raise TypeError(f"the words of a generator must be of torch.int32, got {tensor.dtype}")
    return tensor.numpy().view(np.uint32)
