"""Find Lightning's packages, and derive a callback class from their base classes.

Lightning is installed as `lightning` or `pytorch-lightning`. A program may use either, or both.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import new_class
from typing import cast

from eventloop.bridges.host import require

LEAST = "2.4"
"""The oldest version of Lightning that the bridge supports."""
PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
"""The two packages that contain Lightning, and the names of their distributions."""


def packages_in_use() -> tuple[str, ...]:
    """Return the packages of Lightning that the program has imported, or else the first installed one.

    Raises:
        ImportError: none is installed, or one is too old.
    """
    packages = tuple(name for name in PACKAGES if name in sys.modules)
    if not packages:
        installed = [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None]
        packages = tuple(installed[:1]) or ("lightning.pytorch",)
    for name in packages:
        require(name.partition(".")[0], PACKAGES[name], LEAST, extra="lightning")
    return packages


@cache
def with_bases(cls: type, packages: tuple[str, ...]) -> type:
    """Return a subclass of a class that also derives from the `Callback` class of each package.

    Lightning's trainer requires callbacks to derive from the class of its own package.
    """
    bases = [import_module(name).Callback for name in packages]
    missing = tuple(base for base in bases if not issubclass(cls, base))
    if not missing:
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return new_class(cls.__name__, (cls, *missing), exec_body=lambda body: body.update(names, _public=cls))


def public_class(cls: type) -> type:
    """Return the class from which `with_bases` has made a class, or the class itself."""
    return cast(type, vars(cls).get("_public", cls))
