"""A Slurm job whose run a signal has ended is queued again, once, when it can be resumed."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.forked import ROOT, Forked
from tests.support.signals import send_in
from tests.support.trainers import MakeTrainer

PROGRAM = """
import logging, os, signal, sys, torch
from eventloop import Trainer

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
torch.set_num_threads(1)
how = sys.argv[1]
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    torch.distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("rendezvous"),
        rank=rank, world_size=ranks)
if how == "own handler":
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
saving = {"no checkpoint": None, "left": {"interval": 1, "by_epoch": False}}.get(how, {})
model = torch.nn.Linear(1, 1)
trainer = Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), max_iters=8, work_dir="run",
    train_step=lambda trainer, batch: model(batch).sum(), train_loader=[torch.ones(1, 1)] * 8,
    val_loader=[torch.ones(1, 1)] * 8, val_step=lambda trainer, batch: {"loss": 1.0}, sanity_val=0,
    default_hooks={"preemption": {"requeue": True}, "checkpoint": saving})

def wait(event):
    if rank == 0:
        print("ready", flush=True)
        sys.stdin.readline()
if how == "error":
    trainer.bus.subscribe(lambda event: 1 / 0, "after_train", name="fails")
if how == "resumed":
    trainer.resume("auto")
at = "before_train" if how == "resumed" else "after_train_iter"
if how not in ("completed", "val"):
    trainer.bus.subscribe(wait, at, once=True)

if how == "left":
    for epoch in trainer.epochs():
        for batch in trainer.batches(trainer.train_loader):
            trainer.outputs = {"loss": model(batch).sum()}
            if trainer.asked_to_stop:
                break
        break
    sys.exit(5)
try:
    trainer.train()
finally:
    open(f"rank {rank} has left", "w").close()
if how == "val":
    trainer.bus.subscribe(wait, "before_val_iter", once=True)
    trainer.val()
if how == "own handler":
    trainer.bus.subscribe(lambda event: os.kill(os.getpid(), signal.SIGTERM), "after_train_iter", once=True)
    trainer.train()
"""

SCONTROL = """#!/bin/sh
echo "$@" >> asked
ls -d run/iter_* >> found
for second in $RANKS_MAY_LEAVE; do [ -e "rank 1 has left" ] || sleep 1; done
[ ! -e "rank 1 has left" ] || touch alone
echo "so it"; echo "is"
exit CODE
"""


def install_scontrol(folder: Path, code: int) -> None:
    """Write a `scontrol` that leaves its arguments in the file `asked`, and the checkpoints it saw in `found`."""
    path = folder / "bin" / "scontrol"
    path.parent.mkdir(exist_ok=True)
    path.write_text(SCONTROL.replace("CODE", str(code)))
    path.chmod(0o755)


def start(folder: Path, how: str, code: int | None, **variables: str) -> Forked:
    """Start PROGRAM, with a `scontrol` on PATH that ends with `code`; None for no `scontrol`."""
    if code is not None:
        install_scontrol(folder, code)
    slurm = {"SLURM_JOB_ID": "77", **variables}
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo"}
    return Forked(
        ["-c", PROGRAM, how],
        cwd=folder,
        env={**environment, **{k: v for k, v in slurm.items() if v}},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end(process: Forked, signum: int | None = signal.SIGTERM) -> tuple[int, str]:
    """Send a signal once the process waits for it; return the exit code and what the log has of a requeue."""
    try:
        if signum is not None:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signum)
        _, log = process.communicate("go on\n", timeout=60)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, "\n".join(line for line in log.splitlines() if "queue" in line)


def calls(folder: Path) -> list[str]:
    """The arguments of each call of `scontrol`."""
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


ARRAY = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "variables", "job", "start_"),
    [
        (signal.SIGTERM, {"SLURM_PROCID": "0", "SLURM_RESTART_COUNT": "2"}, "77", "restart 2"),
        (signal.SIGUSR1, ARRAY, "70_3", "the first start"),
    ],
)
def test_a_job_is_queued_again(
    tmp_path: Path, signum: int, variables: dict[str, str], job: str, start_: str
) -> None:
    """`scontrol requeue` has the job, or the task of its array, once the checkpoint is there. The exit code is the
    signal's, and one line of the log has the outcome."""
    code, log = end(start(tmp_path, "trains", 0, **variables), signum)

    assert (code, calls(tmp_path)) == (128 + signum, [f"requeue {job}"])
    assert (tmp_path / "found").read_text() == "run/iter_1\n"
    assert log == (
        f"INFO Slurm job {job} is queued again after {start_}: scontrol requeue: exit code 0, output 'so it is'"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "signum", "variables", "code"),
    [
        ("trains", signal.SIGTERM, {"SLURM_PROCID": "1"}, 143),  # another task of the job
        ("completed", None, {}, 0),
        ("trains", signal.SIGINT, {}, -signal.SIGINT),
        ("error", signal.SIGTERM, {}, 1),
    ],
)
def test_a_job_is_left_alone(
    tmp_path: Path, how: str, signum: int | None, variables: dict[str, str], code: int
) -> None:
    """By all processes but one, after a run that no signal ended, after Ctrl-C and after an error."""
    assert end(start(tmp_path, how, 0, **variables), signum) == (code, "")
    assert calls(tmp_path) == []


