"""Ask Slurm to queue this job again, once a signal has ended its run."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess

logger = logging.getLogger("eventloop")

TIMEOUT_SECONDS = 20.0
"""The longest wait for `scontrol`. torchrun kills a rank 30 s after the first one has exited."""

_requested: set[str] = set()
"""The jobs that this process has asked Slurm to queue again."""


def slurm_job() -> str:
    """Return the Slurm job of this process as `scontrol` takes it, such as 7 or 7_2; "" outside Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{array}_{task}" if job and array and task else job


def warn_if_impossible() -> None:
    """Log a warning at the start of a run that Slurm could not queue again."""
    if not slurm_job():
        logger.warning(
            "requeue=True has no effect: SLURM_JOB_ID is not set, so this process is no part of a Slurm job"
        )
    elif shutil.which("scontrol") is None:
        logger.warning(
            "requeue=True has no effect: there is no scontrol on PATH (a container has the host's only if it "
            "is mounted), so the job could not be queued again after a signal"
        )


def requeue(rank: int, world_size: int, *, can_resume: bool) -> None:
    """Run `scontrol requeue` for this job, on one of its processes and at most once, and log the outcome.

    Slurm's own number of the process decides if this is the only rank. Several ranks are numbered by torch:
    all those that one torchrun has started have the same SLURM_PROCID, and rank 0 may be on any host.

    Args:
        rank, world_size: the process's rank in torch's process group, and the number of ranks.
        can_resume: whether there is a checkpoint from which the job could go on.
    """
    job = slurm_job()
    number = "" if world_size > 1 else os.environ.get("SLURM_PROCID", "")
    if not job or (number or str(rank)) != "0" or job in _requested:
        return
    if not can_resume:
        logger.warning(
            "Slurm job %s is not queued again: the run has saved no checkpoint to resume from, and would "
            "begin again",
            job,
        )
        return
    _requested.add(job)
    start = f"restart {count}" if (count := os.environ.get("SLURM_RESTART_COUNT")) else "the first start"
    code, output = _run(["scontrol", "requeue", job])
    level, outcome = (logging.INFO, "is") if code == "0" else (logging.WARNING, "is not")
    text = "Slurm job %s %s queued again after %s: scontrol requeue: exit code %s, output %r"
    logger.log(level, text, job, outcome, start, code, output)


def _run(command: list[str]) -> tuple[str, str]:
    """Return the exit code and the output of a command in one line; "none" and the error if it has none."""
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "none", str(error)
    return str(ran.returncode), " ".join(ran.stdout.decode(errors="replace").split())
