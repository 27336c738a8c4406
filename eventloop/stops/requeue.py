"""Put this Slurm job back into the queue after a signal has ended its run."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess

logger = logging.getLogger("eventloop")

TIMEOUT_SECONDS = 20.0
"""Seconds for which `scontrol` may run. torchrun kills all ranks 30 s after the first one has exited."""

_requested: set[str] = set()
"""The jobs for which this process has called `scontrol requeue`."""


def slurm_job() -> str:
    """Return the id of this process's Slurm job, "7", or "7_2" for a task of an array; "" outside Slurm."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{array}_{task}" if job and array and task else job


def warn_if_impossible() -> None:
    """Log a warning if `requeue` would have no effect: outside Slurm, or without `scontrol`."""
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

    With several ranks rank 0 does so: the ranks that one torchrun has started all have the same SLURM_PROCID.
    Without a process group it is the process with SLURM_PROCID 0.

    Args:
        rank, world_size: the process's rank in torch's process group, and the number of ranks.
        can_resume: whether there is a checkpoint from which the requeued job can resume.
    """
    job = slurm_job()
    slurm_number = "" if world_size > 1 else os.environ.get("SLURM_PROCID", "")
    is_first_process = (slurm_number or str(rank)) == "0"
    if not job or not is_first_process or job in _requested:
        return
    if not can_resume:
        logger.warning(
            "Slurm job %s is not queued again: the run has saved no checkpoint to resume from, and would "
            "begin again",
            job,
        )
        return
    _requested.add(job)
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    job_start = f"restart {restarts}" if restarts else "the first start"
    code, output = _run(["scontrol", "requeue", job])
    level, outcome = (logging.INFO, "is") if code == "0" else (logging.WARNING, "is not")
    text = "Slurm job %s %s queued again after %s: scontrol requeue: exit code %s, output %r"
    logger.log(level, text, job, outcome, job_start, code, output)


def _run(command: list[str]) -> tuple[str, str]:
    """Run a command, and return its exit code and its output in one line.

    If it cannot be started or takes too long, return "none" and the error.
    """
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return "none", str(error)
    return str(result.returncode), " ".join(result.stdout.decode(errors="replace").split())
