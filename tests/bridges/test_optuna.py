"""OptunaPruningHook: a pruned trial ends like a stopped run, and the study knows it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

optuna = pytest.importorskip(
    "optuna", reason="optuna is not installed: pip install 'torch-eventloop[optuna]'"
)

from optuna.trial import TrialState

from eventloop import Trainer
from eventloop.bridges import DrivenTrainer
from eventloop.bridges.optuna import OptunaPruningHook
from eventloop.checkpoint import find_checkpoints
from eventloop.events import AfterRun, AfterValEpoch, StopRequested
from eventloop.hooks import CheckpointHook, EarlyStoppingHook
from eventloop.writers import JSONLWriter, read_jsonl
from tests.ranks import run_ranks
from tests.support.process_support import until
from tests.support.signals import send
from tests.support.trainers import MakeTrainer, batches, build_trainer, collect, shuffled, tiny_model

Objective = Callable[[Any], float]


class PruneAt(optuna.pruners.BasePruner):  # type: ignore[misc,name-defined]
    """Prunes each trial at one step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.last_step == self._step)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Optuna's log goes to the handlers of the test, not to standard error."""
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    yield
    optuna.logging.disable_propagation()
    optuna.logging.enable_default_handler()


@pytest.fixture
def study() -> Any:
    """A study that prunes each trial at its second epoch."""
    return optuna.create_study(pruner=PruneAt(2))


def last_loss(trainer: Trainer) -> float:
    """The loss of the last validation, as an objective returns it."""
    last = trainer.bus.latest(AfterValEpoch)
    assert last is not None
    return last.metrics["loss"]


def objective(make_trainer: MakeTrainer, made: list[Trainer], **changes: Any) -> Objective:
    """An objective that trains for four epochs, and leaves its trainer in `made`."""

    def train(trial: Any) -> float:
        hooks = [OptunaPruningHook(trial, "loss"), *changes.get("hooks", [])]
        arguments = {"val_loader": batches(1), "max_epochs": 4, **changes, "hooks": hooks}
        made.append(make_trainer(**arguments))
        made[-1].train()
        return last_loss(made[-1])

    return train


