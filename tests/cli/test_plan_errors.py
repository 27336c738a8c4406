"""`eventloop plan` of a config that cannot be built: one line, with the line of the user's code, and exit code 2."""

from __future__ import annotations

import json
import queue
import re
from pathlib import Path

import pytest

from eventloop import cli
from eventloop.cli.plan_reader import describe
from tests.cli.test_plan_config import refused, write

HOOK = "from eventloop.hooks import Hook\nclass Mine(Hook):\n    def __init__(self) -> None:\n        {}\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise RuntimeError('no way')", "config.py: RuntimeError: no way (config.py:4)"),
        ("{}['k']", "config.py: KeyError: 'k' (config.py:4)"),
        ("1 / 0", "config.py: ZeroDivisionError: division by zero (config.py:4)"),
        ("assert self is None", "config.py: AssertionError (config.py:4)"),
        ("raise ValueError('two\\nlines')", "config.py: two lines (config.py:4)"),
        ("None + 1", "config.py: unsupported operand type(s) for +: 'NoneType' and 'int' (config.py:4)"),
        ("open('nowhere')", "config.py: [Errno 2] No such file or directory: 'nowhere' (config.py:4)"),
        ("import json; json.loads('{')", "line 1 column 2 (char 1) (config.py:4)"),
    ],
)  # fmt: skip
def test_what_a_hook_raises_is_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With its type where the message says little without it, and the user's line, not that of a library."""
    assert message in refused(write(HOOK.format(line) + "hooks = [dict(type=Mine)]"), capsys)


def test_an_unexpected_error_of_a_library_has_the_librarys_line() -> None:
    """Where no line of the user's is in the traceback; one without a message has its type."""
    with pytest.raises(queue.Empty) as raised:
        queue.Queue[int]().get_nowait()
    error = raised.value
    assert error.__traceback__ is not None

    told = describe(error.with_traceback(error.__traceback__.tb_next))  # without the line of this test

    assert re.fullmatch(r"Empty \(.*queue\.py:\d+\)", told)


def test_traceback_shows_where_a_hook_failed() -> None:
    """Asked for, the error is raised, with that of the hook as its cause."""
    write(HOOK.format("raise RuntimeError('no way')") + "hooks = [dict(type=Mine)]")

    with pytest.raises(ValueError, match=r"config\.py: RuntimeError: no way") as raised:
        cli.main(["plan", "--traceback", "config.py"])

    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hooks = [dict(type='EMAHook', budget_us=10**400)]", "EMAHook: budget_us must be above 0 microseconds and finite, got an int that no float can hold"),
        ("hooks = [dict(type='EMAHook', budget_us=0)]", "EMAHook: budget_us must be above 0 microseconds and finite, got 0"),
        ("default_hooks = dict(costs=dict(budget_us='5'))", "CostsHook: budget_us must be a number of microseconds, got '5'"),
        ("writers = [dict(type='JSONLWriter', budget_us=-1)]", "JSONLWriter: budget_us must be above 0 microseconds and finite, got -1"),
        ("hooks = []\n_base_ = 3", "config.py: _base_ must be the path of a config, or a list of paths, got 3"),
        ("hooks = []\n_base_ = ['a.py', 3]", "config.py: _base_ must be the path of a config, or a list of paths, got ['a.py', 3]"),
        ("hooks = []\n_base_ = dict(a=1)", "config.py: _base_ must be the path of a config, or a list of paths, got {'a': 1}"),
        ("hooks = []\ncustom_imports = dict(imports=3)", "config.py: custom_imports must be the name of a module, a list of names, or dict(imports=[...]), got {'imports': 3}"),
        ("hooks = []\ncustom_imports = ['a', '']", "config.py: custom_imports must be the name of a module, a list of names, or dict(imports=[...]), got ['a', '']"),
        ("hooks = []\ncustom_imports = dict(import_=['a'])", "config.py: custom_imports has no key 'import_': did you mean 'imports'?"),
        ("hooks = []\ncustom_imports = dict(imports=['..a'])", "config.py: custom_imports: ..a cannot be imported: "),
        ("hooks = 3", "config.py: hooks must be a list of configs dict(type=...), got 3"),
        ("train_cfg = 3", "config.py: train_cfg must be a mapping, got 3"),
        ("hooks = []\nx = {}['k']", "config.py cannot be read: KeyError: 'k' (config.py:2)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The file, what was expected, and what came."""
    assert message in refused(write(text), capsys)


def test_a_base_has_the_file_it_is_in(capsys: pytest.CaptureFixture[str]) -> None:
    """An error in a base names the base."""
    write('{"_base_": 3}', "base.json")

    assert "base.json: _base_ must be the path of a config" in refused(
        write("_base_ = 'base.json'\nhooks = []"), capsys
    )


def test_no_bases_and_no_imports(capsys: pytest.CaptureFixture[str]) -> None:
    """None, which an empty key of a document is, is as good as an empty list."""
    document = {"_base_": None, "custom_imports": None, "hooks": None, "max_epochs": 3}

    assert cli.main(["plan", write(json.dumps(document), "config.json")]) == 0

    assert capsys.readouterr().out.startswith("config.json: a run of 3 epochs\n")


def test_a_module_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it raises; `allow_failed_imports` is for modules that are not there, as in MMEngine."""
    write("x = 1 / 0", "fails_when_imported.py")
    imports = "custom_imports = dict(imports=['fails_when_imported'], allow_failed_imports=True)\nhooks = []"

    message = refused(write(imports), capsys)

    assert message.startswith(
        "config.py: custom_imports: fails_when_imported cannot be imported: ZeroDivisionError: division by zero ("
    )
    assert message.endswith("fails_when_imported.py:1)")
    assert cli.main(["plan", write(imports.replace("fails_when_imported", "is_nowhere"))]) == 0


@pytest.mark.parametrize("name", ["two\nlines.py", "two\nlines.txt", "two\nlines.json"])
def test_a_path_of_two_lines_is_told_on_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is said of it."""
    refused(name, capsys)
    write("_base_ = 3", name)
    if name.endswith(".py"):
        assert cli.main(["plan", name]) == 2
        assert capsys.readouterr().err == (
            "eventloop: two lines.py ended without a run, and has made neither a Trainer nor a Bus\n"
        )
    else:
        assert refused(name, capsys).startswith("two lines")


def test_the_head_of_a_plan_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the file is called."""
    assert cli.main(["plan", write("max_epochs = 2", "two\nlines.py")]) == 0

    assert capsys.readouterr().out.startswith("two lines.py: a run of 2 epochs\n\nevent ")
