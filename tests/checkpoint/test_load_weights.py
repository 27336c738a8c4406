"""Test `Trainer.load_checkpoint` with the weights of checkpoints, published files and other programs."""

from __future__ import annotations

import copy
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.checkpoint.external_weights import read_safetensors
from eventloop.checkpoint.weights import prepare_model_state
from eventloop.hooks import CheckpointHook, EMAHook
from eventloop.state.rollback import Rollback
from tests.support.other_weights import State, has, put, weights
from tests.support.trainers import MakeTrainer, tiny_model

# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["pth", "safetensors"])
def test_what_was_published(make_trainer: MakeTrainer, tmp_path: Path, fmt: str) -> None:
    """Published weights load by path, or by their name in the run's directory, also with an average."""
    hook = CheckpointHook(published_keys="state_dict", published_format=fmt)  # type: ignore[arg-type]
    trained = make_trainer(hooks=[hook], max_epochs=1)
    trained.train()
    (path,) = trained.work_dir.glob(f"*.{fmt}")
    first, second = make_trainer(work_dir=tmp_path / "other", hooks=[EMAHook()]), make_trainer()

    first.load_checkpoint(path)
    second.load_checkpoint(path.name)

    assert has(first, trained.model.state_dict())
    assert has(second, trained.model.state_dict())


@pytest.mark.parametrize("theirs", [True, False], ids=["save_model", "published"])
def test_tied_weights_of_safetensors(make_trainer: MakeTrainer, tmp_path: Path, theirs: bool) -> None:
    """A tied tensor that was written once is loaded under all its names, also if metadata have the name of a
    tensor."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(2, 3))
    model[1].weight = model[0].weight
    path = tmp_path / "tied.safetensors"
    if theirs:
        save_model(model, str(path))
    else:
        kept = {name: value for name, value in model.state_dict().items() if name != "1.weight"}
        save_file(kept, path, {"1.weight": "0.weight", "iter": "2.bias", "format": "pt"})

    assert read_safetensors(path).keys() == model.state_dict().keys()
    blank = copy.deepcopy(model)
    for parameter in blank.parameters():
        parameter.data.zero_()
    other = make_trainer(model=blank)
    other.load_checkpoint(path)

    assert has(other, model.state_dict())


@pytest.mark.parametrize(
    ("prefix", "wrap"),
    [
        ("", lambda state: state),
        ("module.", lambda state: {"model": state, "optimizer": {}, "epoch": 3}),
        ("_orig_mod.", lambda state: {"model_state_dict": state, "model": "resnet18"}),
        ("module._orig_mod.", lambda state: {"state_dict": state}),
        ("_orig_mod.module.", lambda state: state),
    ],
)
def test_files_of_other_programs(
    make_trainer: MakeTrainer, tmp_path: Path, wrap: Callable[[State], object], prefix: str
) -> None:
    """Bare tensors, tensors under other programs' keys, and names with wrappers' prefixes load; such files
    cannot be resumed from."""
    path = put(tmp_path / "theirs.pth", wrap({f"{prefix}{name}": each for name, each in weights().items()}))
    trainer = make_trainer()

    trainer.load_checkpoint(path)

    assert has(trainer, weights())
    with pytest.raises(CheckpointError, match=r"it has no meta, .*: use load_checkpoint"):
        trainer.resume(path)


def test_a_model_with_a_part_of_that_name(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A prefix that is a module of the model stays; that of a wrapper around it is removed."""
    own = {f"module.{name}": value for name, value in weights().items()}
    for number, state in enumerate([own, {f"module.{name}": value for name, value in own.items()}]):
        trainer = make_trainer(model=nn.ModuleDict({"module": tiny_model()}), work_dir=tmp_path / str(number))

        trainer.load_checkpoint(put(tmp_path / f"{number}.pth", state))

        assert has(trainer, own)


