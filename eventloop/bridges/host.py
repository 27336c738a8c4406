"""Check the version of another engine (the host) before its bridge imports it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def require(module: str, distribution: str, least: str, *, extra: str) -> None:
    """Check that a host is installed in a version that its bridge supports.

    Args:
        module: the host's top-level module.
        distribution: the name of its package.
        least: the oldest supported version, such as "0.5".
        extra: the extra of this package that installs it.

    Raises:
        ImportError: the host is not installed, or older.
    """
    install = f"pip install 'torch-eventloop[{extra}]'"
    if find_spec(module) is None:
        raise ImportError(f"this bridge needs {distribution}>={least}, which is not installed: {install}")
    try:
        installed = version(distribution)
    except PackageNotFoundError:  # a source checkout on the path has no version to compare
        return
    if _numbers(installed) < _numbers(least):
        raise ImportError(f"this bridge needs {distribution}>={least}, got {installed}: {install}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]