def test_pruned_trial_ends_like_a_stopped_run(
    make_trainer: MakeTrainer, study: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The study has the trial as PRUNED at the completed epochs as steps. The run has its closing events with a reason and
    without an error, and nothing above INFO is logged."""
    made: list[Trainer] = []
    seen: list[list[Any]] = []

    def build(**arguments: Any) -> Trainer:
        trainer = make_trainer(**arguments)
        seen.append(collect(trainer, "stop_requested", "after_train", "after_run"))
        return trainer

    with caplog.at_level(logging.WARNING):
        study.optimize(objective(build, made), n_trials=1)

    (trial,), (trainer,) = study.trials, made
    assert trial.state == TrialState.PRUNED
    assert [*trial.intermediate_values] == [1, 2]
    assert trial.value == pytest.approx(last_loss(trainer))
    expected = f"pruned by Optuna: loss is {last_loss(trainer):g} at epoch 2"
    assert [event.reason for event in seen[0]] == [expected] * 3
    assert [event.error for event in seen[0] if isinstance(event, AfterRun)] == [None]
    assert caplog.records == []


def test_pruned_trial_loses_nothing(tmp_path: Path, study: Any) -> None:
    """The files of its writers are complete, its last checkpoint is saved, and its threads have ended."""
    before = set(threading.enumerate())
    made: list[Trainer] = []
    train = objective(
        lambda **arguments: build_trainer(tmp_path, **arguments),
        made,
        hooks=[CheckpointHook(interval=1)],
        writers=[JSONLWriter()],
    )

    study.optimize(train, n_trials=1)

    until(lambda: set(threading.enumerate()) <= before)
    lines = [line for line in read_jsonl(tmp_path / "metrics.jsonl") if line.get("mode") == "val"]
    assert len(lines) == 2
    assert {path.name for path in find_checkpoints(tmp_path)} == {"epoch_1", "epoch_2"}
    assert made[0].bus.closed
    assert [each for each in made[0].bus.stats() if each.dropped or each.failed or each.queued] == []


@pytest.mark.slow
def test_pruned_trial_is_resumed_to_the_same_end(
    make_trainer: MakeTrainer, tmp_path: Path, study: Any
) -> None:
    """A trainer without the hook resumes its checkpoint, and ends as a run that was not pruned."""

    def build(**changes: Any) -> Trainer:
        loaders = {"train_loader": shuffled(3), "val_loader": batches(1)}
        return make_trainer(**{**loaders, "max_epochs": 4, "hooks": [CheckpointHook(interval=3)], **changes})

    torch.manual_seed(3)
    whole = build(work_dir=tmp_path / "whole")
    whole.train()
    torch.manual_seed(3)
    pruned = objective(build, [], work_dir=tmp_path / "pruned", hooks=[CheckpointHook(interval=3)])
    study.optimize(pruned, n_trials=1)

    resumed = build(work_dir=tmp_path / "pruned")
    resumed.resume("auto")
    began_at = resumed.epoch
    resumed.train()

    assert (began_at, resumed.epoch) == (2, 4)
    states = [trainer.model.state_dict().values() for trainer in (whole, resumed)]
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_same_trainer_trains_on_after_it_was_pruned(make_trainer: MakeTrainer, study: Any) -> None:
    """A second `train()` goes on after the epoch; the trial is over, and is sent no report."""
    made: list[Trainer] = []
    study.optimize(objective(make_trainer, made), n_trials=1)

    made[0].train()

    assert made[0].epoch == 4
    assert [*study.trials[0].intermediate_values] == [1, 2]


def test_trial_that_is_not_pruned_is_complete(make_trainer: MakeTrainer) -> None:
    """Each validation of the training is reported, and those after it are not."""
    study = optuna.create_study(pruner=PruneAt(9))
    made: list[Trainer] = []
    train = objective(make_trainer, made)

    def train_and_validate(trial: Any) -> float:
        value = train(trial)
        made[0].val()
        return value

    study.optimize(train_and_validate, n_trials=1)

    assert study.trials[0].state == TrialState.COMPLETE
    assert [*study.trials[0].intermediate_values] == [1, 2, 3, 4]


def test_run_of_iterations_reports_completed_iterations(make_trainer: MakeTrainer) -> None:
    """Without epochs the step is the number of iterations."""
    study = optuna.create_study(pruner=PruneAt(4))
    made: list[Trainer] = []
    limits: dict[str, Any] = {"max_epochs": None, "max_iters": 8, "val_interval": 2}

    study.optimize(objective(make_trainer, made, **limits), n_trials=1)

    assert [*study.trials[0].intermediate_values] == [2, 4]
    assert made[0].stop_reason is not None
    assert made[0].stop_reason.endswith(" at iteration 4")


@pytest.mark.slow
def test_trials_of_one_process_share_sqlite(tmp_path: Path) -> None:
    """Trials that run on two threads at once report to a SQLite file, and each has its own end."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}")
    study = optuna.create_study(storage=storage, pruner=PruneAt(2))

    def train(trial: Any) -> float:
        trainer = build_trainer(
            tmp_path / str(trial.number),
            val_loader=batches(1),
            max_epochs=1 + trial.number % 2 * 3,
            hooks=[OptunaPruningHook(trial, "loss")],
            writers=[JSONLWriter()],
        )
        try:
            trainer.train()
        finally:
            trainer.close()
        return last_loss(trainer)

    study.optimize(train, n_trials=6, n_jobs=2)

    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED] * 3
    assert [len(trial.intermediate_values) for trial in study.trials] == [1, 2] * 3
    written = [read_jsonl(tmp_path / str(number) / "metrics.jsonl") for number in range(6)]
    assert [sum(line.get("mode") == "val" for line in lines) for lines in written] == [1, 2] * 3
    storage.engine.dispose()