def test_versions_of_modules_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is told which version of it was saved, also where a prefix is removed."""
    seen: dict[str, Any] = {}
    load = nn.Linear._load_from_state_dict

    def recording(self: nn.Module, state: Any, prefix: str, local: dict[str, Any], *rest: Any) -> None:
        seen[prefix] = local.get("version")
        load(self, state, prefix, local, *rest)

    monkeypatch.setattr(nn.Linear, "_load_from_state_dict", recording)
    saved = OrderedDict((f"module._orig_mod.{name}", value) for name, value in weights().items())
    places = ("", "module", "module._orig_mod", "module._orig_mod.0", "module._orig_mod.3")
    saved._metadata = {name: {"version": number} for number, name in enumerate(places)}  # type: ignore[attr-defined]

    with Rollback("it") as rollback:
        finish, _ = prepare_model_state(tiny_model(), saved, rollback, strict=True, source="it")
        rollback.commit([finish])

    assert seen == {"0.": 3, "3.": 4}


def test_newest_and_best(make_trainer: MakeTrainer) -> None:
    """ "auto" and "best" mean the same as for `resume`; only weights are loaded, also if the optimizer was not
    saved."""
    scores = iter([0.75, 0.25])
    make_trainer(
        val_loader=[0],
        val_step=lambda trainer, batch: {"acc": next(scores)},
        sanity_val=0,
        hooks=[CheckpointHook(interval=1, save_optimizer=False, save_best="acc")],
    ).train()

    for name, expected in (("auto", "epoch_2"), ("best", "best_acc_epoch_1")):
        trainer = make_trainer()
        trainer.load_checkpoint(name)
        assert has(trainer, load_checkpoint(trainer.work_dir / expected)["state_dict"])
        assert (trainer.iter, trainer.epoch) == (0, 0)


# --- what is no such file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ([1, 2], "got a list"),
        ({}, "got an empty one"),
        ({"state": {}, "param_groups": []}, "got one with 'state', 'param_groups'"),
        ({"state_dict": None, "model": {"0.weight": 1}}, "got one with 'state_dict', 'model'"),
        ({0: torch.ones(1)}, "got one with 0"),
    ],
)
def test_what_has_no_weights(make_trainer: MakeTrainer, tmp_path: Path, state: object, found: str) -> None:
    """The error has the expected keys, the keys found, and what to do."""
    message = (
        "other.pth is not a checkpoint of eventloop: expected a mapping with a 'state_dict', 'model_state_dict' or 'model', "
        rf"or a model's tensors by their names, {found}\. If it has weights, .* model\.load_state_dict\("
    )

    with pytest.raises(CheckpointError, match=message):
        make_trainer().load_checkpoint(put(tmp_path / "other.pth", state))


EMPTY = json.dumps({"__metadata__": {"format": "pt"}}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no such file", "cannot be read as safetensors: "),
        ((2**40).to_bytes(8, "little") + b"{}", "cannot be read as safetensors: "),
        (len(EMPTY).to_bytes(8, "little") + EMPTY, "is not a checkpoint of eventloop: .* an empty one"),
    ],
    ids=["another file", "too long a header", "no tensors"],
)
def test_damaged_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, message: str
) -> None:
    """A damaged safetensors file is refused with the library's message; without the library the error names
    the extra."""
    (tmp_path / "w.safetensors").write_bytes(data)

    with pytest.raises(CheckpointError, match=rf"w\.safetensors {message}"):
        load_checkpoint(tmp_path / "w.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"needs safetensors: pip install 'torch-eventloop\[safetensors\]'"):
        load_checkpoint(tmp_path / "w.safetensors")


def test_where_safetensors_are_read_to(tmp_path: Path) -> None:
    """For safetensors `map_location` must be a device, because the format stores none."""
    save_file(weights(), tmp_path / "w.safetensors")

    for device in ("cpu", torch.device("cpu"), None):
        state = load_checkpoint(tmp_path / "w.safetensors", map_location=device)["state_dict"]
        assert all(torch.equal(state[name], value) for name, value in weights().items())
    with pytest.raises(TypeError, match=r"map_location must be a device for .*, got a dict"):
        load_checkpoint(tmp_path / "w.safetensors", map_location={"cuda:0": "cpu"})
