"""Hooks and writers by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from eventloop import HOOKS, WRITERS, register
from eventloop.checkpoint import find_checkpoints
from eventloop.hooks import CheckpointHook, Hook, PeriodicWriter
from eventloop.optim.schedulers import SCHEDULERS, StepLR
from eventloop.registry import build, find_class
from eventloop.writers import JSONLWriter, Writer
from tests import forked
from tests.support.trainers import MakeTrainer


@pytest.fixture(autouse=True)
def restore_registries() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    known = [(registry, set(registry.names())) for registry in (HOOKS, WRITERS)]
    yield
    for registry, names in known:
        for name in {*registry.names()} - names:
            registry.forget(name)


class Named(Hook):
    """A hook with one argument."""

    def __init__(self, n: int = 1) -> None:
        self.n = n


class Anything(Hook):
    """A hook that takes whatever it is given."""

    def __init__(self, **options: Any) -> None:
        self.options = options


def test_classes_are_known_by_name() -> None:
    """eventloop's hooks and writers are known by their names; `@register` makes a class known, and returns it."""
    assert register(Named) is Named
    assert [find_class(name) for name in ("CheckpointHook", "JSONLWriter", "Named")] == [
        CheckpointHook,
        JSONLWriter,
        Named,
    ]


def test_mmengines_register_module() -> None:
    """As a decorator with and without parentheses and names, and as a call; each returns the class."""

    @HOOKS.register_module()
    class First(Hook): ...

    @HOOKS.register_module(name=["Second", "Zweiter"])
    class Other(Hook): ...

    @HOOKS.register_module
    class Third(Hook): ...

    assert HOOKS.register_module("Fourth", module=Named) is Named
    found = [HOOKS.get(name) for name in ("First", "Second", "Zweiter", "Third", "Fourth", "Other")]
    assert found == [First, Other, Other, Third, Named, None]


def test_a_name_that_is_taken_needs_force() -> None:
    """`register_module(force=True)` gives a name of eventloop's own to another class, which configs then build."""
    with pytest.raises(ValueError, match=r"'LoggerHook' is already registered by eventloop\.hooks\.logger"):
        HOOKS.register_module("LoggerHook", module=Named)
    HOOKS.register_module("LoggerHook", force=True, module=Named)
    try:
        assert type(build({"type": "LoggerHook"})) is Named
    finally:
        HOOKS.forget("LoggerHook")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": build}, "@register decorates a class, got <function build"),
        ({"name": 3, "module": Named}, "the name of a hook must be a str, got 3"),
        ({"force": "no", "module": Named}, "force must be True or False, got 'no'"),
    ],
)
def test_what_cannot_be_registered(arguments: dict[str, Any], message: str) -> None:
    """A function, a name that is no text, a `force` that is no bool."""
    with pytest.raises(TypeError, match=message):
        HOOKS.register_module(**arguments)


def test_mmengines_build() -> None:
    """`HOOKS.build(config)` makes the object; `default_args` are what the config lacks, and it stays as it was."""
    HOOKS.register(Named)
    config = {"type": "Named"}

    assert HOOKS.build(config, default_args={"n": 2}).n == 2
    assert HOOKS.build({**config, "n": 3}, default_args={"n": 2}).n == 3
    assert config == {"type": "Named"}
    with pytest.raises(ValueError, match="unknown type 'Nammed': did you mean 'Named'"):
        HOOKS.build({"type": "Nammed"})
    with pytest.raises(TypeError, match=r"expected an object or a config dict\(type=...\), got 3"):
        HOOKS.build(3)  # type: ignore[arg-type]


def test_each_registry_builds_its_own_kind() -> None:
    """A scheduler is known to `SCHEDULERS` alone."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    config = {"type": "StepLR", "step_size": 2}

    assert type(SCHEDULERS.build(config, default_args={"optimizer": optimizer})) is StepLR
    with pytest.raises(ValueError, match="unknown type 'StepLR'"):
        HOOKS.build(config)


def test_build_by_name_or_class() -> None:
    """`type` is a name or the class itself, the rest are arguments; a config can be built from twice."""
    register(Named)
    config = {"type": Named, "n": 3, "priority": "LOW"}

    assert build({"type": "Named", "n": 3}).n == build(config).n == 3
    assert config == {"type": Named, "n": 3, "priority": "LOW"}


def test_priority_and_name_are_set_on_the_object() -> None:
    """They need not be arguments of a hook's constructor, which is given all else, also as `**options`."""
    hook = build({"type": Anything, "priority": "VERY_LOW", "name": "mine", "colour": "red"})

    assert (hook.priority, hook.name, hook.options) == ("VERY_LOW", "mine", {"colour": "red"})


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"type": "ChekpointHook"},
            ValueError,
            "unknown type 'ChekpointHook': did you mean 'CheckpointHook'",
        ),
        (
            {"type": "on_rank"},
            ValueError,
            "unknown type 'on_rank'",
        ),  # a function that is exported beside hooks
        ({"type": Named, "m": 1, "n": 2}, ValueError, "Named has no argument 'm'"),
        (
            {"type": "CheckpointHook", "intreval": 1},
            ValueError,
            "no argument 'intreval': did you mean 'interval'",
        ),
        ({"type": "JSONLWriter", "priority": 3}, ValueError, "JSONLWriter has no argument 'priority'"),
        ({"n": 1}, TypeError, r"expected an object or a config dict\(type=...\), got {'n': 1}"),
        ({"type": None}, TypeError, "type must be a class or its name, got None"),
        (3, TypeError, "expected an object or a config .*, got 3"),
    ],
)
def test_wrong_configs(config: Any, error: type[Exception], message: str) -> None:
    """A config that cannot be built says what is wrong with it, with a suggestion for a misspelling."""
    with pytest.raises(error, match=message):
        build(config)


