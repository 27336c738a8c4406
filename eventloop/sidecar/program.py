"""Run an evaluator that follows a training, as the program of the child process that `child` starts."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import torch

from eventloop.processes.launch import END_SIGNALS
from eventloop.sidecar.evaluator import Evaluator, lower_priority, owning_evaluations
from eventloop.util.errors import WorkDirInUseError
from eventloop.util.terminal import print_line


def main() -> int:
    """Follow the run named on the command line; return the exit code, 2 if it has another live evaluator."""
    # Ctrl-C and a job scheduler's SIGTERM reach the whole process group; the training kills this process
    for signum in END_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    lower_priority()
    run, build, device, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)  # as in the training, because sums depend on the number of threads
    try:
        with owning_evaluations(Path(run)):
            Evaluator(Path(run), build, device=device, show=print_line).run(follow=True)
    except WorkDirInUseError as error:
        print_line(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
