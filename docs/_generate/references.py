"""Link classes under their public names.

A class is documented as `eventloop.bus.Bus`, and type hints and base classes name it as `eventloop.bus.bus.Bus`.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from docs._generate.public import PUBLIC_MODULES, public_names


def resolve_by_public_name(app: Any, env: Any, node: Any, contents: Any) -> Any:
    """Return a link for `eventloop.bus.bus.Bus`, as the event `missing-reference` asks; None for other names."""
    target = _public_paths().get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or target is None:
        return None
    python = env.get_domain("py")
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, contents)


def drop_private_bases(app: Any, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """Show only the base classes that have a page, as the event `autodoc-process-bases` asks."""
    paths = _public_paths()
    bases[:] = [b for b in bases if f"{b.__module__}.{b.__qualname__}" in paths] or [object]


@cache
def _public_paths() -> dict[str, str]:
    """Map the path where a public class or function is defined to the path where it is documented."""
    paths: dict[str, str] = {}
    for module in PUBLIC_MODULES:  # a name of several is documented at the last
        for name in public_names(module):
            thing = getattr(importlib.import_module(module), name)
            if hasattr(thing, "__qualname__"):
                paths[f"{thing.__module__}.{thing.__qualname__}"] = f"{module}.{name}"
    return paths
