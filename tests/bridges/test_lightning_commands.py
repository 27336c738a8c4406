"""Commands to a training of Lightning: each is applied by Lightning's own means, or refused by name."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install 'torch-eventloop[lightning]'"
)

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from eventloop.hooks import EarlyStoppingHook
from tests.support.lightning import Classifier, MakeBridge, fit, loader, make_trainer
from tests.support.told import answers, outcomes, send_at, send_command

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of loaders without workers, and more


class Scheduled(Classifier):
    """The classifier with dropout and a rate that its scheduler computes anew from the base rate in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.rates: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.dropout(inputs))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def scheduled(*factors: float) -> list[Any]:
    """The rates that the schedule gives, times a factor in each step."""
    return [pytest.approx(0.1 / (1 + step) * factor) for step, factor in enumerate(factors)]


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules have bitwise the same state."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_told_run(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Notes, own commands, a pause and a stop are applied after their iteration; a rollback is refused by name."""
    bridge, notes = make_bridge(), list[tuple[str, int]]()

    @bridge.bus.on("text_logged")
    async def record(event: Any) -> None:
        notes.append((event.text, event.step))

    @bridge.command
    def add(trainer: Any, one: int, other: int = 2) -> int:
        """Add two numbers."""
        return one + other

    told = [("note", "hello"), ("add", "1"), ("rollback",), ("pause",), ("go",), ("help",)]
    send_at(bridge.bus, {2: told, 3: [("stop", "enough")]})

    trainer = fit(tmp_path, bridge)

    assert sorted(outcomes(tmp_path / "attachment")) == sorted(
        [
            ("note", "applied", 2),
            ("add", "applied", 2),
            ("rollback", "refused", 2),
            ("pause", "applied", 2),
            ("go", "applied", 2),
            ("help", "applied", 1),
            ("stop", "applied", 3),
        ]
    )
    by_name = {each.command: each for each in answers(tmp_path / "attachment")}
    assert by_name["rollback"].reason.endswith("the loop of Lightning fetches its batches itself")
    assert by_name["add"].result == {"result": 3}
    assert "add ONE [OTHER]: Add two numbers." in by_name["help"].result["text"]
    assert (trainer.global_step, bridge.trainer.stop_reason) == (3, "enough")
    assert notes == [("hello", 2)]


def test_a_checkpoint_is_lightnings(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """The answer has the path of a file from which Lightning resumes, after the same iteration."""
    bridge = make_bridge()
    send_at(bridge.bus, {5: [("checkpoint",)]})
    weights: list[dict[str, torch.Tensor]] = []

    @bridge.bus.on("after_train_iter")
    def record(trainer: Any, event: Any) -> None:
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})

    fit(tmp_path, bridge)

    (answer,) = answers(tmp_path / "attachment")
    saved = torch.load(answer.result["path"], weights_only=False)
    assert saved["global_step"] == 5
    assert all(torch.equal(value, saved["state_dict"][name]) for name, value in weights[4].items())
    assert fit(tmp_path, ckpt_path=answer.result["path"]).global_step == 8


def test_a_program_saves_by_lightning(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """`trainer.save_checkpoint()` in a handler saves as the command does."""
    bridge = make_bridge()

    @bridge.bus.on("after_train_iter")
    def save(trainer: Any, event: Any) -> None:
        if event.iter == 2:
            trainer.save_checkpoint()

    fit(tmp_path, bridge)

    assert torch.load(tmp_path / "attachment" / "iter_3.ckpt", weights_only=False)["global_step"] == 3


def test_a_steered_rate(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A schedule that computes its rate anew goes on in proportion, and after a resume from Lightning's file too."""
    bridge, module = make_bridge(), Scheduled()
    send_at(bridge.bus, {2: [("set", {"lr*": 0.5})], 5: [("checkpoint",)], 6: [("set", {"lr": 0.01})]})
    fit(tmp_path, bridge, model=module)

    assert module.rates[:6] == scheduled(1, 1, 0.5, 0.5, 0.5, 0.5)
    assert module.rates[6:] == [pytest.approx(0.01), pytest.approx(0.01 * 7 / 8)]
    assert answers(tmp_path / "attachment")[0].result["lr"]["factor"] == 0.5

    again = Scheduled()
    fit(
        tmp_path,
        make_bridge(work_dir=tmp_path / "again"),
        model=again,
        ckpt_path=tmp_path / "attachment" / "iter_5.ckpt",
    )

    assert again.rates == scheduled(1, 1, 1, 1, 1, 0.5, 0.5, 0.5)[5:]


def test_a_rate_of_a_schedule_by_epoch(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A schedule that is stepped at the end of an epoch goes on in proportion."""

    class ByEpoch(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))]

    bridge, module = make_bridge(), ByEpoch()
    send_at(bridge.bus, {2: [("set", {"lr*": 0.5})]})
    fit(tmp_path, bridge, model=module)

    assert module.rates == [pytest.approx(each) for each in (0.1, 0.1, 0.05, 0.05, *[0.025] * 4)]


def test_the_schedulers_own_state_stays(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """What a command adds to Lightning's objects is gone after the run, and is in no state of a scheduler."""
    bridge = make_bridge()
    send_at(bridge.bus, {2: [("set", {"lr*": 0.5}), ("checkpoint",)]})
    trainer = fit(tmp_path, bridge, model=Scheduled())

    saved = torch.load(tmp_path / "attachment" / "iter_2.ckpt", weights_only=False)["lr_schedulers"][0]
    plain = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), lambda step: 1.0)
    assert saved.keys() <= plain.state_dict().keys()
    assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop)


