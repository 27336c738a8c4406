"""Commands to a training of Transformers: each is applied by the host's own means, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

WHY = "transformers or accelerate is not installed: pip install 'torch-eventloop[transformers]'"
pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("accelerate", reason=WHY)

from safetensors.torch import load_file
from transformers import TrainerCallback

from eventloop.bridges.transformers import EventLoopCallback
from tests.support.told import answers, outcomes, send_at
from tests.support.transformers_host import TinyModel, host, rows, same

pytestmark = [pytest.mark.usefixtures("no_thread_left"), pytest.mark.filterwarnings("ignore")]


class Rates(TrainerCallback):  # type: ignore[misc]
    """Keep the rate of each update."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(kwargs["optimizer"].param_groups[0]["lr"])


def linear(*factors: float) -> list[Any]:
    """The rates of the host's linear schedule over eight updates, times a factor in each."""
    return [pytest.approx(0.1 * (8 - step) / 8 * factor) for step, factor in enumerate(factors)]


def test_a_told_run(tmp_path: Path) -> None:
    """Notes, a pause and a stop are applied after their iteration; a rollback is refused by name."""
    bridge = EventLoopCallback()
    told = [("note", "hello"), ("rollback",), ("pause",), ("go",)]
    send_at(bridge.bus, {2: told, 3: [("stop", "enough")]})

    trainer = host(tmp_path, bridge)
    trainer.train()

    assert sorted(outcomes(tmp_path)) == sorted(
        [
            ("note", "applied", 2),
            ("rollback", "refused", 2),
            ("pause", "applied", 2),
            ("go", "applied", 2),
            ("stop", "applied", 3),
        ]
    )
    (refused,) = [each for each in answers(tmp_path) if each.outcome == "refused"]
    assert refused.reason.endswith("the loop of Transformers fetches its batches itself")
    assert (trainer.state.global_step, bridge.trainer.stop_reason) == (3, "enough")


def test_a_checkpoint_is_the_hosts(tmp_path: Path) -> None:
    """The answer has the folder from which the host resumes: it ends with the weights of the run that went on."""
    bridge = EventLoopCallback()
    send_at(bridge.bus, {3: [("checkpoint",)]})
    whole = host(tmp_path, bridge)
    whole.train()

    (answer,) = answers(tmp_path)
    assert answer.iteration == 3
    assert answer.result == {"path": str(tmp_path / "checkpoint-3")}
    resumed = host(tmp_path, EventLoopCallback())
    resumed.train(resume_from_checkpoint=answer.result["path"])
    assert same(resumed.model, whole.model)


def test_a_checkpoint_waits_for_the_end_of_a_pause(tmp_path: Path) -> None:
    """The host saves after its step, so a paused run refuses, and says what to do."""
    bridge = EventLoopCallback()
    send_at(bridge.bus, {3: [("pause",), ("checkpoint",), ("go",)]})

    host(tmp_path, bridge).train()

    refused = answers(tmp_path)[1]
    assert (refused.command, refused.outcome) == ("checkpoint", "refused")
    assert refused.reason.endswith("go first")


def test_a_steered_rate(tmp_path: Path) -> None:
    """The host's schedule, computed anew in each step, goes on in proportion, and after a resume too."""
    bridge, rates = EventLoopCallback(), Rates()
    send_at(bridge.bus, {2: [("set", {"lr*": 0.5})], 5: [("checkpoint",)], 6: [("set", {"lr": 0.001})]})
    trainer = host(tmp_path, bridge, rates, logging_steps=1)
    trainer.train()

    assert rates.found[:6] == linear(1, 1, 0.5, 0.5, 0.5, 0.5)
    assert rates.found[6:] == [pytest.approx(0.001), pytest.approx(0.0005)]
    logged = [each["learning_rate"] for each in trainer.state.log_history if "learning_rate" in each]
    assert logged[:6] == [*linear(1, 1, 0.5, 0.5, 0.5, 0.5)]

    again = Rates()
    host(tmp_path, EventLoopCallback(), again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))

    assert again.found == linear(1, 1, 1, 1, 1, 0.5, 0.5, 0.5)[5:]


def test_a_validation_changes_nothing(tmp_path: Path) -> None:
    """A validation by command answers with the host's metrics; weights and own evaluations are as if nobody had told."""
    found, logs = [], []
    for plan in ({}, {2: [("validate",)], 3: [("validate",), ("checkpoint",)]}):
        bridge = EventLoopCallback(work_dir=tmp_path / "attachment")
        send_at(bridge.bus, plan)
        options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": rows(8)}
        trainer = host(tmp_path, bridge, **options)
        trainer.train()
        found.append(trainer.model)
        logs.append([each["step"] for each in trainer.state.log_history if "eval_loss" in each])

    assert same(*found)
    assert logs == [[2, 4, 6, 8], [2, 2, 3, 4, 6, 8]]
    model = TinyModel()
    model.load_state_dict(load_file(tmp_path / "checkpoint-3" / "model.safetensors"))
    expected = host(tmp_path, model=model, eval_dataset=rows(8)).evaluate()
    assert answers(tmp_path / "attachment")[1].result["eval_loss"] == pytest.approx(expected["eval_loss"])


def test_a_validation_without_data_is_refused(tmp_path: Path) -> None:
    """A host without a data set to evaluate on says so."""
    bridge = EventLoopCallback()
    send_at(bridge.bus, {2: [("validate",)]})

    host(tmp_path, bridge).train()

    (answer,) = answers(tmp_path)
    assert (answer.outcome, answer.reason) == ("refused", "the Trainer of Transformers has no eval_dataset")


def test_an_evaluation_that_fails_is_refused(tmp_path: Path) -> None:
    """A validation that fails in the host's code is refused with its error, and the host trains on."""
    bridge = EventLoopCallback()
    send_at(bridge.bus, {2: [("validate",)]})
    plain = host(tmp_path)
    plain.train()
    told = host(tmp_path, bridge, eval_dataset=[{"inputs": torch.zeros(3), "labels": 0}])
    told.train()

    (answer,) = answers(tmp_path)
    assert answer.reason.startswith("it raised RuntimeError")
    assert same(told.model, plain.model)


def test_the_hosts_callbacks_see_a_validation(tmp_path: Path) -> None:
    """The host's own callbacks get `on_evaluate` for a validation by command."""
    bridge, seen = EventLoopCallback(), list[int]()
    send_at(bridge.bus, {2: [("validate",)]})

    class Watcher(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.global_step)

    host(tmp_path, bridge, Watcher(), eval_dataset=rows(8)).train()

    assert seen == [2]
