"""Resume on two ranks while their directories differ or change; one of the ranks of test_one_checkpoint.py.

Each case has a folder of its own. Where the ranks see different disks, each is in a folder of its own within it,
and the same relative path leads elsewhere. What happened on this rank is printed as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eventloop import Trainer
from eventloop.checkpoint import directory, save_checkpoint, store
from eventloop.checkpoint.manifest import Label
from eventloop.hooks import CheckpointHook, EarlyStoppingHook
from eventloop.resume import choice

RANK = int(sys.argv[1])
RUN = Path("run")
HIDDEN = RUN / ".iter_4.999-1.tmp"


def make(work_dir: Path | None = RUN, *, width: int = 3, alone: bool = False, seed: int = 0) -> Trainer:
    """Return a trainer whose rank has random numbers of its own."""
    torch.manual_seed(seed)
    model = nn.Linear(2, width) if alone else DistributedDataParallel(nn.Linear(2, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 * seed + RANK)
    batch = torch.ones(4, 2), torch.tensor([0, 1, 2, 0]) % width
    return Trainer(
        model,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        train_loader=[batch] * 4,
        val_loader=[batch],
        schedulers=[torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        max_iters=4,
        val_interval=3,
        hooks=[CheckpointHook(interval=1, save_best="accuracy"), EarlyStoppingHook("accuracy", patience=9)],
        work_dir=work_dir,
    )


def bits(trainer: Trainer) -> str:
    """Return a digest of everything that a resume would change, of this rank."""
    digest = hashlib.sha256()
    for value in (
        *trainer.model.state_dict().values(),
        *(value for state in trainer.optimizer.state.values() for value in state.values()),
        torch.get_rng_state(),
    ):
        digest.update(value.detach().numpy().tobytes())
    hooks = [hook.state_dict() for hook in trainer.hooks if hook.stateful]
    schedulers = [scheduler.state_dict() for scheduler in trainer.schedulers]
    rates = [{**group, "params": None} for group in trainer.optimizer.param_groups]
    rest = [trainer.iter, trainer.epoch, trainer.metrics.iter, schedulers, rates, hooks]
    digest.update(repr(rest).encode())
    return digest.hexdigest()


def weights(trainer: Trainer) -> str:
    """Return a digest of the weights."""
    values = [value.numpy().tobytes() for value in trainer.model.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()


def outcome(trainer: Trainer, call: Callable[[], object]) -> dict[str, Any]:
    """Return what became of the call, and of the trainer."""
    before, error, path = bits(trainer), None, None
    try:
        path = call()
    except Exception as raised:
        error = [type(raised).__name__, str(raised), getattr(raised, "__notes__", [])]
    return {
        "path": path and str(path),
        "error": error,
        "iter": trainer.iter,
        "weights": weights(trainer),
        "unchanged": bits(trainer) == before,
    }


def await_file(path: Path) -> None:
    """Wait until the other rank has made a file."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def complete_once_scanned() -> None:
    await_file(Path("scanned"))
    HIDDEN.rename(RUN / "iter_4")


def renamed_between_the_scans() -> dict[str, Any]:
    """Once rank 0 has scanned, rank 1 completes iter_4, and scans after that if it scans at all: case C5."""
    trainer, scan = make(seed=7), directory.scan

    def scan_in_turn(*places: Any) -> Any:
        if RANK:
            await_file(RUN / "iter_4")
        found = scan(*places)
        Path("scanned").touch()
        await_file(RUN / "iter_4")
        return found

    setattr(store, "scan", scan_in_turn)  # noqa: B010  # it is directory's
    if RANK:
        threading.Thread(target=complete_once_scanned).start()
    try:
        return outcome(trainer, trainer.resume)
    finally:
        setattr(store, "scan", scan)  # noqa: B010


def renamed_before_rank_0_looks() -> dict[str, Any]:
    """Rank 1 has called resume when iter_4 is completed, and rank 0 calls it after."""
    trainer = make(seed=7)
    if RANK == 0:
        HIDDEN.rename(RUN / "iter_4")
    return outcome(trainer, trainer.resume)


def replaced_while_read(path: str) -> dict[str, Any]:
    """Once rank 0 has read iter_3, a saver removes it, because iter_4 has become durable."""
    trainer, read = make(seed=7), store.read_small_part

    def read_late(place: Any, **options: Any) -> Any:
        if HIDDEN.exists():
            HIDDEN.rename(RUN / "iter_4")
            shutil.rmtree(RUN / "iter_3")
        return read(place, **options)

    if RANK:
        setattr(choice, "read_small_part", read_late)  # noqa: B010  # it is store's
    try:
        return outcome(trainer, lambda: trainer.resume(path))
    finally:
        setattr(choice, "read_small_part", read)  # noqa: B010


def on_two_disks(change: Callable[[], object]) -> dict[str, Any]:
    """Each rank is in a folder of its own, with a copy of the run; rank 1's is changed."""
    if RANK:
        change()
    trainer = make(seed=7)
    return outcome(trainer, trainer.resume)


def other_shapes() -> dict[str, Any]:
    """Rank 1 has a model of another width; DistributedDataParallel would refuse it earlier."""
    trainer = make(seed=7, width=2 if RANK else 3, alone=True)
    return outcome(trainer, trainer.resume)


def flip_a_bit() -> None:
    payload = RUN / "iter_3" / "state.pth"
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)


def save_another() -> None:
    state = store.load_checkpoint(RUN / "iter_3")
    state["state_dict"]["weight"] += 1
    save_checkpoint(state, RUN / "iter_3", Label(sequence=9))