def test_error_of_the_run_is_not_hidden(make_trainer: MakeTrainer, study: Any) -> None:
    """A run that fails after the pruner has spoken raises its error, and the trial has failed."""
    made: list[Trainer] = []

    def build(**arguments: Any) -> Trainer:
        trainer = make_trainer(**arguments)
        trainer.bus.subscribe(lambda event: 1 / 0, StopRequested, name="faulty")
        return trainer

    with pytest.raises(ZeroDivisionError):
        study.optimize(objective(build, made), n_trials=1)

    assert study.trials[0].state == TrialState.FAIL


@pytest.mark.parametrize("event", ["after_val_epoch", "after_run"])
def test_signal_ends_the_program(
    make_trainer: MakeTrainer, study: Any, default_handlers: None, event: str
) -> None:
    """A SIGTERM while a trial is pruned ends the sweep, as it ends any other run."""

    def build(**arguments: Any) -> Trainer:
        trainer = make_trainer(**arguments)
        trainer.bus.subscribe(
            lambda event: send(signal.SIGTERM),
            event,
            start=1 if event == "after_val_epoch" else 0,
            name="sends",
        )
        return trainer

    with pytest.raises(SystemExit, match="143"):
        study.optimize(objective(build, []), n_trials=2)

    assert len(study.trials) == 1


def test_early_stop_at_the_same_validation_is_pruned_too(make_trainer: MakeTrainer, study: Any) -> None:
    """The study decides, whichever hook asked for the stop first."""
    early = EarlyStoppingHook("loss", stopping_threshold=1e9)
    study = optuna.create_study(pruner=PruneAt(1))
    made: list[Trainer] = []

    study.optimize(objective(make_trainer, made, hooks=[early]), n_trials=1)

    assert (study.trials[0].state, made[0].epoch) == (TrialState.PRUNED, 1)


def test_hand_written_loop_is_pruned(make_trainer: MakeTrainer, study: Any) -> None:
    """The exception leaves the loop over the epochs."""

    def train(trial: Any) -> float:
        trainer = make_trainer(val_loader=batches(1), max_epochs=4, hooks=[OptunaPruningHook(trial, "loss")])
        for _ in trainer.epochs():
            for inputs, target in trainer.batches(batches(3)):
                trainer.outputs = {"loss": F.cross_entropy(trainer.model(inputs), target)}
        return last_loss(trainer)

    study.optimize(train, n_trials=1)

    assert study.trials[0].state == TrialState.PRUNED


def test_driven_loop_is_pruned(tmp_path: Path, study: Any) -> None:
    """The loop is asked to stop, and `end_run` raises."""
    stops: list[bool] = []

    def train(trial: Any) -> float:
        driven = DrivenTrainer(
            tiny_model(), max_epochs=4, hooks=[OptunaPruningHook(trial, "score")], work_dir=tmp_path
        )
        driven.begin_run()
        for _ in range(2):
            driven.begin_epoch(1)
            driven.begin_iter(batches(1)[0])
            driven.end_iter({"loss": torch.tensor(1.0)})
            driven.end_epoch()
            driven.begin_val()
            driven.end_val({"score": 0.5})
            stops.append(driven.stopping)
        driven.end_run()
        return 0.5

    study.optimize(train, n_trials=1)

    assert stops == [False, True]
    assert study.trials[0].state == TrialState.PRUNED


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("trial", "loss"), TypeError, "trial must be the trial .* got 'trial'"),
        ((None, 3), TypeError, "monitor must be the name of a metric, got 3"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, Any], error: type[Exception], message: str) -> None:
    """An error names the argument, and what came."""
    with pytest.raises(error, match=message):
        OptunaPruningHook(*arguments)


def test_study_of_several_objectives_is_refused() -> None:
    """Optuna prunes no trial with two objectives, so the hook says it where it is built."""
    trial = optuna.create_study(directions=["minimize", "maximize"]).ask()

    with pytest.raises(ValueError, match="trial must belong to a study of one objective, got one of 2"):
        OptunaPruningHook(trial, "loss")


