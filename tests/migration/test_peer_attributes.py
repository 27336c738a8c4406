"""Attributes, methods and their arguments that a trainer of another system has."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.migration.attributes import ATTRIBUTES, CALLS
from tests.support.trainers import MakeTrainer

NAMES = [*dict.fromkeys(name for names in ATTRIBUTES.values() for name in names)]
SAID = [*CALLS.values(), *(here for names in ATTRIBUTES.values() for here in names.values())]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fit", r"instead of Lightning's use trainer\.train\(\); the model and the loaders are the Trainer's arguments$"),
        ("get_hooks_info", r"instead of MMEngine's use print\(trainer\.bus\)"),
        ("build_hooks", r"instead of detectron2's use hooks=\[\.\.\.\] of the Trainer"),
        ("build_writers", r"instead of detectron2's use writers=\[\.\.\.\] of the Trainer$"),
        ("global_step", r"instead of Lightning's use trainer\.iter$"),
        ("runner", r"instead of MMEngine's use the trainer itself$"),
        ("_train_loop", r"instead of MMEngine's use trainer\.train\(\), or a loop of your own over trainer\.epochs\(\)"),
        ("save_checkpoint", r"instead of MMEngine's and Lightning's use hooks=\[CheckpointHook"),
        ("logger", r"instead of MMEngine's use logging\.getLogger\(\"eventloop\"\); instead of Lightning's use trainer\.writers$"),
    ],
)  # fmt: skip
def test_an_attribute_of_another_system_is_explained(
    make_trainer: MakeTrainer, name: str, message: str
) -> None:
    """The error names the system, and what does that here; asked of the class too."""
    for owner in (make_trainer(), Trainer):
        with pytest.raises(AttributeError, match=f"^Trainer has no attribute '{name}': {message}"):
            getattr(owner, name)


def test_none_of_them_is_there(make_trainer: MakeTrainer) -> None:
    """Neither for `hasattr`, `dir` and `copy`, nor in the way of who sets one."""
    trainer: Any = make_trainer()

    assert not {*NAMES} & {*dir(trainer)}
    assert [name for name in NAMES if hasattr(trainer, name) or hasattr(copy.copy(trainer), name)] == []
    trainer.global_step = 3
    assert trainer.global_step == 3
    with pytest.raises(AttributeError, match=r"^'Trainer' object has no attribute 'itre'"):
        trainer.itre  # noqa: B018


def test_what_is_said_is_there(make_trainer: MakeTrainer) -> None:
    """Attributes of the trainer and of what it holds."""
    trainer = make_trainer()
    chains = {chain for here in SAID for chain in re.findall(r"\btrainer((?:\.\w+)+)", here)}

    assert len(chains) > 20
    for chain in chains:
        found: Any = trainer
        for name in chain[1:].split("."):
            found = getattr(found, name)


@pytest.mark.parametrize("method", ["train", "val", "test"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ckpt_path": "last"}, r'use trainer\.resume\("auto"\)'),
        ({"val_loader": []}, r"it is an argument of Trainer\(\.\.\.\)"),
        ({"max_epoch": 3}, r"did you mean 'max_epochs'\?"),
    ],
)  # fmt: skip
def test_an_argument_of_a_call_is_explained(
    make_trainer: MakeTrainer, method: str, arguments: dict[str, Any], message: str
) -> None:
    """One of another system's method, and one that belongs to the constructor."""
    name = next(iter(arguments))
    with pytest.raises(TypeError, match=f"^Trainer.{method} has no argument '{name}'(: |; ){message}"):
        getattr(make_trainer(), method)(**arguments)
    assert not {*CALLS} & {*inspect.signature(Trainer).parameters}


def test_an_error_of_a_handler_stays_what_it_was(make_trainer: MakeTrainer) -> None:
    """An AttributeError of what a property of the trainer calls is not taken for a missing property."""
    trainer = make_trainer()

    @trainer.bus.on("stop_requested")
    def fail(event: Any) -> None:
        event.resaon  # noqa: B018

    trainer.request_stop("enough")
    with pytest.raises(AttributeError, match="resaon"):
        trainer.stopping  # noqa: B018
