"""Test checkpoints that are intact and have wrong values: each is refused with key, expected and found
value."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint, read_manifest
from eventloop.checkpoint.commit import MANIFEST, PAYLOAD, seal
from eventloop.checkpoint.disk import FileHash
from eventloop.checkpoint.manifest import encode_body
from eventloop.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, PreciseBN
from eventloop.resume.gathering import gather
from tests.support.interrupted import assert_same, seed, stop_after
from tests.support.trainers import build_trainer, samples, shuffled, tiny_model

NONE = torch.zeros(3)


def build(directory: Path) -> Trainer:
    """Return a trainer with most stateful parts."""
    seed()
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 3)]
    data = samples(20)
    return build_trainer(
        directory,
        model=model,
        optimizer=optimizer,
        val_loader=shuffled(2, generator=torch.Generator()),
        schedulers=[torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])],
        train_loader=DataLoader(data, 4, sampler=RandomSampler(data, generator=torch.Generator())),
        hooks=[
            EMAHook(),
            EarlyStoppingHook("loss", patience=9),
            PreciseBN(),
            CheckpointHook(save_best="loss"),
        ],
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run that was stopped in mid-epoch."""
    directory = tmp_path_factory.mktemp("saved")
    with closing(build(directory)) as trainer:
        stop_after(trainer, 7)
        trainer.train()
    return directory


Refused = Callable[[tuple[Any, ...], Any, str], None]


@pytest.fixture(scope="module")
def refused(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refused]:
    """Return a function that puts a value into a loaded checkpoint, and asserts that it is refused and
    nothing changes."""
    edits: list[tuple[tuple[Any, ...], Any]] = []

    def edit(trainer: Any, event: Any) -> None:
        (keys, value), at = edits.pop(), trainer.checkpoint
        for key in keys[:-1]:
            at = at[key]
        if value is ...:
            del at[keys[-1]]
        else:
            at[keys[-1]] = value

    def state(trainer: Trainer) -> dict[str, Any]:
        gathered = gather(trainer.state, "")
        del gathered["meta"]["time"]
        return gathered

    def refuse(keys: tuple[Any, ...], value: Any, message: str) -> None:
        edits.append((keys, value))
        with pytest.raises(CheckpointError, match=message):
            trainer.resume(saved / "iter_7")
        assert_same(state(trainer), before)

    with closing(build(tmp_path_factory.mktemp("own"))) as trainer:
        trainer.bus.subscribe(edit, "after_load_checkpoint")
        before = state(trainer)
        yield refuse