@pytest.mark.parametrize(
    ("hook", "arguments", "message"),
    [
        (
            lambda trial: OptunaPruningHook(trial, "loss"),
            {},
            "needs a validation: give the Trainer a val_loader",
        ),
        (
            lambda trial: OptunaPruningHook(None, "loss"),
            {"val_loader": batches(1)},
            "trial on rank 0, .* got trial=None",
        ),
        (
            lambda trial: OptunaPruningHook(trial, "acc"),
            {"val_loader": batches(1)},
            "OptunaPruningHook.monitor='acc'. needs the metric 'acc', .* did you mean 'accuracy'",
        ),
    ],
)
def test_bad_trainer(
    make_trainer: MakeTrainer, study: Any, hook: Any, arguments: dict[str, Any], message: str
) -> None:
    """A trainer that could not report is refused where it is built."""
    with pytest.raises(ValueError, match=message):
        make_trainer(hooks=[hook(study.ask())], **arguments)


def test_validation_without_the_metric(make_trainer: MakeTrainer, study: Any) -> None:
    """A validation that does not report the metric is an error that suggests a name."""
    results = iter([{"acc": 0.5}, {"accuracy": 0.5}])
    trainer = make_trainer(
        val_loader=[torch.zeros(1)],
        val_step=lambda trainer, batch: next(results),
        sanity_val=0,
        hooks=[OptunaPruningHook(study.ask(), "acc")],
    )

    with pytest.raises(
        ValueError, match="monitors 'acc', which the validation does not report: known are accuracy"
    ):
        trainer.train()


# --- several ranks -----------------------------------------------------------------------------------------

RANKS = """
import json, sys, torch, optuna
import torch.distributed as dist
from pathlib import Path
from tests.bridges.test_optuna import PruneAt, batches, build_trainer
from eventloop.bridges.optuna import OptunaPruningHook

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
optuna.logging.set_verbosity(optuna.logging.WARNING)

def train(name, trial, fails=False):
    if fails and rank == 0:
        def lost(value, step):
            raise OSError("the storage is away")
        trial.report = lost
    trainer = build_trainer(Path(name), val_loader=batches(1), max_epochs=4, hooks=[OptunaPruningHook(trial, "loss")])
    try:
        trainer.train()
    finally:
        trainer.close()
        said[name] = [trainer.epoch, str(trainer.stop_reason)]

def attempt(name, trial, **options):
    try:
        train(name, trial, **options)
    except Exception as error:
        said[name] += [type(error).__name__, str(error)]

said = {}
study = optuna.create_study(storage="sqlite:///study.db", pruner=PruneAt(2)) if rank == 0 else None
attempt("pruned", study.ask() if rank == 0 else None)
attempt("lost", study.ask() if rank == 0 else None, fails=True)
if rank == 0:
    said["reported"] = [*study.trials[0].intermediate_values]
else:
    try:
        OptunaPruningHook(optuna.create_study().ask(), "loss").check(build_trainer(Path("bad"), val_loader=batches(1)))
    except ValueError as error:
        said["refused"] = str(error)
print(json.dumps(said))
"""


@pytest.mark.slow
def test_ranks_follow_rank_0(tmp_path: Path) -> None:
    """Rank 0 alone reports; all ranks stop at the same epoch and raise TrialPruned. An error of the study ends all ranks,
    and a rank with a trial of its own is refused."""
    first, second = run_ranks(RANKS, tmp_path)

    assert first["reported"] == [1, 2]
    for said in (first, second):
        assert said["pruned"][0] == 2
        assert said["pruned"][1].startswith("pruned by Optuna: loss is ")
        assert said["pruned"][2:] == ["TrialPruned", said["pruned"][1].removeprefix("pruned by Optuna: ")]
    assert first["lost"][2:] == ["OSError", "the storage is away"]
    assert second["lost"][2:] == [
        "RuntimeError",
        "rank 0 could not report to the Optuna study: OSError: the storage is away",
    ]
    assert "takes trial=None or a TorchDistributedTrial on rank 1" in second["refused"]
