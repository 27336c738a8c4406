"""A function is called when the program has imported a module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from eventloop.autoattach.after_import import after_import


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("late_one", "late_two"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_action_follows_the_import() -> None:
    """It is called once, with the executed module, which has its own loader; other modules are left alone."""
    called: list[ModuleType] = []

    with after_import({"late_one": called.append}):
        importlib.import_module("late_two")
        assert called == []
        module = importlib.import_module("late_one")
        importlib.import_module("late_one")

    assert called == [module]
    assert module.value == 1
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is type(module.__loader__) is importlib.machinery.SourceFileLoader


def test_a_module_that_is_there_and_the_end_of_the_block() -> None:
    """An imported module's action is called at once; after the block no action is called, and none is needed."""
    called: list[str] = []
    importlib.import_module("late_two")
    before = list(sys.meta_path)

    actions = {
        name: lambda module: called.append(module.__name__) for name in ("late_one", "late_two", "absent")
    }
    with after_import(actions):
        assert called == ["late_two"]
        with pytest.raises(ModuleNotFoundError, match="absent"):
            importlib.import_module("absent")
    importlib.import_module("late_one")

    assert called == ["late_two"]
    assert sys.meta_path == before
