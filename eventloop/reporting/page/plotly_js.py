"""Take from plotly.js the modules that the charts of a page need, a quarter of the file.

`html` puts them on the page. The package plotly brings plotly.js with all traces, maps and 3D included. In
that file each module is a function of esbuild, which calls the modules that it imports by name. The last
module registers the traces. Here its list keeps only bars, as plotly's partial bundles do. The
core has lines.

- A module stays if its name occurs anywhere in a module that stays, so no call lacks its module.
- A file of another shape stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

MODULE = re.compile(r"([\w$]+)=\([\w,]+\)=>\(\)=>.{0,40}\(\w=\{exports:\{\}\}\)\.exports")
"""The function of esbuild that makes a CommonJS module; its name differs from release to release."""
LAZY = re.compile(r"([\w$]+)=\([\w,]+\)=>\(\)=>.{0,40}\(\w=\w\(\w=0\)\)")
"""The function of esbuild that runs an ES module at its first import. Its text follows a CommonJS one."""
REGISTER = re.compile(r"=([\w$]+)\(\);[\w$]+\.register\(\[((?:[\w$]+\(\),?)+)\]\)")
"""The import of the core, and the list of the traces."""
NAME = re.compile(r"[\w$]+")
TRACES = ("bar",)


def with_traces(source: str, traces: Iterable[str] = TRACES) -> str:
    """Return plotly.js with its core and these traces, or the whole source if it has another shape."""
    module, lazy = MODULE.search(source), LAZY.search(source)
    if module is None or lazy is None:
        return source
    found = [*re.finditer(rf"\}}\);(var ([\w$]+)={re.escape(module[1])}\()", source)]
    register = REGISTER.search(source, found[-1].start()) if found else None
    starts = [match.start(1) for match in found]
    texts = [source[start:end] for start, end in pairwise(starts)]
    modules = dict(zip((match[2] for match in found), texts, strict=False))
    roots = [_module_of(trace, modules) for trace in traces]
    if register is None or register[1] not in modules or "" in roots:
        return source
    kept = _reachable([register[1], *roots], modules, lazy[1])
    registered = ",".join(f"{root}()" for root in roots)
    last = source[starts[-1] : register.start(2)] + registered + source[register.end(2) :]
    return "".join([source[: starts[0]], *(modules[name] for name in modules if name in kept), last])


def _module_of(trace: str, modules: dict[str, str]) -> str:
    """Return the name of the module that defines a trace, or an empty text if that is not exactly one."""
    mark = f'moduleType:"trace",name:"{trace}",'
    found = [name for name, text in modules.items() if mark in text]
    return found[0] if len(found) == 1 else ""


def _reachable(roots: Iterable[str], modules: dict[str, str], lazy: str) -> set[str]:
    """Return the names of these modules and of all that they import, directly or not."""
    part = re.compile(rf"[\s,;]([\w$]+)={re.escape(lazy)}\(")
    homes = {name: name for name in modules}
    homes |= {found: name for name, text in modules.items() for found in part.findall(text)}
    kept: set[str] = set()
    waiting = {*roots}
    while waiting:
        name = waiting.pop()
        kept.add(name)
        waiting |= {homes[each] for each in NAME.findall(modules[name]) if each in homes} - kept
    return kept