def test_a_validation_changes_nothing(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A validation by command answers with Lightning's metrics; the weights are those of a run that nobody told."""
    alone = fit(tmp_path, model=Scheduled(), validates=True)
    bridge = make_bridge()
    send_at(bridge.bus, {2: [("validate",)], 6: [("validate",), ("checkpoint",)]})
    told = fit(tmp_path, bridge, model=Scheduled())

    assert same(told.lightning_module, alone.lightning_module)
    assert told.callback_metrics["train_loss_epoch"] == alone.callback_metrics["train_loss_epoch"]
    module = Scheduled()
    module.load_state_dict(
        torch.load(tmp_path / "attachment" / "iter_6.ckpt", weights_only=False)["state_dict"]
    )
    (expected,) = make_trainer(tmp_path).validate(module, loader(2), verbose=False)
    assert answers(tmp_path / "attachment")[1].result == {
        name: pytest.approx(value) for name, value in expected.items()
    }


def test_own_hooks_leave_a_validation_by_command_out(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """Hooks of the bridge that stop by scores do not count a validation that was told."""
    bridge = make_bridge(hooks=[EarlyStoppingHook("val_loss", patience=3)])
    reasons: list[str] = []
    bridge.bus.subscribe(lambda event: reasons.append(event.reason), "after_val")
    send_at(bridge.bus, {each: [("validate",)] for each in (1, 2, 3)})

    trainer = fit(tmp_path, bridge)

    assert reasons == ["command"] * 3 + ["completed"] * 2
    assert trainer.global_step == 8


def test_a_validation_without_data_is_refused(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A module or a trainer that does not validate says so."""
    bridge = make_bridge()
    send_at(bridge.bus, {2: [("validate",)]})

    fit(tmp_path, bridge, validates=False)

    (answer,) = answers(tmp_path / "attachment")
    assert answer.reason == "the trainer has no validation_step, no loader for it, or limit_val_batches=0"


class Broken(Classifier):
    """A module whose validation fails in its third batch, and whose checkpoint fails in the first iterations."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            raise OSError("no such image")
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        if self.global_step == 2:
            raise OSError("the disk is full")


def test_what_fails_in_lightning_is_refused(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A command that fails in the program's code is refused with its error, and Lightning goes on as before."""
    alone = fit(tmp_path, model=Classifier())
    bridge = make_bridge()
    send_at(bridge.bus, {2: [("validate",), ("checkpoint",)], 3: [("validate",)]})
    told = fit(tmp_path, bridge, model=Broken())

    first, second, third = answers(tmp_path / "attachment")
    assert (first.outcome, first.reason) == ("refused", "it raised OSError: no such image")
    assert (second.outcome, second.reason) == ("refused", "it raised OSError: the disk is full")
    assert third.outcome == "applied"
    assert same(told.lightning_module.model, alone.lightning_module.model)


def test_lightnings_own_checkpoints_stay(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """A checkpoint by command does not count as one of those that ModelCheckpoint keeps."""
    kept = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_epochs=1, save_top_k=1)
    bridge = make_bridge()
    send_at(bridge.bus, {2: [("checkpoint",)], 6: [("checkpoint",)]})

    fit(tmp_path, bridge, kept, enable_checkpointing=True)

    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["epoch=1-step=8.ckpt"]
    assert sorted(path.name for path in (tmp_path / "attachment").glob("*.ckpt")) == [
        "iter_2.ckpt",
        "iter_6.ckpt",
    ]


def test_a_signal_ends_a_pause(make_bridge: MakeBridge, tmp_path: Path) -> None:
    """SIGTERM, which Lightning handles itself, ends a paused run as it ends a training."""
    bridge = make_bridge()
    send_at(bridge.bus, {3: [("pause",)]})

    class Signals(Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            bridge.trainer.commands.ends_pause = self.signalled(bridge.trainer.commands.ends_pause)

        def signalled(self, ends: Any) -> Any:
            def signalled() -> bool:
                os.kill(os.getpid(), signal.SIGTERM)  # while the run is paused
                return bool(ends())

            return signalled

    with pytest.raises(SystemExit):
        fit(tmp_path, bridge, Signals())

    assert bridge.trainer.iter == 3


def test_commands_are_lost_in_copies(make_bridge: MakeBridge) -> None:
    """A bridge with a command of the program refuses to be copied, and says what to do."""
    bridge = make_bridge()
    bridge.command(send_command)

    with pytest.raises(
        TypeError,
        match=r"and send_command was given to it: let a Hook in hooks=",
    ):
        pickle.dumps(bridge)
