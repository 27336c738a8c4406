"""Test `Trainer.remember`: states in variables of a program, saved with each checkpoint and restored by a resume."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eventloop import Trainer
from eventloop.checkpoint import load_checkpoint
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.hooks import CheckpointHook
from tests.ranks import run_ranks
from tests.support.interrupted import assert_same
from tests.support.trainers import MakeTrainer, collect, shuffled

State = tuple[torch.Tensor, torch.Tensor]


def recurrent(make_trainer: MakeTrainer, run: Path, **changes: Any) -> tuple[Trainer, Callable[[], State]]:
    """A truncated backpropagation through time, whose hidden state is in a closure from chunk to chunk."""
    torch.manual_seed(1)
    lstm, head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)
    state: State = (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        nonlocal state
        inputs, target = batch
        carried = (state[0].detach(), state[1].detach())
        outputs, state = lstm(inputs[None], carried)
        return F.cross_entropy(head(outputs[0]), target)

    def restore(saved: State) -> None:
        nonlocal state
        state = saved

    model = nn.ModuleList([lstm, head])
    trainer = make_trainer(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        train_step=step,
        train_loader=shuffled(5),
        work_dir=run,
        hooks=[CheckpointHook(interval=1, by_epoch=False)],
        **changes,
    )
    trainer.remember("hidden", lambda: state, restore)
    return trainer, lambda: state


def test_a_module_outside_of_the_model_is_remembered(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Its `state_dict` and `load_state_dict` are the two functions; its buffers come back too."""
    first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for module in (first, second):
        trainer = make_trainer(work_dir=tmp_path, max_epochs=1, hooks=[CheckpointHook(interval=1)])
        trainer.remember("other", module.state_dict, module.load_state_dict)
        if module is first:
            module(torch.randn(4, 2))
            trainer.train()
    trainer.resume()

    assert_same(second.state_dict(), first.state_dict())


@pytest.mark.parametrize("stop", [1, 3, 5, 8])
def test_a_resumed_run_is_the_uninterrupted_one(make_trainer: MakeTrainer, tmp_path: Path, stop: int) -> None:
    """A truncated backpropagation that goes on in a new process has the losses, the weights and the hidden state of an
    uninterrupted one, to the bit."""
    whole, hidden = recurrent(make_trainer, tmp_path / "whole")
    whole.train()
    first, _ = recurrent(make_trainer, tmp_path / "parts")
    first.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"),
        "after_train_iter",
        when=lambda event: event.iter + 1 == stop,
    )
    first.train()

    second, continued = recurrent(make_trainer, tmp_path / "parts")
    second.resume("auto")
    second.train()

    assert (first.iter, second.iter) == (stop, whole.iter)
    assert_same(whole.model.state_dict(), second.model.state_dict())
    for expected, got in zip(hidden(), continued(), strict=True):
        assert torch.equal(expected, got)


def test_a_rollback_restores_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A run that goes back ends with the bits of a run that never left that line."""
    whole, _ = recurrent(make_trainer, tmp_path / "whole")
    whole.train()
    trainer, _ = recurrent(make_trainer, tmp_path / "back")
    seen = collect(trainer, "before_train")
    trainer.bus.subscribe(
        lambda trainer, event: trainer.rollback("iter_2"),
        "after_train_iter",
        when=lambda event: event.iter == 6,
        once=True,
    )
    trainer.train()

    assert len(seen) == 2
    assert_same(whole.model.state_dict(), trainer.model.state_dict())


def test_plain_pytorch_reads_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A checkpoint has the state at that moment under `remembered`, as tensors without a graph."""
    trainer, hidden = recurrent(make_trainer, tmp_path / "run")
    trainer.train()
    path = trainer.work_dir / f"iter_{trainer.iter}" / PAYLOAD

    (saved, _) = torch.load(path, weights_only=True)["remembered"]["hidden"]

    assert torch.equal(saved, hidden()[0])
    assert not saved.requires_grad