def test_a_notebook_cell_run_twice() -> None:
    """A class defined anew in the same module takes the place of the one before."""

    def define() -> type:
        class Cell(Hook):
            pass

        return register(Cell)

    first, second = define(), define()

    assert first is not second
    assert find_class("Cell") is second


def test_two_classes_of_one_module_under_one_name() -> None:
    """A name given to another class of the same module is taken, too."""
    HOOKS.register(name="mine")(Named)

    with pytest.raises(ValueError, match="'mine' is already registered"):
        HOOKS.register(name="mine")(Anything)


def test_a_registry_of_each_kind() -> None:
    """`@HOOKS.register`, with or without a name of its own, and `@WRITERS.register`."""

    @HOOKS.register(name="mine")
    class MyHook(Hook):
        pass

    @WRITERS.register
    class MyWriter(Writer):
        pass

    assert (find_class("mine"), find_class("MyWriter")) == (MyHook, MyWriter)
    assert HOOKS.find("MyWriter") is None
    assert "JSONLWriter" in WRITERS.names()


@pytest.mark.parametrize(("registry", "kind"), [(HOOKS, Hook), (WRITERS, Writer)], ids=["hooks", "writers"])
def test_only_what_can_be_built_is_listed(registry: Any, kind: type) -> None:
    """A registry lists classes of its kind, not the base, and nothing that is beside them."""
    found = [find_class(name) for name in registry.names()]
    own = [cls for cls in found if cls.__module__.startswith("eventloop.")]  # other tests register theirs too

    assert len(own) > 5
    assert all(issubclass(cls, kind) and cls is not kind for cls in own)


SLOW = {"type": "Slow"}


@pytest.mark.parametrize(
    ("registry", "make"),
    [
        (HOOKS, lambda make_trainer: make_trainer(hooks=[SLOW])),
        (HOOKS, lambda make_trainer: make_trainer(default_hooks={"mine": SLOW})),
        (WRITERS, lambda make_trainer: make_trainer(writers=[SLOW])),
        (WRITERS, lambda make_trainer: PeriodicWriter([SLOW])),
    ],
    ids=["hooks", "default_hooks", "writers", "PeriodicWriter"],
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    make_trainer: MakeTrainer, registry: Any, make: Callable[[MakeTrainer], object]
) -> None:
    """Hooks where a hook is expected, writers where a writer is."""
    known = ", ".join(sorted(registry.names()))
    with pytest.raises(ValueError, match=f"^unknown type 'Slow': known are {known}; @register adds a class"):
        make(make_trainer)


PLUGIN = """
from pathlib import Path

from eventloop.hooks import Hook
from eventloop.writers import Writer

class PluginHook(Hook):
    def __init__(self, n=1):
        self.n = n

class PluginWriter(Writer):
    events = ("scalars_logged",)

    def __init__(self, filename="plugin.txt"):
        self.filename = filename

    def open(self, run):
        self.file = open(Path(run.work_dir, self.filename), "w")

    def write(self, event):
        print(event.step, file=self.file)

    def close(self):
        self.file.close()

not_a_class = 3
"""


