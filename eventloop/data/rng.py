"""Save and restore random generators: the global ones, and those that are attributes of objects.

Checkpoints, evaluations, predictions, tuning and loaders use it, so that side work does not change the
course of a training. States consist of plain values and tensors, so `torch.load` reads them with
`weights_only=True`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from eventloop.state.rollback import same_state

_Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, also of CUDA if initialised.

    The hundreds of words in a state are put into tensors, because as many Python ints take long to copy and
    to pickle.
    """
    numpy: Any = np.random.get_state()
    state: dict[str, Any] = {
        "python": _python_state(random.getstate()),
        "numpy": [numpy[0], _tensor(numpy[1]), *numpy[2:]],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the global generators from a state that `rng_state` returned."""
    random.setstate(_from_python_state(state["python"]))
    name, words, *rest = state["numpy"]
    np.random.set_state((name, _words(words), *rest))
    # a copy: of a view into a file's memory torch would read the bytes at the begin of that memory
    torch.set_rng_state(state["torch"].clone())
    for index, device_state in _cuda_states(state):
        torch.cuda.set_rng_state(device_state, index)


def _cuda_states(state: Mapping[str, Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the index and the saved state of each CUDA device that exists in this process."""
    if "cuda" in state and torch.cuda.is_available():
        for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            yield index, device_state.clone()


def changed_generators(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the global generators, of "python", "numpy" and "torch", whose states differ.

    Args:
        before, after: two results of `rng_state`.
    """
    return [name for name in ("python", "numpy", "torch") if not same_state(before[name], after[name])]


def module_generators(model: torch.nn.Module) -> dict[str, Any]:
    """Return the states of random generators that are attributes of a model's modules, by their paths."""
    return states_of(_generators_of_modules(model))


def set_module_generators(model: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Restore generators of a model's modules from the result of `module_generators`.

    Those whose path or kind differs from the saved ones stay as they are.
    """
    put_states(_generators_of_modules(model), saved)


def _generators_of_modules(model: torch.nn.Module) -> dict[str, Any]:
    """Return the random generators that are attributes of a model's modules, by their paths.

    Modules of torch's own classes are not searched, because they have no generators.
    """
    modules = model.named_modules()
    return generators_in(
        {name: module for name, module in modules if not type(module).__module__.startswith("torch.")}
    )


# --- generators that are attributes ------------------------------------------------------------------------


def generators_in(owners: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generators that are attributes of some objects, each once, by the path of the attribute.

    Attributes of attributes are not searched. Global generators, and generators without a state such as
    `random.SystemRandom`, are left out.

    Args:
        owners: the objects by their paths, such as "sampler", with which the paths of their attributes begin.
    """
    mt19937: Any = np.random.mtrand
    known = {id(torch.default_generator), id(mt19937._rand), id(getattr(random, "_inst", None))}
    generators: dict[str, Any] = {}
    for path, owner in owners.items():
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, _Generator) and id(value) not in known and _has_state(value):
                known.add(id(value))
                generators[f"{path}.{name}"] = value
    return generators


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of generators by path; each is a list that begins with the generator's kind."""
    return {path: [_kind(generator), *_state_of(generator)] for path, generator in generators.items()}


def put_states(generators: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Restore each generator for whose path a state of the same kind was saved."""
    for path, generator in generators.items():
        if path in saved and saved[path][0] == _kind(generator):
            _restore(generator, saved[path][1:])


def without_state(generators: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return the paths of generators for which no state of the same kind was saved."""
    return [path for path, each in generators.items() if saved.get(path, [None])[0] != _kind(each)]


def _kind(generator: _Generator) -> str:
    """Return the kind of a generator; a state can be restored only to a generator of the same kind."""
    if isinstance(generator, np.random.Generator):
        return f"Generator({type(generator.bit_generator).__name__})"
    if isinstance(generator, np.random.RandomState):
        return f"RandomState({type(getattr(generator, '_bit_generator', None)).__name__})"
    return f"torch.{generator.device.type}" if isinstance(generator, torch.Generator) else "python"


def _has_state(generator: _Generator) -> bool:
    """Return False for a subclass of `random.Random` that overrides `getstate`, as `SystemRandom` does."""
    return not isinstance(generator, random.Random) or type(generator).getstate is random.Random.getstate


def _state_of(generator: _Generator) -> list[Any]:
    """Return a generator's state as tensors and plain values, which `weights_only=True` can load."""
    if isinstance(generator, torch.Generator):
        return [generator.get_state()]
    if isinstance(generator, np.random.Generator):
        return [_as_tensors(generator.bit_generator.state)]
    if isinstance(generator, np.random.RandomState):
        return [_as_tensors(generator.get_state(legacy=False))]
    return _python_state(generator.getstate())


def _restore(generator: _Generator, state: list[Any]) -> None:
    """Set the state of a generator to a result of `_state_of`."""
    if isinstance(generator, torch.Generator):
        # a copy: of a view into a file's memory torch would read the bytes at the begin of that memory
        generator.set_state(state[0].clone())
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _as_arrays(state[0], generator.bit_generator.state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_as_arrays(state[0], generator.get_state(legacy=False)))
    else:
        generator.setstate(_from_python_state(state))


def _python_state(state: Any) -> list[Any]:
    version, words, gauss = state
    return [version, _tensor(np.frombuffer(array("I", words), np.uint32)), gauss]


def _from_python_state(state: Any) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(_words(words).tolist()), gauss


def _as_tensors(state: Any) -> Any:
    """Convert the arrays in a NumPy generator's state to tensors of bytes, which every torch supports."""
    if isinstance(state, Mapping):
        return {key: _as_tensors(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.view(np.uint8).copy())
    return state.item() if isinstance(state, np.generic) else state


def _as_arrays(state: Any, like: Any) -> Any:
    """Convert tensors of bytes back to arrays; their types are those in `like`, a state of the generator."""
    if isinstance(state, Mapping):
        return {key: _as_arrays(value, like[key]) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.numpy().view(like.dtype).copy()
    return state


def _tensor(words: Any) -> torch.Tensor:
    """Return unsigned words as a tensor of int32, because torch supports its unsigned types only in part."""
    return torch.from_numpy(words.view(np.int32).copy())


def _words(tensor: torch.Tensor) -> Any:
    """Return the words in the result of `_tensor` as an array of uint32."""
    if tensor.dtype != torch.int32:
        raise TypeError(f"the words of a generator's state must be of torch.int32, got {tensor.dtype}")
    return tensor.numpy().view(np.uint32)