def test_a_learning_rate_test_leaves_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """`find_lr` trains, and the state is that before it."""
    trainer, hidden = recurrent(make_trainer, tmp_path / "run", max_epochs=1)
    before = [each.clone() for each in hidden()]

    trainer.find_lr(iterations=5)

    assert all(map(torch.equal, hidden(), before))


def holding(trainer: Trainer, name: str = "box", **values: Any) -> dict[str, Any]:
    """Let a trainer remember a dict, and return it."""
    box: dict[str, Any] = {"value": values.get("value", 0)}
    trainer.remember(name, lambda: box["value"], lambda state: box.update(value=state))
    return box


def test_a_resume_that_fails_restores_it(make_trainer: MakeTrainer) -> None:
    """A function that raises an error for its state refuses the resume, by its name; states that were set before have
    their former values again."""
    saved = make_trainer()
    holding(saved, "first", value=torch.ones(2))
    holding(saved, "second", value=3)
    saved.train()
    trainer = make_trainer()
    first = holding(trainer, "first", value=torch.zeros(2))

    def refuse(state: int) -> None:
        raise ValueError(f"{state} does not fit")

    trainer.remember("second", lambda: 1, refuse)
    with pytest.raises(ValueError, match="3 does not fit") as raised:
        trainer.resume()

    assert any("raised by set of trainer.remember('second', get, set)" in n for n in raised.value.__notes__)
    assert torch.equal(first["value"], torch.zeros(2))
    assert trainer.iter == 0


def test_names_of_one_side_are_logged(make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    """As with hooks, a state that only the checkpoint or only the program has is a warning, and the rest is restored."""
    saved = make_trainer()
    holding(saved, "kept", value=7)
    holding(saved, "gone", value=1)
    saved.train()
    trainer = make_trainer()
    kept, new = holding(trainer, "kept"), holding(trainer, "new", value=2)

    with caplog.at_level(logging.WARNING, "eventloop"):
        trainer.resume()

    assert (kept["value"], new["value"]) == (7, 2)
    (missing,) = [text for text in caplog.messages if "'new'" in text]
    assert "it has no remembered state 'new', which stays as it is" in missing
    (unknown,) = [text for text in caplog.messages if "'gone'" in text]
    assert "a remembered state 'gone', which this program does not register: call trainer.remember" in unknown


def test_weights_alone_leave_it(make_trainer: MakeTrainer) -> None:
    """`load_checkpoint` sets nothing, and a checkpoint of a program without such states has no key for them."""
    make_trainer().train()
    trainer = make_trainer()
    box = holding(trainer, value=5)

    trainer.load_checkpoint("epoch_2")

    assert box["value"] == 5
    assert "remembered" not in load_checkpoint(trainer.work_dir / "epoch_2")


@pytest.mark.parametrize(
    ("name", "get", "set", "error", "message"),
    [
        (3, int, print, TypeError, "the name of a state must be a str that is not empty, got 3"),
        ("", int, print, ValueError, "the name of a state must be a str that is not empty, got ''"),
        (
            "taken",
            int,
            print,
            ValueError,
            "expected a new name, got 'taken', which has its functions already",
        ),
        ("a", 5, print, TypeError, r"remember\('a'\): get must be a function \(\), got 5"),
        (
            "a",
            lambda x: x,
            print,
            TypeError,
            r"remember\('a'\): get is called with \(\), but the signature is",
        ),
        (
            "a",
            int,
            lambda: None,
            TypeError,
            r"remember\('a'\): set is called with \(state\), but the signature",
        ),
        (
            "a",
            object,
            print,
            TypeError,
            r"remembered\['a'\] is <object .*, a object: a state_dict must consist",
        ),
        (
            "a",
            lambda: {"n": Counter("ab")},
            print,
            TypeError,
            r"'a'\): expected dicts, lists and tuples, .* got a Counter",
        ),
        ("a", lambda: [{1}, [object()]], print, TypeError, r"remembered\['a'\]\[1\]\[0\] is <object"),
    ],
)
def test_what_cannot_be_remembered(
    make_trainer: MakeTrainer, name: Any, get: Any, set: Any, error: type[Exception], message: str
) -> None:
    """The error comes at the call, and names the argument, what was expected and what came."""
    trainer = make_trainer()
    holding(trainer, "taken")

    with pytest.raises(error, match=message):
        trainer.remember(name, get, set)


def test_a_function_that_fails_is_named(make_trainer: MakeTrainer) -> None:
    """An error of `get` at a save has a note with the name of the state."""
    trainer = make_trainer()
    box = holding(trainer)
    box.clear()

    with pytest.raises(KeyError) as raised:
        trainer.train()

    assert any("raised by get of trainer.remember('box', get, set)" in n for n in raised.value.__notes__)


def test_a_state_that_becomes_one_that_cannot_be_saved(make_trainer: MakeTrainer) -> None:
    """It is refused before the first iteration, by its name."""
    trainer = make_trainer()
    box = holding(trainer)
    box["value"] = object()

    with pytest.raises(TypeError, match=r"remembered\['box'\] is <object object"):
        trainer.train()

    assert trainer.iter == 0


RANKS = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from eventloop import Trainer
from eventloop.hooks import CheckpointHook

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

def build():
    seen = [torch.tensor([rank * 100.0])]
    model = torch.nn.Linear(2, 2)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    def step(trainer, batch):
        seen[0] = seen[0] + batch
        return trainer.model(batch.expand(1, 2)).sum()
    trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train_step=step, max_epochs=3,
        train_loader=[torch.tensor([1.0 + rank])], work_dir="run", writers=[], hooks=[CheckpointHook(interval=1)])
    trainer.remember("seen", lambda: seen[0], lambda state: seen.__setitem__(0, state))
    return trainer, seen

