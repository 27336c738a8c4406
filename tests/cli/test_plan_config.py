"""`eventloop plan` of a config: hooks and writers are built without model or data, and shown in their order."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from eventloop import HOOKS, cli
from eventloop.cli.plan_config import is_config

PYTHON = """
\"\"\"Of MMEngine's shape.\"\"\"
max_epochs = 12
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50),
    checkpoint=dict(type="CheckpointHook", interval=1, save_best="accuracy"),
    sampler_seed=None,
)
custom_hooks = [dict(type="EMAHook", priority="ABOVE_NORMAL")]
writers = [dict(type="JSONLWriter")]
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=max_epochs, val_interval=2)
model = dict(type="ResNet", depth=50)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
"""
DOCUMENT: dict[str, Any] = {
    "default_hooks": {
        "timer": {"type": "IterTimerHook"},
        "logger": {"type": "LoggerHook", "interval": 50},
        "checkpoint": {"type": "CheckpointHook", "interval": 1, "save_best": "accuracy"},
        "sampler_seed": None,
    },
    "custom_hooks": [{"type": "EMAHook", "priority": "ABOVE_NORMAL"}],
    "writers": [{"type": "JSONLWriter"}],
    "train_cfg": {"max_epochs": 12, "val_interval": 2},
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "config.py") -> str:
    """A file in the working directory."""
    Path(name).write_text(text, encoding="utf-8")
    return name


def refused(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a config is refused with."""
    assert cli.main(["plan", name]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert (errors.count("\n"), errors.endswith(" (--traceback shows where)\n")) == (1, True)
    return errors.removeprefix("eventloop: ").removesuffix(" (--traceback shows where)\n")


def rows(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, Any]]]:
    """Who hears what, by event."""
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


def toml(config: dict[str, Any]) -> str:
    """The document without what TOML cannot say: None."""
    return (
        "[default_hooks]\ntimer = {type = 'IterTimerHook'}\nlogger = {type = 'LoggerHook', interval = 50}\n"
        "checkpoint = {type = 'CheckpointHook', interval = 1, save_best = 'accuracy'}\n"
        "[train_cfg]\nmax_epochs = 12\nval_interval = 2\n"
        "[[custom_hooks]]\ntype = 'EMAHook'\npriority = 'ABOVE_NORMAL'\n[[writers]]\ntype = 'JSONLWriter'\n"
    )


