"""`eventloop plan` of a config: hooks and writers are built without model or data, and shown in their order."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from eventloop import cli
from tests.cli.conftest import ENVIRONMENT

DOCUMENT: dict[str, Any] = {
    "default_hooks": {
        "timer": {"type": "IterTimerHook"},
        "logger": {"type": "LoggerHook", "interval": 50},
        "checkpoint": {"type": "CheckpointHook", "interval": 1, "save_best": "accuracy"},
        "sampler_seed": None,
    },
    "custom_hooks": [{"type": "EMAHook", "priority": "ABOVE_NORMAL"}],
    "writers": [{"type": "JSONLWriter"}],
    "train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": 12, "val_interval": 2},
}
PYTHON = "\n".join(
    [f"{name} = {value!r}" for name, value in DOCUMENT.items()]
    + ["model = dict(type='ResNet', depth=50)", "optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1))"]
)
"""A config of MMEngine's shape; the last two names are ignored."""
TOML = """
[default_hooks]
timer = {type = 'IterTimerHook'}
logger = {type = 'LoggerHook', interval = 50}
checkpoint = {type = 'CheckpointHook', interval = 1, save_best = 'accuracy'}
[train_cfg]
max_epochs = 12
val_interval = 2
[[custom_hooks]]
type = 'EMAHook'
priority = 'ABOVE_NORMAL'
[[writers]]
type = 'JSONLWriter'
"""
HOOK = "from eventloop.hooks import Hook\nclass Mine(Hook):\n    def __init__(self) -> None:\n        {}\nhooks = [dict(type=Mine)]"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])


def write(text: str, name: str = "config.py") -> str:
    """A file in the working directory."""
    Path(name).write_text(text, encoding="utf-8")
    return name