first, _ = build()
first.bus.subscribe(lambda trainer, event: trainer.stop("enough"), "after_train_iter", when=lambda event: event.iter == 1)
first.train()
first.close()
dist.barrier()
second, seen = build()
second.resume()
resumed = seen[0].item()
second.train()
print(json.dumps([resumed, seen[0].item()]))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_each_rank_has_its_own(tmp_path: Path, sharded: bool) -> None:
    """Two ranks that stop after two iterations go on with what each of them has summed up, also where each saves its own
    part of the model."""
    said: list[Any] = run_ranks(f"sharded = {sharded}\n{RANKS}", tmp_path)

    assert said == [[2.0, 3.0], [104.0, 106.0]]


FEWER = """
import logging
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("eventloop").addHandler(handler)

first, _ = build()
first.train()
first.close()
dist.barrier()
dist.destroy_process_group()
if rank < 2:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}_2", rank=rank, world_size=2)
    second, seen = build()
    second.resume("epoch_3", changed={"world_size": "apply"})
    second.close()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"seen": seen[0].item(), "lines": [line for line in lines if "remembered" in line]}))
else:
    print("{}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_states_of_ranks_that_are_gone_are_named(tmp_path: Path, sharded: bool) -> None:
    """On fewer ranks each has its own state again, and the log of the first one names those that no rank gets."""
    program = f"sharded = {sharded}\n{RANKS[: RANKS.index('first, _')]}{FEWER}"
    program = program.replace("world_size=2)\n\ndef", "world_size=3)\n\ndef").replace(
        '"cpu", (2,)', '"cpu", (dist.get_world_size(),)'
    )
    first, second, _ = run_ranks(program, tmp_path, ranks=3)

    assert (first["seen"], second["seen"]) == (3.0, 106.0)
    (line,) = first["lines"]
    assert "saved by 3 ranks, and this run has 2: " in line
    assert "; no rank gets the remembered states 'seen' of rank 2" in line
    assert second["lines"] == []
