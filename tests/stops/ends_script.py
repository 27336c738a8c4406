"""One of the two ranks of test_ranks_end.py: which of them waits for the other when a signal has ended their run.

Arguments: the rank, a rendezvous file. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from eventloop import Trainer

RANK = int(sys.argv[1]) if __name__ == "__main__" else 0
SAID: dict[str, Any] = {}


def run(name: str, rank: int, act: Callable[[], None], signum: int = signal.SIGTERM) -> BaseException | None:
    """Train until rank 0 gets a signal; one rank does something at the end. Returns how the run ended, and leaves a file
    when it has."""
    model = nn.Linear(2, 2)
    trainer = Trainer(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=F.cross_entropy,
        max_epochs=1,
        train_loader=[(torch.ones(2, 2), torch.tensor([0, 1]))] * 4,
        work_dir=Path("runs") / name,
        default_hooks={"garbage_collection": None, "checkpoint": None},
    )
    if RANK == 0:
        trainer.bus.subscribe(lambda event: os.kill(os.getpid(), signum), "after_train_iter", once=True)
    if rank == RANK:
        trainer.bus.subscribe(lambda event: act(), "after_run", priority="LOWEST", name="acts")
    try:
        trainer.train()
    except BaseException as ended:
        Path(f"{name} {RANK}").touch()
        return ended
    return None


def comes(path: str, seconds: float) -> bool:
    """Whether a file is there before so many seconds have passed."""
    until = monotonic() + seconds
    while not (found := Path(path).exists()) and monotonic() < until:
        sleep(0.001)
    return found


def meeting() -> None:
    """Rank 0 takes longer to close than rank 1."""
    ended = run("meeting", 0, lambda: SAID.update(left_alone=comes("meeting 1", 0.3)))
    SAID["code"] = ended.code if isinstance(ended, SystemExit) else None


def interrupt_again() -> None:
    """To rank 0, once it waits for rank 1."""
    main, until = threading.main_thread().ident or 0, monotonic() + 20
    while sys._current_frames()[main].f_code.co_name != "wait_for_end_of_run" and monotonic() < until:
        sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)


def interrupted() -> None:
    """Rank 1 does not come to its end before rank 0 has left."""
    if RANK == 0:
        threading.Thread(target=interrupt_again, daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    ended = run("interrupted", 1, lambda: SAID.update(left=comes("interrupted 0", 20)), signal.SIGINT)
    SAID["interrupted"] = type(ended).__name__, signal.getsignal(signal.SIGINT) == before


def gone() -> None:
    """Rank 1 is killed at its end."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("eventloop").addHandler(handler)

    def print_found() -> None:
        sys.stdout.write(json.dumps(SAID))
        sys.stdout.flush()
        os._exit(0)

    ended = run("gone", 1, print_found)
    SAID["gone"] = type(ended).__name__, told


def main() -> None:
    """All of them, in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    for part in (meeting, interrupted, gone):
        part()
    sys.stdout.write(json.dumps(SAID))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
