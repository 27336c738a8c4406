"""Call functions once the program has imported certain modules. This module imports none of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


@contextmanager
def after_import(actions: Mapping[str, Action]) -> Iterator[None]:
    """Call a function with each of some modules once the program has imported it, within the block.

    For a module that is imported already, the function is called at once. For a module that is imported after
    the block, it is not called.

    Args:
        actions: by the full name of a module, the function to call.
    """
    finder = _Finder(actions)
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Find a module by the other import finders, and make its loader call the action of the module."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module with an action, whose loader calls it; None for other modules."""
        if fullname not in self._actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._actions[fullname])
        return spec


class _Loader(Loader):
    """Load a module by its original loader, and then call the action."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, and then the action, which may patch its classes."""
        # from now on the module and its spec have the loader that they would have without this one
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