def test_documents_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON and TOML as Python; TOML has no None, so a default hook stays."""
    python = rows(write(PYTHON), capsys)

    assert rows(write(json.dumps(DOCUMENT), "config.json"), capsys) == python
    seeds = rows(write(toml(DOCUMENT), "config.toml"), capsys)["before_train_epoch"]
    assert [row["name"] for row in seeds if row not in python["before_train_epoch"]] == [
        "DistSamplerSeedHook.before_train_epoch"
    ]


def test_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    """Is read where PyYAML is installed; where not, the message says so."""
    name = write("custom_hooks:\n  - {type: EMAHook}\n", "config.yaml")

    if importlib.util.find_spec("yaml") is None:
        assert "config.yaml: a config in YAML needs PyYAML: pip install pyyaml" in refused(name, capsys)
    else:
        assert "EMAHook.after_train_iter" in [row["name"] for row in rows(name, capsys)["after_train_iter"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hooks = [dict(type='EMAHok')]", "unknown type 'EMAHok': did you mean 'EMAHook'?"),
        ("hooks = [dict(type='EarlyStoppingHook', monitr='acc')]", "EarlyStoppingHook has no argument 'monitr': did you mean 'monitor'?"),
        ("hooks = [dict(interval=1)]", "expected an object or a config dict(type=...), got {'interval': 1}"),
        ("default_hooks = dict(chekpoint=None)", "default_hooks has no 'chekpoint': did you mean 'checkpoint'?"),
        ("default_hooks = dict(checkpoint=dict(interval=0))", "interval must be -1 or a positive int, got 0"),
        ("custom_hook = []\nmax_iters = 3", "config.py has a 'custom_hook', which is ignored: did you mean 'custom_hooks'?"),
        ("train_cfg = dict(max_epoch=3)", "train_cfg has no key 'max_epoch': did you mean 'max_epochs'?"),
        ("train_cfg = dict(by_epoch=True, max_iters=3)", "train_cfg has by_epoch=True and max_iters: leave by_epoch out"),
        ("train_cfg = dict(max_epochs=2, max_iters=3)", "give exactly one of max_epochs and max_iters"),
        ("train_cfg = 3", "train_cfg must be a mapping, got 3"),
        ("hooks = dict(type='EMAHook')", "hooks must be a list of configs dict(type=...), got {'type': 'EMAHook'}"),
        ("hooks = [nothing]", "config.py cannot be read: NameError: name 'nothing' is not defined"),
        ("from nowhere_at_all import x\nhooks = []", "config.py: No module named 'nowhere_at_all'"),
        ("hooks = []\n_base_ = 'base.py'", "no config at base.py"),
        ("hooks = []\n_base_ = './config.py'", "config.py is a base of itself"),
        ("hooks = []\ncustom_imports = dict(imports=['nowhere_at_all'])", "custom_imports: nowhere_at_all cannot be imported"),
        ("writers = [dict(type='EMAHook')]", "expected a writer, got EMAHook, which is a hook: it goes to hooks=[...]"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong, and what was meant; exit code 2."""
    assert message in refused(write(text), capsys)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", "[1]", "config.json must be a mapping of names to values, got list"),
        ("config.json", "{", "config.json cannot be read: JSONDecodeError"),
        (
            "config.toml",
            "x = 1",
            "config.toml is not a config: expected one of the names default_hooks, custom_hooks, hooks, writers, train_cfg",
        ),
    ],
)
def test_documents_that_are_no_config(
    name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Are refused by what they are."""
    assert message in refused(write(text, name), capsys)


def test_arguments_are_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """A config takes none."""
    write(PYTHON)

    assert cli.main(["plan", "config.py", "--", "--lr", "1"]) == 2

    assert "config.py is a config, which takes no arguments, got --lr 1" in capsys.readouterr().err


def test_a_run_in_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    """Is one by `max_iters`, or by `by_epoch=False`."""
    assert cli.main(["plan", write("train_cfg = dict(by_epoch=False, max_iters=2000)")]) == 0
    assert capsys.readouterr().out.startswith("config.py: a run of 2,000 iterations\n")

    hooks = "hooks = [dict(type='CheckpointHook', by_epoch=True)]\ntrain_cfg = dict(by_epoch=False)"
    assert "in a run measured in iterations would never save" in refused(write(hooks), capsys)


def test_bases_are_merged(capsys: pytest.CaptureFixture[str]) -> None:
    """Mappings key by key, lists as a whole; `_delete_=True` keeps nothing of the base's."""
    Path("base").mkdir()
    write(
        "custom_hooks = [dict(type='EMAHook')]\ndefault_hooks = dict(timer=None, logger=None)", "base/one.py"
    )
    write('{"writers": [{"type": "JSONLWriter"}]}', "base/two.json")
    name = write("_base_ = ['base/one.py', 'base/two.json']\ndefault_hooks = dict(checkpoint=None)")

    plan = rows(name, capsys)

    names = {row["name"].split(".")[0] for handlers in plan.values() for row in handlers}
    assert {"EMAHook", "JSONLWriter"} <= names
    assert names.isdisjoint({"IterTimerHook", "LoggerHook", "CheckpointHook"})
    write("_base_ = 'base/one.py'\ndefault_hooks = dict(_delete_=True, checkpoint=None)")
    names = {row["name"].split(".")[0] for handlers in rows(name, capsys).values() for row in handlers}
    assert {"IterTimerHook", "LoggerHook"} <= names


def test_hooks_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    """`custom_imports` imports what registers them, from beside the config."""
    Path("sub").mkdir()
    write(
        "from eventloop import HOOKS\nfrom eventloop.hooks import Hook\n"
        "@HOOKS.register\nclass HookBesideTheConfig(Hook):\n"
        "    def after_train_iter(self, trainer, event): ...\n",
        "sub/hooks_beside_the_config.py",
    )
    name = write(
        "custom_imports = dict(imports=['hooks_beside_the_config'])\nhooks = [dict(type='HookBesideTheConfig')]",
        "sub/config.py",
    )
    try:
        named = [row["name"] for row in rows(name, capsys)["after_train_iter"]]
    finally:
        HOOKS.forget("HookBesideTheConfig")
        del sys.modules["hooks_beside_the_config"]

    assert "HookBesideTheConfig.after_train_iter" in named
    assert sorted(path.name for path in Path("sub").iterdir()) == ["config.py", "hooks_beside_the_config.py"]


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (PYTHON, True),
        ("with read_base():\n    from .base import *\nhooks = []", True),
        ("hooks: list = []\ndef lr(): ...\nclass A: ...", True),
        ("import os\nx = 1", False),
        ("hooks = []\nmain()", False),
        ("hooks = []\nif __name__ == '__main__':\n    main()", False),
        ("hooks = []\nfor x in y: ...", False),
        ("hooks = [", False),
    ],
)
def test_how_a_config_is_told_from_a_script(text: str, config: bool) -> None:
    """It assigns one of the names, and does nothing else."""
    assert is_config(Path(write(text))) is config
