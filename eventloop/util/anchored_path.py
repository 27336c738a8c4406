"""Keep a relative path valid after the program has changed its working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, overload


class Anchored:
    """A path that leads to the same place after a change of the working directory.

    anchored = Anchored(Path("runs/digits"))
    os.chdir("elsewhere")
    anchored.path                      # /home/me/runs/digits
    """

    def __init__(self, path: Path) -> None:
        self._given, self._absolute = path, path.absolute()

    @property
    def path(self) -> Path:
        """The path as it was given, or the absolute path once the given one leads to another place."""
        try:
            return self._given if self._given.absolute() == self._absolute else self._absolute
        except FileNotFoundError:  # the working directory was removed
            return self._absolute


class AnchoredPath:
    """A descriptor for an attribute: a path that stays valid if the working directory changes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Path: ...

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else getattr(instance, self._name).path

    def __set__(self, instance: object, path: Path) -> None:
        setattr(instance, self._name, Anchored(path))