def refused(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a config is refused."""
    assert cli.main(["plan", name, *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert (errors.count("\n"), errors.endswith(" (--traceback shows where)\n")) == (1, True)
    return errors.removeprefix("eventloop: ").removesuffix(" (--traceback shows where)\n")


def rows(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, Any]]]:
    """The handlers by event."""
    assert cli.main(["plan", "--json", name]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["buses"]
    return {each["event"]: each["handlers"] for each in plan}


def test_a_config_is_planned_without_model_or_data(capsys: pytest.CaptureFixture[str]) -> None:
    """Default hooks, their changes, custom hooks by their priority, and writers; nothing is left behind."""
    assert cli.main(["plan", write(PYTHON)]) == 0

    output = capsys.readouterr().out
    assert output.startswith("config.py: a run of 12 epochs\n\nevent ")
    assert output.index("OptimizerHook.after_train_iter") < output.index("EMAHook.after_train_iter")
    assert "JSONLWriter                                thread" in output
    assert "DistSamplerSeedHook" not in output
    assert [path.name for path in Path().iterdir()] == ["config.py"]


def test_documents_give_the_same_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON and YAML as Python; TOML has no None, so a default hook stays."""
    python = rows(write(PYTHON), capsys)

    assert rows(write(json.dumps(DOCUMENT), "config.json"), capsys) == python
    if importlib.util.find_spec("yaml") is not None:
        assert rows(write(json.dumps(DOCUMENT), "config.yaml"), capsys) == python
    seeds = rows(write(TOML, "config.toml"), capsys)["before_train_epoch"]
    assert [row["name"] for row in seeds if row not in python["before_train_epoch"]] == [
        "DistSamplerSeedHook.before_train_epoch"
    ]


def test_bases_are_read_by_mmengine(capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is installed; where not, the message says how to do without."""
    write("custom_hooks = [dict(type='EMAHook')]\ndefault_hooks = dict(timer=None)", "base.py")
    name = write("_base_ = 'base.py'\ndefault_hooks = dict(checkpoint=None)")

    if importlib.util.find_spec("mmengine") is None:
        assert "config.py: _base_, custom_imports and read_base are read by MMEngine" in refused(name, capsys)
        return
    names = {row["name"].split(".")[0] for handlers in rows(name, capsys).values() for row in handlers}
    assert "EMAHook" in names
    assert names.isdisjoint({"IterTimerHook", "CheckpointHook"})


BAD_PYTHON = [
    ("hooks = [dict(type='EMAHok')]", "unknown type 'EMAHok': did you mean 'EMAHook'?"),
    (
        "custom_hook = []\nmax_iters = 3",
        "config.py has a 'custom_hook', which is ignored: did you mean 'custom_hooks'?",
    ),
    ("train_cfg = dict(max_epoch=3)", "train_cfg has no argument 'max_epoch': did you mean 'max_epochs'?"),
    (
        "train_cfg = dict(by_epoch=True, max_iters=3)",
        "train_cfg has by_epoch=True and max_iters: leave by_epoch out",
    ),
    ("train_cfg = dict(max_epochs=2, max_iters=3)", "give exactly one of max_epochs and max_iters"),
    ("train_cfg = 3", "config.py: train_cfg must be a mapping, got 3"),
    (
        "hooks = dict(type='EMAHook')",
        "config.py: hooks must be a list of configs dict(type=...), got {'type': 'EMAHook'}",
    ),
    (
        "x = 3",
        "config.py is not a config: expected one of the names default_hooks, custom_hooks, hooks, writers, train_cfg",
    ),
    (
        "writers = [dict(type='EMAHook')]",
        "expected a writer, got EMAHook, which is a hook: it goes to hooks=[...]",
    ),
    (HOOK.format("raise RuntimeError('no way')"), "config.py: RuntimeError: no way"),
    (HOOK.format("assert self is None"), "config.py: AssertionError"),
    (HOOK.format("raise ValueError('two\\nlines')"), "config.py: Mine: two lines"),
    (HOOK.format("raise SystemExit(3)"), "config.py ends the program or begins a run, so it is not a config"),
]
YAML = pytest.mark.skipif(importlib.util.find_spec("yaml") is None, reason="needs PyYAML")
BAD_DOCUMENTS = [
    ("c.json", "[1]", "c.json must be a mapping of names to values, got list"),
    ("c.json", "{", "c.json: Expecting property name enclosed in double quotes"),
    ("c.toml", "x = 1", "c.toml is not a config: expected one of the names default_hooks"),
    (
        "c.json",
        '{"hooks": [], "_base_": "a.py"}',
        "c.json: expected no _base_ in a .json file, which is data and runs no code, got 'a.py'",
    ),
    (
        "c.toml",
        "hooks = []\ncustom_imports = ['os']",
        "c.toml: expected no custom_imports in a .toml file, which is data and runs no code, got ['os']",
    ),
    ("c.json", '{"hooks": [{"type": "os.system"}]}', "unknown type 'os.system'"),
    ("c.json", r'{"hooks": [{"type": "\u001b[2J"}]}', r"unknown type '\x1b[2J'"),
    pytest.param(
        "c.yaml",
        "hooks: !!python/object/apply:os.getcwd []",
        "c.yaml: ConstructorError: could not determine a constructor",
        marks=YAML,
    ),
    ("c.sh", "python", "c.sh is neither a Python file nor a config (.json, .toml, .yaml, .yml)"),
]


@pytest.mark.representative(4)
@pytest.mark.parametrize(
    ("name", "text", "message"), [*BAD_DOCUMENTS, *[("config.py", *each) for each in BAD_PYTHON]]
)
def test_bad_input_is_one_line(
    name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file, what was expected and what came; exit code 2. An error of a hook is the cause of that of its config."""
    assert message in refused(write(text, name), capsys)
    if "no way" in message:
        with pytest.raises(ValueError, match=r"config\.py: RuntimeError: no way") as raised:
            cli.main(["plan", "--traceback", name])
        assert isinstance(raised.value.__cause__, RuntimeError)


def test_arguments_are_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """A config takes none."""
    told = refused(write("{}", "c.json"), capsys, "--", "--lr", "1")

    assert told == "c.json is a config, which takes no arguments, got --lr 1"


def test_names_and_paths_stay_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the head, nor the table, nor JSON passes a control character to a terminal."""
    name = write(r'{"writers": [{"type": "JSONLWriter", "name": "\u001b[2J\u009b\nx"}]}', "two\nlines.json")

    assert [cli.main(["plan", name]), cli.main(["plan", name, "--json"])] == [0, 0]

    output = capsys.readouterr().out
    assert {"\x1b", "\x9b"}.isdisjoint(output)
    assert output.startswith("two lines.json: a run of 1 epoch\n\nevent ")
    assert r"\x1b[2J\u009b x" in output
