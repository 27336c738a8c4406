"""`eventloop plan` of configs in JSON, TOML and YAML: they are data, and run no code without --trust."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventloop import HOOKS, cli

CODE = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\nmax_epochs = 7\n"
HOOK = f"{CODE}from eventloop import HOOKS\nfrom eventloop.hooks import Hook\n@HOOKS.register\nclass Evil(Hook): ...\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a foreign config, with modules beside it, in it and outside of it."""
    folder = tmp_path / "configs"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for path in ("evil.py", "code.txt", "evil_hook.py", "../outside.py"):
        (folder / path).write_text(HOOK if path == "evil_hook.py" else CODE)
    (folder / "inside.json").write_text('{"max_epochs": 5}')
    (folder / "sub" / "up.json").write_text('{"_base_": "../inside.json"}')
    (tmp_path / "outside.json").write_text('{"max_epochs": 6}')
    (folder / "link.json").symlink_to(tmp_path / "outside.json")
    yield folder
    HOOKS.forget("Evil")
    sys.modules.pop("evil_hook", None)


def ran(folder: Path) -> list[str]:
    """The files whose code was run."""
    return sorted(path.stem for path in folder.parent.rglob("*.ran"))


def plan(name: str, text: str, *options: str) -> int:
    """The command, with a config of this text."""
    Path(name).write_text(text.replace("OUTSIDE", str(Path.cwd().parent / "outside.json")), encoding="utf-8")
    return cli.main(["plan", *options, name])


CODE_IN_DATA = [
    ("c.json", '{"hooks": [], "custom_imports": "evil_hook"}', "evil_hook"),
    ("c.json", '{"hooks": [], "custom_imports": {"imports": ["evil_hook"]}}', "evil_hook"),
    ("c.toml", "hooks = []\ncustom_imports = ['evil_hook']", "evil_hook"),
    ("c.yaml", "hooks: []\ncustom_imports: {imports: [evil_hook]}", "evil_hook"),
    ("c.json", '{"hooks": [], "_base_": "evil.py"}', "evil"),
    ("c.yml", "hooks: []\n_base_: [inside.json, code.txt]", "code"),
    ("c.json", '{"hooks": [], "_base_": "../outside.py"}', "outside"),
]
FILES_ELSEWHERE = [
    ("c.json", '{"hooks": [], "_base_": "../outside.json"}'),
    ("c.json", '{"hooks": [], "_base_": "sub/../../outside.json"}'),
    ("c.toml", "hooks = []\n_base_ = 'OUTSIDE'"),
    ("c.json", '{"hooks": [], "_base_": "link.json"}'),
]


@pytest.mark.parametrize(("name", "text", "module"), CODE_IN_DATA)
def test_code_in_data_needs_trust(
    folder: Path, name: str, text: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --trust the error names the file and what it asks for, and nothing was run; with it, it is."""
    assert plan(name, text) == 2
    said = capsys.readouterr().err
    assert ran(folder) == []

    assert plan(name, text, "--trust") == 0
    assert ran(folder) == [module]

    key = "_base_" if "_base_" in text else "custom_imports"
    assert said.startswith(f"eventloop: {name}: {key} names ")
    for part in (module, "expected", f"a {Path(name).suffix} file", "is data; --trust"):
        assert part in said


@pytest.mark.parametrize(("name", "text"), FILES_ELSEWHERE)
def test_files_elsewhere_need_trust(
    folder: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base lies in the folder of the first config, wherever a link leads."""
    assert plan(name, text) == 2
    assert (
        f"expected the relative path of a file in {folder} with the suffix .json, " in capsys.readouterr().err
    )

    assert plan(name, text, "--trust") == 0
    assert "a run of 6 epochs" in capsys.readouterr().out


@pytest.mark.parametrize("base", ["inside.json", "./sub/up.json"])
def test_data_in_the_folder_needs_no_trust(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A base in a folder below may be based on one above, if that lies in the folder of the first config."""
    text = f'{{"_base_": "{base}", "custom_imports": {{"imports": []}}, "hooks": [{{"type": "EMAHook"}}]}}'

    assert plan("c.json", text) == 0

    assert "a run of 5 epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind", ["evil.Evil", "evil_hook.Evil", "os.system", "eventloop.training.trainer.Trainer", "Trainer"]
)
@pytest.mark.parametrize("options", [(), ("--trust",)])
def test_a_type_is_a_registered_name(
    folder: Path, kind: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A dotted name imports nothing, and no other class or function is called."""
    assert plan("c.json", f'{{"hooks": [{{"type": "{kind}"}}]}}', *options) == 2

    assert f"unknown type '{kind}'" in capsys.readouterr().err
    assert ran(folder) == []


def test_a_module_beside_data_is_no_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading YAML imports PyYAML, and not a yaml.py that lies beside the config."""
    pytest.importorskip("yaml")
    (folder / "yaml.py").write_text(CODE)
    monkeypatch.delitem(sys.modules, "yaml")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])

    assert plan("c.yaml", "hooks: []\nmax_epochs: 3") == 0

    assert "a run of 3 epochs" in capsys.readouterr().out
    assert ran(folder) == []


def test_objects_in_yaml_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With --trust too: a tag for a Python object is no data."""
    pytest.importorskip("yaml")

    assert plan("c.yaml", "hooks: !!python/object/apply:os.getcwd []", "--trust") == 2

    assert "c.yaml cannot be read: ConstructorError" in capsys.readouterr().err


def test_python_is_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config in Python imports what it names and is based on what it names; a document that it is based on is data."""
    bases = "['../outside.py', '../outside.json', 'sub/up.json']"
    assert plan("c.py", f"hooks = []\n_base_ = {bases}\ncustom_imports = 'evil_hook'") == 0
    assert "a run of 5 epochs" in capsys.readouterr().out
    assert ran(folder) == ["evil_hook", "outside"]

    (folder / "sub" / "up.json").write_text('{"custom_imports": "evil"}')
    assert plan("c.py", "hooks = []\n_base_ = 'sub/up.json'") == 2
    assert "sub/up.json: custom_imports names 'evil'" in capsys.readouterr().err


def test_help_says_what_trust_is(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON, TOML and YAML are data."""
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])

    said = " ".join(capsys.readouterr().out.split())
    assert "JSON, TOML and YAML are data" in said
    assert "--trust let a config in JSON, TOML or YAML import modules (custom_imports)" in said


def test_names_of_a_config_are_no_commands_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in the table, nor in JSON, nor in an error."""
    named = r'{"writers": [{"type": "JSONLWriter", "name": "\u001b[2J\u009b\nx"}]}'

    assert [plan("c.json", named), plan("c.json", named, "--json")] == [0, 0]
    assert plan("c.json", r'{"hooks": [{"type": "\u001b[2J"}], "\u001b": 0}') == 2

    said = capsys.readouterr()
    assert {"\x1b", "\x9b"}.isdisjoint(said.out + said.err)
    assert r"\x1b[2J\u009b x" in said.out
