"""Names of other systems: the errors that say what does that here, and that it is there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

from eventloop import Trainer, hooks, writers
from eventloop.hooks import AmpOptimizerHook, GradientCumulativeOptimizerHook
from eventloop.peer_names import ARGUMENTS, CLASSES

MakeTrainer = Callable[..., Trainer]

SAID = [*CLASSES.values(), *(here for arguments in ARGUMENTS.values() for here in arguments.values())]
PARAMETERS = set(inspect.signature(Trainer).parameters)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launcher": "pytorch"}, "MMEngine's is here the script's: run it with torchrun"),
        ({"accumulate_grad_batches": 4}, r"Lightning's is here hooks=\[GradientCumulativeOptimizerHook\("),
        ({"limit_val_batches": 2}, r"Lightning's is here the loader's: one of torch\.utils\.data\.Subset\("),
        ({"callbacks": []}, r"Lightning's is here hooks=\[\.\.\.\]"),
        ({"ckpt_path": "last"}, r'Lightning\'s is here trainer\.resume\("auto"\), or of a path'),
    ],
)
def test_an_argument_of_another_system_is_explained(
    make_trainer: MakeTrainer, arguments: dict[str, Any], message: str
) -> None:
    """The error names the system, and what does that here."""
    with pytest.raises(TypeError, match=f"^Trainer has no argument '{next(iter(arguments))}': {message}"):
        make_trainer(**arguments)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("CSVLogger", "CSVWriter$"),
        ("SummaryWriter", "TensorBoardWriter$"),
        ("WandbLogger", "a Writer of your own"),
    ],
)
def test_a_logger_is_a_writer(make_trainer: MakeTrainer, name: str, here: str) -> None:
    """Its name is near that of something else, which is not suggested."""
    with pytest.raises(ValueError, match=f"unknown type '{name}': what it does elsewhere is here {here}"):
        make_trainer(writers=[{"type": name}])


def test_what_is_suggested_is_there() -> None:
    """Classes of hooks and writers, and arguments of the trainer."""
    classes = set(re.findall(r"\b[A-Z]\w+(?:Hook|Writer)\b", " ".join(SAID)))
    arguments = {found[1] for text in SAID if (found := re.match(r"(\w+)=", text))}

    assert [name for name in classes if not hasattr(hooks, name) and not hasattr(writers, name)] == []
    assert arguments - PARAMETERS == set()
    assert {name for known in ARGUMENTS.values() for name in known} & PARAMETERS == set()


@pytest.mark.parametrize(
    "arguments",
    [
        {"default_hooks": {"optimizer": {"grad_clip": {"max_norm": 1.0}}}},
        {"default_hooks": {"optimizer": {"grad_clip": {"type": "value", "clip_value": 1.0}}}},
        {"default_hooks": {"logger": {"interval": 2}}},
        {"hooks": [GradientCumulativeOptimizerHook(cumulative_iters=2)]},
        {"hooks": [AmpOptimizerHook(dtype="bfloat16")]},
    ],
    ids=["norm", "value", "logger", "accumulate", "precision"],
)
def test_what_is_suggested_builds(make_trainer: MakeTrainer, arguments: dict[str, Any]) -> None:
    """As it is written in the error, with values for the dots."""
    make_trainer(**arguments)
