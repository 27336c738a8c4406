"""Reduce plotly.js to the modules that the charts of a page need, a quarter of the file.

`html` puts them on the page. The package plotly contains plotly.js with all kinds of charts (traces), maps
and 3D included. esbuild has made each module in that file a function, which calls the modules that it imports
by their names. The last module registers the traces. Here its list is reduced to bars, as in plotly's partial
bundles; lines belong to plotly's core.

- A module is kept if its name occurs anywhere in a module that is kept, so no call lacks its module.
- A file of another form is kept whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

MODULE = re.compile(r"([\w$]+)=\([\w,]+\)=>\(\)=>.{0,40}\(\w=\{exports:\{\}\}\)\.exports")
"""The function of esbuild that makes a CommonJS module; its name differs from release to release."""
LAZY = re.compile(r"([\w$]+)=\([\w,]+\)=>\(\)=>.{0,40}\(\w=\w\(\w=0\)\)")
"""The function of esbuild that runs an ES module at its first import.

The file has the text of such a module after the text of a CommonJS module.
"""
REGISTER = re.compile(r"=([\w$]+)\(\);[\w$]+\.register\(\[((?:[\w$]+\(\),?)+)\]\)")
"""The import of plotly's core, and the list of the traces."""
NAME = re.compile(r"[\w$]+")
TRACES = ("bar",)


def with_traces(source: str, traces: Iterable[str] = TRACES) -> str:
    """Return plotly.js with its core and only these traces, or unchanged if it has another form."""
    module, lazy = MODULE.search(source), LAZY.search(source)
    if module is None or lazy is None:
        return source
    definitions = [*re.finditer(rf"\}}\);(var ([\w$]+)={re.escape(module[1])}\()", source)]
    register = REGISTER.search(source, definitions[-1].start()) if definitions else None
    starts = [match.start(1) for match in definitions]
    texts = [source[start:end] for start, end in pairwise(starts)]
    modules = dict(zip((match[2] for match in definitions), texts, strict=False))
    roots = [_module_of(trace, modules) for trace in traces]
    if register is None or register[1] not in modules or "" in roots:
        return source
    kept = _reachable([register[1], *roots], modules, lazy[1])
    registered = ",".join(f"{root}()" for root in roots)
    last = source[starts[-1] : register.start(2)] + registered + source[register.end(2) :]
    return "".join([source[: starts[0]], *(modules[name] for name in modules if name in kept), last])


def _module_of(trace: str, modules: dict[str, str]) -> str:
    """Return the name of the module that defines a trace, or "" if not exactly one module does."""
    mark = f'moduleType:"trace",name:"{trace}",'
    names = [name for name, text in modules.items() if mark in text]
    return names[0] if len(names) == 1 else ""


def _reachable(roots: Iterable[str], modules: dict[str, str], lazy: str) -> set[str]:
    """Return the names of the root modules and of all modules that they import, directly or indirectly.

    Args:
        roots: the names of the root modules.
        modules: the text of each CommonJS module, with the ES modules that follow it, by name.
        lazy: the name of the function that makes an ES module.
    """
    es_module = re.compile(rf"[\s,;]([\w$]+)={re.escape(lazy)}\(")
    containing = {name: name for name in modules}  # the name in `modules` under which a module is found
    containing |= {inner: name for name, text in modules.items() for inner in es_module.findall(text)}
    reached: set[str] = set()
    pending = {*roots}
    while pending:
        name = pending.pop()
        reached.add(name)
        words = NAME.findall(modules[name])
        pending |= {containing[word] for word in words if word in containing} - reached
    return reached