POSITION = ("meta", "position")
GROUP = ("optimizer", "param_groups", 0)
MALFORMED: list[tuple[tuple[Any, ...], Any, str]] = [
    (("meta",), None, "the value of meta is wrong: Expected `object`, got `null`: None"),
    (("meta", "iter"), -5, "of meta.iter is wrong: Expected `int` >= 0: -5"),
    (("meta", "epoch"), 1.5, "of meta.epoch is wrong: Expected `int`, got `float`: 1.5"),
    (("meta", "epoch"), ..., "of meta is wrong: Object missing required field `epoch`: {"),
    (("meta", "max_epochs"), "x", r"of meta.max_epochs is wrong: Expected `int \| null`, got `str`: 'x'"),
    (("meta", "schema"), NONE, r"has schema tensor\(.*, this version of eventloop reads 2"),
    (("meta", "optimizer"), 3, "of meta.optimizer is wrong: Expected .*, got `int`: 3"),
    (("meta", "parameters"), {"": 3}, "of meta.parameters.* is wrong: Expected `array`, got `int`"),
    (("meta", "settings"), None, "of meta.settings is wrong: Expected `object`, got `null`: None"),
    (
        ("meta", "settings", "optimizer", "", 0, "lr"),
        NONE,
        "meta.settings that cannot be compared .*Boolean value",
    ),
    (
        ("meta", "settings", "run", "loader_length"),
        "x",
        "of meta.settings.run.loader_length is wrong: .*: 'x'",
    ),
    ((*POSITION, "batch_idx"), -1, "of meta.position.batch_idx is wrong: Expected `int` >= 0: -1"),
    ((*POSITION, "evaluated"), {}, "of meta.position.evaluated is wrong: Expected `int`, got `object`: {}"),
    (
        (*POSITION, "generators", "sampler.generator", 1),
        torch.zeros(5056),
        "random state is invalid: TypeError: .*Byte",
    ),
    ((*POSITION, "samplers"), NONE, "it has a tensor where a mapping is expected"),
    ((*POSITION, "loader"), 3, "of meta.position.loader is wrong: Expected `object`, got `int`: 3"),
    ((*POSITION, "opened_with"), {}, "of meta.position is wrong: Object must have `rng` in `opened_with`"),
    ((*POSITION, "opened_with", "generators"), ..., "must have `rng`, `generators` and `samplers`, or none"),
    (
        (*POSITION, "opened_with", "rng", "torch"),
        torch.zeros(3).byte(),
        "random state is invalid: RuntimeError",
    ),
    ((*POSITION, "evaluations", "val"), None, "of meta.position.evaluations.* is wrong: Expected `object`"),
    (
        ("state_dict",),
        None,
        "state_dict cannot be loaded, the value is wrong: Expected `object`, got `null`: None",
    ),
    (("state_dict", "0.bias"), "x", r"0\.bias: .* in state_dict, .* in ema_state_dict"),
    (
        ("optimizer",),
        None,
        "optimizer cannot be loaded, the value is wrong: Expected `object`, got `null`: None",
    ),
    (
        ("optimizer", "state", 0),
        "x",
        r"optimizer\['state'\] cannot be loaded, .* Expected `object`, got `str`",
    ),
    (("optimizer", "state", 0, "step"), "x", "a state that the optimizer refuses: "),
    (("optimizer", "param_groups"), 3, "of param_groups is wrong: Expected `array`, got `int`: 3"),
    ((*GROUP, "params"), None, "each of `param_groups` must have a list `params`"),
    ((*GROUP, "lr"), "x", r"param_groups\[0\]\['lr'\] is wrong: expected a number, such as 0\.\d+, got 'x'"),
    ((*GROUP, "betas"), 0.9, r"param_groups\[0\]\['betas'\] is wrong: expected a list, such as .*, got 0.9"),
    (("param_schedulers",), [], r"the state of the schedulers \['SequentialLR'\], the trainer has"),
    (
        ("hooks", "EMAHook", "steps"),
        -1,
        "EMAHook cannot take its state, the value of steps is wrong: .*>= 0: -1",
    ),
    (
        ("hooks", "EarlyStoppingHook", "wait"),
        "x",
        "EarlyStoppingHook cannot .* of wait is wrong: Expected `int`, got",
    ),
    (("hooks", "EarlyStoppingHook", "best"), ..., "EarlyStoppingHook .* missing required field `best`: {"),
    (
        ("hooks", "checkpoint", "bests"),
        {"loss": [1]},
        "CheckpointHook .* of bests.* Expected `array` of length 3",
    ),
    (("rng",), {}, "of rng is wrong: Object missing required field `python`: {}"),
    (
        ("rng", "python", 1),
        NONE,
        "random state is invalid: TypeError: the words .* torch.int32, got torch.float32",
    ),
    (("rng", "numpy", 0), "x", "random state is invalid: ValueError: .*MT19937"),
    (("rng", "torch"), torch.zeros(3).byte(), "random state is invalid: RuntimeError: "),
    (("rng", "modules"), {"0": []}, "of rng.modules.* is wrong: Expected `array` of length >= 1"),
    (("ranks",), [None, None], "must have a state of each rank except the first in `ranks`"),
    (("ranks",), [None, {"rng": 3}], r"of ranks\[1\].rng is wrong: Expected `object`, got `int`: 3"),
]


@pytest.mark.parametrize(
    ("keys", "value", "message"), MALFORMED, ids=[".".join(map(str, keys)) for keys, _, _ in MALFORMED]
)
def test_nonsense_is_refused(refused: Refused, keys: tuple[Any, ...], value: Any, message: str) -> None:
    """A wrong value is refused with its key, the expected and the found value."""
    refused(keys, value, message)


def hashed(path: Path, key: str, value: object) -> None:
    """Replace a value of a checkpoint, and the hash in its manifest."""
    torch.save({**load_checkpoint(path), key: value}, path / PAYLOAD)
    raw = (path / PAYLOAD).read_bytes()
    body = encode_body(msgspec.structs.replace(read_manifest(path), files={}))
    (path / MANIFEST).write_bytes(seal(body, {PAYLOAD: FileHash(len(raw), hashlib.sha256(raw).hexdigest())}))


@pytest.mark.parametrize(("key", "value"), [("meta", None), ("rng", "x"), ("param_schedulers", 3)])
def test_auto_passes_over_it_by_name_it_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, value: object
) -> None:
    """`resume("auto")` passes over a checkpoint with a wrong value, like over a damaged one."""
    with closing(build_trainer(tmp_path)) as first:
        first.train()
    hashed(tmp_path / "epoch_2", key, value)
    with closing(build_trainer(tmp_path)) as trainer:
        with pytest.raises(
            CheckpointError, match=rf"epoch_2 cannot be resumed from, the value of {key} is wrong"
        ):
            trainer.resume("epoch_2")

        assert trainer.resume("auto") == tmp_path / "epoch_1"

    assert (
        f"passed over for {tmp_path / 'epoch_1'}: epoch_2 cannot be resumed from, the value of {key}"
        in caplog.text
    )