def with_handler(event: str, handler: Callable[[Trainer], object], method: str = "resume") -> dict[str, Any]:
    """A handler, on rank 1 alone, changes or refuses what is loaded."""
    trainer = make(seed=7)
    if RANK:
        trainer.bus.subscribe(lambda trainer, event: handler(trainer), event)
    return outcome(trainer, lambda: getattr(trainer, method)("auto"))


def spoil(trainer: Trainer) -> None:
    assert trainer.checkpoint is not None
    trainer.checkpoint["state_dict"]["weight"][0, 0] += 1


class OnFullHost(torch.Tensor):
    """A weight that cannot be hashed, because there is no memory for its copy on the host."""

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        raise RuntimeError("not enough memory on this rank")


def fill_the_host(trainer: Trainer) -> None:
    assert trainer.checkpoint is not None
    weights = trainer.checkpoint["state_dict"]
    weights["weight"] = weights["weight"].as_subclass(OnFullHost)


def refuse(trainer: Trainer) -> None:
    raise ValueError("not on this rank")


def refused_by_a_hook() -> dict[str, Any]:
    """The last hook of rank 1 raises for its state, when every other part but the weights is loaded."""
    trainer = make(seed=7)
    stopping = next(hook for hook in trainer.hooks if isinstance(hook, EarlyStoppingHook))
    if RANK:
        stopping.load_state_dict = lambda state: refuse(trainer)  # type: ignore[method-assign]
    return outcome(trainer, trainer.resume)


def wrong_argument() -> dict[str, Any]:
    """Rank 1 alone is given a value that is refused."""
    trainer: Any = make(seed=7)
    return outcome(trainer, lambda: trainer.resume("auto", "no" if RANK else "keep"))


def no_checkpoint() -> dict[str, Any]:
    if RANK == 0:
        shutil.rmtree(RUN)
    dist.barrier()
    trainer = make(seed=7)
    return outcome(trainer, trainer.resume)


def loaded(path: str) -> dict[str, Any]:
    """Weights alone; between the looks of the ranks the best checkpoint is another one."""
    trainer = make(seed=7)
    return outcome(trainer, lambda: trainer.load_checkpoint(path))


def loaded_on_rank_0_alone() -> dict[str, Any]:
    """A path is loaded without the other rank, which does something else meanwhile."""
    trainer = make(seed=7)
    return outcome(trainer, lambda: trainer.load_checkpoint(RUN / "iter_2") if RANK == 0 else None)


def new_directory(prepare: Callable[[], object]) -> dict[str, Any]:
    """The directory of a run is chosen by rank 0; one rank cannot create it."""
    prepare()
    try:
        return {"path": str(make(None).work_dir)}
    except Exception as error:
        return {"error": [type(error).__name__, str(error)]}


def block(rank: int) -> None:
    if rank == RANK:
        Path("runs").write_text("a file")


def other_clock() -> None:
    time.strftime = lambda *_: f"of_rank_{RANK}"


CASES: dict[str, tuple[bool, Callable[[], dict[str, Any]]]] = {  # whether each rank has a disk of its own
    "renamed": (False, renamed_between_the_scans),
    "renamed before": (False, renamed_before_rank_0_looks),
    "replaced": (False, lambda: replaced_while_read("auto")),
    "replaced by name": (False, lambda: replaced_while_read("iter_3")),
    "none": (False, no_checkpoint),
    "no checkpoint there": (True, lambda: on_two_disks(lambda: shutil.rmtree(RUN))),
    "damaged there": (True, lambda: on_two_disks(flip_a_bit)),
    "another one there": (True, lambda: on_two_disks(save_another)),
    "other shapes": (False, other_shapes),
    "spoiled": (False, lambda: with_handler("after_load_checkpoint", spoil)),
    "spoiled weights": (False, lambda: with_handler("after_load_checkpoint", spoil, "load_checkpoint")),
    "no memory": (False, lambda: with_handler("after_load_checkpoint", fill_the_host)),
    "refused": (False, lambda: with_handler("after_load_checkpoint", refuse)),
    "refused by a hook": (False, refused_by_a_hook),
    "argument": (False, wrong_argument),
    "best": (False, lambda: loaded("best")),
    "best refused": (False, lambda: with_handler("after_load_checkpoint", refuse, "load_checkpoint")),
    "alone": (False, loaded_on_rank_0_alone),
    "directory": (False, lambda: new_directory(other_clock)),
    "no directory": (True, lambda: new_directory(lambda: block(0))),
    "no directory there": (True, lambda: new_directory(lambda: block(1))),
}


def prepare(source: Path, name: str, *, apart: bool) -> None:
    """Copy the run for a case, and enter its folder; iter_4 is not completed yet."""
    case = Path(name.replace(" ", "_"))
    if RANK == 0:
        for folder in [case / "0", case / "1"] if apart else [case]:
            shutil.copytree(source / RUN, folder / RUN)
            (folder / RUN / "iter_4").rename(folder / HIDDEN)
    dist.barrier()
    os.chdir(case / str(RANK) if apart else case)


def main() -> None:
    torch.set_num_threads(1)
    socket.gethostname = lambda: "ab"[RANK]
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    home = Path.cwd()
    trained = make(home / "source" / RUN)
    trained.train()
    trained.close()
    dist.barrier()
    said = {}
    strftime = time.strftime
    for name, (apart, case) in CASES.items():
        prepare(home / "source", name, apart=apart)
        said[name] = case()
        time.strftime = strftime
        os.chdir(home)
        dist.barrier()
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