@pytest.mark.slow
def test_without_a_checkpoint(tmp_path: Path) -> None:
    """A job that would begin again is not queued, and the log says why."""
    code, log = end(start(tmp_path, "no checkpoint", 0))

    assert (code, calls(tmp_path)) == (143, [])
    assert log.startswith("WARNING Slurm job 77 is not queued again: the run has saved no checkpoint")


@pytest.mark.slow
def test_an_evaluation_after_a_training(tmp_path: Path) -> None:
    """A signal in the evaluation that follows the training queues the job again: the checkpoint is still there."""
    assert end(start(tmp_path, "val", 0))[0] == 143
    assert calls(tmp_path) == ["requeue 77"]


@pytest.mark.slow
def test_a_loop_that_was_left(tmp_path: Path) -> None:
    """A hand-written loop that breaks at the signal is queued again, before the process dies of the signal."""
    assert end(start(tmp_path, "left", 0))[0] == -signal.SIGTERM
    assert calls(tmp_path) == ["requeue 77"]


@pytest.mark.slow
def test_a_resumed_run_before_its_first_save(tmp_path: Path) -> None:
    """It can be resumed again from where it was resumed, so the job is queued again at each of its starts."""
    end(start(tmp_path, "trains", 0))

    assert end(start(tmp_path, "resumed", 0))[0] == 143
    assert calls(tmp_path) == ["requeue 77"] * 2


def test_a_run_within_a_run(
    make_trainer: MakeTrainer, default_handlers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outer run is the one that asks: when the inner one ends, it has not saved yet."""
    install_scontrol(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    hooks = {"preemption": {"requeue": True}}
    inner = make_trainer(work_dir=tmp_path / "inner", default_hooks=hooks)
    outer = make_trainer(work_dir=tmp_path / "run", default_hooks=hooks)
    send_in(inner, "after_train_iter", 2)
    outer.bus.subscribe(lambda event: inner.train(), "after_train_iter", once=True, name="nested")

    with pytest.raises(SystemExit, match="143"):
        outer.train()

    assert calls(tmp_path) == ["requeue 78"]
    assert (tmp_path / "found").read_text() == "run/iter_1\n"


@pytest.mark.slow
def test_a_second_signal_of_one_start(tmp_path: Path) -> None:
    """A program whose own handler lets it train on asks only once."""
    code, _ = end(start(tmp_path, "own handler", 0))

    assert (code, calls(tmp_path)) == (0, ["requeue 77"])


@pytest.mark.slow
def test_one_of_several_ranks(tmp_path: Path) -> None:
    """All ranks of one torchrun have the same SLURM_PROCID, and rank 0 may be on any host. It asks while the other ranks
    are still there: srun and torchrun may kill it when one has exited."""
    variables = {"WORLD_SIZE": "2", "SLURM_PROCID": "1", "RANKS_MAY_LEAVE": "1"}
    processes = [start(tmp_path, "trains", 0, RANK=str(rank), **variables) for rank in range(2)]
    try:
        codes = [end(processes[0])[0], end(processes[1], None)[0]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    assert (codes, calls(tmp_path)) == ([143, 143], ["requeue 77"])
    assert not (tmp_path / "alone").exists()


MISSING = "WARNING requeue=True has no effect: there is no scontrol on PATH"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "outcome", "earlier"),
    [
        (1, "exit code 1, output 'so it is'", []),
        (None, """exit code none, output "[Errno 2] No such file or directory: 'scontrol'\"""", [MISSING]),
    ],
)
def test_scontrol_fails(tmp_path: Path, code: int | None, outcome: str, earlier: list[str]) -> None:
    """A missing or failing `scontrol` is a warning, and the exit code stays the signal's. A missing one is found at the
    start of the run already."""
    returncode, log = end(start(tmp_path, "trains", code))
    *before, last = log.splitlines()

    assert returncode == 143
    assert (
        last == f"WARNING Slurm job 77 is not queued again after the first start: scontrol requeue: {outcome}"
    )
    assert [line[: len(MISSING)] for line in before] == earlier
