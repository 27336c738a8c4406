"""Hooks in checkpoints and configs: names and states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer, register
from eventloop.checkpoint import load_checkpoint
from eventloop.hooks import CheckpointHook, Hook
from tests.hooks.conftest import Make


@register
class CountHook(Hook):
    """Counts iterations, and says so in checkpoints."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.count = 0

    def after_train_iter(self, trainer: Trainer, event: Any) -> None:
        """Count."""
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.count = state["count"]


def test_state_is_saved_under_the_hooks_name(make_trainer: Make, tmp_path: Path) -> None:
    """A named hook's state is at `hooks/<name>` of the checkpoint, another's at its class's name, a stateless one's
    nowhere; a resumed run's hook goes on where the saved one was."""
    make_trainer(hooks=[CountHook("mine"), CountHook(), CheckpointHook()]).train()

    saved = load_checkpoint(tmp_path / "run" / "epoch_1")["hooks"]
    assert saved.keys() == {"mine", "CountHook", "checkpoint"}
    assert saved["mine"] == saved["CountHook"] == {"count": 4}

    count = CountHook()
    make_trainer(hooks=[count, CountHook("mine"), CheckpointHook()], max_epochs=2).resume()
    assert count.count == 4


@pytest.mark.parametrize("name", [None, "mine"])
def test_two_states_of_one_name_are_refused(make_trainer: Make, name: str | None) -> None:
    """A checkpoint could hold only one of them, so the trainer is not built."""
    with pytest.raises(ValueError, match=f"two hooks have the state name '{name or 'CountHook'}'"):
        make_trainer(hooks=[CountHook(name), CountHook(name)])


def test_two_stateless_hooks_of_a_class_are_welcome(make_trainer: Make) -> None:
    """Without a state nothing can collide, and both get a name of their own."""

    class Plain(Hook):
        pass

    trainer = make_trainer(hooks=[Plain(), Plain()])

    assert [hook.name for hook in trainer.hooks[-2:]] == ["Plain", "Plain #2"]


def test_config_sets_the_priority(make_trainer: Make) -> None:
    """`dict(type=..., priority=...)` overrides the class's priority; a bad one is refused with the trainer."""
    trainer = make_trainer(hooks=[{"type": "CountHook", "priority": "VERY_LOW"}])

    rows = {row.name: row.priority for row in trainer.bus.plan("after_train_iter")}
    assert rows["CountHook.after_train_iter"] == 90
    with pytest.raises(ValueError, match="unknown priority name 'VERYLOW': did you mean VERY_LOW"):
        make_trainer(hooks=[{"type": "CountHook", "priority": "VERYLOW"}])


def test_a_hook_has_no_offload() -> None:
    """A class attribute that would have no effect is refused where it is written."""
    with pytest.raises(TypeError, match=r"Away.offload has no effect, .*async def"):

        class Away(Hook):
            offload = "process"

            def after_train_iter(self, trainer: Any, event: Any) -> None: ...