def install(folder: Path, name: str, entry_points: str) -> None:
    """Write the metadata that pip would write for a package."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package of another project."""
    (tmp_path / "a_plugin.py").write_text(PLUGIN)
    install(
        tmp_path,
        "a_plugin",
        "[eventloop.hooks]\nPluginHook = a_plugin:PluginHook\nGoneHook = a_plugin:GoneHook\n"
        "NumberHook = a_plugin:not_a_class\n[eventloop.writers]\nPluginWriter = a_plugin:PluginWriter\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("a_plugin", None)


@pytest.mark.usefixtures("plugin")
def test_hooks_of_installed_packages() -> None:
    """A package makes its hooks known by an entry point; it is imported when one of them is used."""
    assert "a_plugin" not in sys.modules
    assert build({"type": "PluginHook", "n": 2}).n == 2
    with pytest.raises(ValueError, match="did you mean 'PluginHook'"):
        find_class("PlugnHook")


@pytest.mark.usefixtures("plugin")
def test_writers_of_installed_packages(make_trainer: MakeTrainer) -> None:
    """A package makes its writers known in their own group; one is suggested, built by its name, and writes the run."""
    assert "a_plugin" not in sys.modules
    with pytest.raises(ValueError, match="unknown type 'PluginWritr': did you mean 'PluginWriter'"):
        find_class("PluginWritr")
    trainer = make_trainer(writers=[{"type": "PluginWriter", "filename": "steps.txt"}])

    trainer.train()
    trainer.close()

    assert (trainer.work_dir / "steps.txt").read_text().split() == ["3", "6"]


@pytest.mark.usefixtures("plugin")
def test_entry_points_that_do_not_hold() -> None:
    """A package whose entry point is broken is named."""
    with pytest.raises(ImportError, match="'GoneHook' of an installed package cannot be loaded from 'a_plug"):
        find_class("GoneHook")
    with pytest.raises(TypeError, match="the entry point 'a_plugin:not_a_class' must name a class, got 3"):
        find_class("NumberHook")


@pytest.mark.usefixtures("plugin")
def test_two_packages_with_one_name(tmp_path: Path) -> None:
    """The error names both, as neither is preferred."""
    install(tmp_path, "b_plugin", "[eventloop.hooks]\nPluginHook = b_plugin:PluginHook\n")

    with pytest.raises(ValueError, match=r"have a hook 'PluginHook': a_plugin:.*, b_plugin:"):
        find_class("PluginHook")


def test_a_default_hooks_config_needs_no_type(make_trainer: MakeTrainer) -> None:
    """A default hook is configured by its arguments alone, as in MMEngine."""
    trainer = make_trainer(default_hooks={"checkpoint": {"interval": 2}, "timer": None})

    trainer.train()

    assert [path.name for path in find_checkpoints(trainer.work_dir)] == ["epoch_2"]


@pytest.mark.parametrize(
    "options",
    [
        {"default_hooks": {"logger": {"interval": "50"}}},
        {"hooks": [{"type": "LoggerHook", "interval": "50"}]},
    ],
    ids=["default hook", "hook"],
)
def test_an_error_of_a_config_names_its_class(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    """Several hooks have an option of one name, and the config may be far from the call."""
    with pytest.raises(TypeError, match=r"^LoggerHook: interval must be .*, got '50'$"):
        make_trainer(**options)


def test_a_default_hook_more(make_trainer: MakeTrainer) -> None:
    """A name that is no default hook's adds one, where a type is given; MMEngine's `custom_hooks` are hooks too."""
    register(Named)
    trainer = make_trainer(
        default_hooks={"mine": {"type": "Named", "n": 2}}, custom_hooks=[{"type": "Named", "n": 3}]
    )

    named = [(hook.name, hook.n) for hook in trainer.hooks if isinstance(hook, Named)]
    assert named == [("mine", 2), ("Named", 3)]
    with pytest.raises(
        ValueError, match=r"default_hooks has no 'loger': did you mean 'logger'.*needs a type"
    ):
        make_trainer(default_hooks={"loger": {"interval": 3}})


def test_a_run_from_configs(make_trainer: MakeTrainer) -> None:
    """A trainer built from configs runs as one built from objects."""
    register(Named)
    trainer = make_trainer(
        hooks=[{"type": "Named"}, {"type": "CheckpointHook", "interval": 1, "priority": "VERY_LOW"}],
        writers=[{"type": "JSONLWriter", "filename": "log.jsonl"}],
        default_hooks={"logger": {"type": "LoggerHook", "interval": 1}, "timer": None},
    )

    trainer.train()

    assert (trainer.work_dir / "epoch_2").exists()
    assert (trainer.work_dir / "log.jsonl").read_text().count('{"mode":"train"') == 6
    assert "timer" not in {hook.name for hook in trainer.hooks}


def test_installed_packages_are_not_searched_for_names_of_eventloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what all of them declare takes longer than many an import, so a run does not pay for it."""

    def refuse(group: str) -> None:
        raise AssertionError(f"the entry points of {group} were read")

    with monkeypatch.context() as patched:
        patched.setattr("eventloop.registry.entry_points", refuse)

        assert find_class("ConsoleWriter").__name__ == "ConsoleWriter"
        assert isinstance(build({"type": "JSONLWriter"}, WRITERS), JSONLWriter)


def test_a_trainer_imports_its_default_hooks_alone(tmp_path: Path) -> None:
    """The modules of other hooks are imported with the first use of their names, in an import or a config."""
    program = """
import sys
import torch
from eventloop import Trainer
from eventloop.registry import find_class
from eventloop.hooks import EMAHook
Trainer(torch.nn.Linear(1, 1), max_epochs=1, writers=[], work_dir=sys.argv[1])
others = ("ema", "momentum_updater", "profiler", "throughput")
print(*(name for name in others if f"eventloop.hooks.{name}" in sys.modules))
print(find_class("ThroughputHook").__module__)
"""

    ran = forked.run(["-c", program, str(tmp_path)])

    assert ran.stdout.split() == ["ema", "eventloop.hooks.throughput"], ran.stderr
