"""What each of two ranks does with damaged and hostile checkpoints; `test_sharded_damage` starts it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from eventloop import Trainer
from eventloop.checkpoint.commit import sealed
from eventloop.checkpoint.manifest import FileEntry, encode_body, read_manifest
from eventloop.hooks import CheckpointHook
from tests.checkpoint.sharded_ranks import Net, Rank
from tests.cli.saved_runs import checkpoints, flip

NEWEST, FORMER = "iter_9", "iter_6"
FILES = (
    "manifest.json",
    "index.json",
    ".metadata",
    "state.pth",
    "rank_0.pth",
    "rank_1.pth",
    "__0_0.distcp",
    "__1_0.distcp",
)


def cut(path: Path) -> None:
    """Remove the last byte."""
    os.truncate(path, path.stat().st_size - 1)


def exchange(path: Path) -> None:
    """Exchange the files of both ranks."""
    other = path.with_name(path.name.replace("0", "1", 1))
    path.rename(path.with_suffix(".kept"))
    other.rename(path)
    path.with_suffix(".kept").rename(other)


CASES: dict[str, tuple[str, Callable[[Path], object]]] = {
    f"{what} {name}": (name, damage)
    for what, damage in (("flip", flip), ("cut", cut), ("unlink", Path.unlink))
    for name in FILES
}
CASES |= {f"exchange {name}": (name, exchange) for name in ("rank_0.pth", "__0_0.distcp")}


class Evil:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def resealed(path: Path) -> None:
    """Write the right hashes of all files into a manifest."""
    manifest = read_manifest(path)
    contents = {name: (path / name).read_bytes() for name in manifest.files}
    files = {name: FileEntry(len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in contents.items()}
    body = encode_body(msgspec.structs.replace(manifest, files=files))
    (path / "manifest.json").write_bytes(sealed("manifest", body))


def edit_index(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the first tensor with two chunks in an index."""
    index = msgspec.json.decode((path / "index.json").read_bytes())
    edit(index["state_dict.one.weight"])
    (path / "index.json").write_bytes(msgspec.json.encode(index))


def edit_state(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the small part of a state."""
    state = torch.load(path / "state.pth", weights_only=True)
    edit(state)
    torch.save(state, path / "state.pth")


def chunk(number: int, value: object) -> Callable[[Path], None]:
    """Change one field of the first chunk."""
    return lambda path: edit_index(path, lambda entry: entry["chunks"][0].__setitem__(number, value))


def entry(key: str, value: object) -> Callable[[Path], None]:
    """Change one field of a tensor's description."""
    return lambda path: edit_index(path, lambda each: each.update({key: value}))


def evil(name: str) -> Callable[[Path], None]:
    """Replace a file by a pickle that would run code, in the form of torch.save but for `.metadata`."""

    def write(path: Path) -> None:
        if name == ".metadata":
            (path / name).write_bytes(pickle.dumps(Evil(path.with_name("ran"))))
        else:
            torch.save(Evil(path.with_name("ran")), path / name)

    return write


WEIGHTS_ARE_RIGHT = {"rank_0.pth is a list", "rank_1.pth is a list"}
"""The hostile checkpoints from which weights alone can be loaded."""


def huge(path: Path) -> None:
    """Describe a tensor that no memory holds, in both files alike."""
    shape = [2**40, 2**20]
    edit_index(path, lambda each: each.update(shape=shape, chunks=[[[0, 0], shape, "__0_0.distcp", 0, 9]]))
    edit_state(
        path, lambda state: state["state_dict"].update({"one.weight": torch.empty(shape, device="meta")})
    )


HOSTILE: dict[str, Callable[[Path], object]] = {
    "pickle in state.pth": evil("state.pth"),
    "pickle in rank_0.pth": evil("rank_0.pth"),
    "pickle in rank_1.pth": evil("rank_1.pth"),
    "pickle in a shard": evil("__0_0.distcp"),
    "path outside": chunk(2, "../x"),
    "absolute path": chunk(2, "/etc/passwd"),
    "a file of no shards": chunk(2, "epoch_1"),
    "state.pth as a shard": chunk(2, "state.pth"),
    "huge offset": chunk(3, 2**62),
    "beyond 64 bits": chunk(3, 2**70),
    "negative offset": chunk(3, -1),
    "huge length": chunk(4, 2**62),
    "no length": chunk(4, 0),
    "half an archive": chunk(4, 40),
    "chunk outside of the tensor": chunk(0, [2**40, 0]),
    "negative place": chunk(0, [-1, 0]),
    "chunk of other dimensions": chunk(1, [9]),
    "larger chunk": chunk(1, [17, 4]),
    "missing chunk": lambda path: edit_index(path, lambda each: each["chunks"].pop()),
    "no chunk": entry("chunks", []),
    "repeated chunk": lambda path: edit_index(path, lambda e: e.update(chunks=e["chunks"][:1] * 2)),
    "unknown type": entry("dtype", "os"),
    "no type": entry("dtype", "Tensor"),
    "other type": entry("dtype", "int64"),
    "type without arithmetic": entry("dtype", "quint8"),
    "other shape": entry("shape", [16, 4]),
    "negative shape": entry("shape", [-17, 4]),
    "huge tensor": huge,
    "no index": lambda path: (path / "index.json").write_bytes(b"[]"),
    "deep index": lambda path: (path / "index.json").write_bytes(b"[" * 100_000),
    "empty index": lambda path: (path / "index.json").write_bytes(b"{}"),
    "a strange key": lambda path: (path / "index.json").write_bytes(
        (path / "index.json").read_bytes().replace(b'"state_dict.one.weight"', b'"state_dict.x"')
    ),
    "no optimizer groups": lambda path: edit_state(path, lambda s: s["optimizer"].pop("param_groups")),
    "optimizer is a list": lambda path: edit_state(path, lambda s: s.update(optimizer={"state": [1]})),
    "no meta": lambda path: edit_state(path, lambda s: s.pop("meta")),
    "meta is a list": lambda path: edit_state(path, lambda s: s.update(meta=[])),
    "names are numbers": lambda path: edit_state(
        path, lambda s: s.update(state_dict={1: s["state_dict"]["one.weight"]})
    ),
    "rank_1.pth is a list": lambda path: torch.save([1], path / "rank_1.pth"),
    "rank_0.pth is a list": lambda path: torch.save([1], path / "rank_0.pth"),
    "state.pth is a list": lambda path: torch.save([1], path / "state.pth"),
}


def sealed_evil(path: Path) -> None:
    """Write a hostile file that eventloop never reads."""
    evil(".metadata")(path)
    resealed(path)


def live(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of this rank's parts of all tensors."""
    assert isinstance(trainer.optimizer, torch.optim.Optimizer)
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    tensors = [*trainer.model.state_dict().values(), *states]
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


class Damager:
    """Damages one checkpoint of a run in turn, on rank 0, and tries it on all ranks."""

    def __init__(self, own: Rank, run: Path, trainer: Trainer) -> None:
        self.own, self.run, self.trainer = own, run, trainer
        self.warned: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warned.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("eventloop").addHandler(handler)

    @contextlib.contextmanager
    def damaged(self, damage: Callable[[Path], object]) -> Iterator[None]:
        """Damage the newest checkpoint, and bring it back."""
        path, kept = self.run / NEWEST, self.own.folder / "kept"
        if self.own.rank == 0:
            shutil.copytree(path, kept)
            damage(path)
        dist.barrier()
        yield
        dist.barrier()
        if self.own.rank == 0:
            shutil.rmtree(path)
            kept.rename(path)
        dist.barrier()

    def refusal(self, load: Callable[[], object]) -> str:
        """The error of a load that leaves all tensors of this rank as they were."""
        before, counter = live(self.trainer), self.trainer.iter
        try:
            load()
        except Exception as error:
            same = all(map(torch.equal, before, live(self.trainer))) and self.trainer.iter == counter
            return f"{type(error).__name__}: {error}" if same else f"changed by {error}"
        return "not refused"

    def damage(self, change: Callable[[Path], object]) -> dict[str, Any]:
        """What a resume by path and by name, and the command, say of a damaged checkpoint."""
        with self.damaged(change):
            said: dict[str, Any] = {
                "refused": self.refusal(lambda: self.trainer.resume(self.run / NEWEST)),
                "weights": self.refusal(lambda: self.trainer.load_checkpoint(self.run / NEWEST)),
            }
            self.warned.clear()
            try:
                said["auto"] = self.trainer.resume("auto").name
            except Exception as error:
                said["auto"] = f"{type(error).__name__}: {error}"
            said["warned"] = self.warned[:]
            if self.own.rank == 0:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    said["code"] = checkpoints(self.run, "--verify")
                said["listed"] = out.getvalue()
        return said

    def hostile(self, change: Callable[[Path], object]) -> list[str]:
        """What a resume and a load of weights say of a checkpoint with the right hashes."""

        def all_of_it(path: Path) -> None:
            change(path)
            resealed(path)

        with self.damaged(all_of_it):
            return [
                self.refusal(lambda: self.trainer.resume(self.run / NEWEST)),
                self.refusal(lambda: self.trainer.load_checkpoint(self.run / NEWEST)),
            ]


def read_so_far() -> int:
    """The bytes that this process has read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


class Large(Net):
    """Net, with some megabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 17)
        self.more = nn.Linear(700, 700)


def verified(own: Rank, damager: Damager) -> dict[str, Any]:
    """The bytes that a verification reads on this rank, and the size of the checkpoint."""
    trainer = own.build(own.folder / "large", CheckpointHook(), model=own.divided(Large()), max_epochs=1)
    trainer.train()
    path = own.folder / "large" / "epoch_1"
    if own.rank == 0:
        flip(path / "__0_0.distcp")
    dist.barrier()
    before = read_so_far()
    said = damager.refusal(lambda: trainer.resume(path))
    read = read_so_far() - before
    trainer.close()
    return {"read": read, "size": sum(each.stat().st_size for each in path.iterdir()), "said": said}


def damaged(kind: str, rank: int, rendezvous: str, folder: str) -> None:
    """Damage one checkpoint in each way."""
    own, run = Rank(kind, rank, rendezvous), Path(folder) / "run"
    trainer = own.build(run, CheckpointHook(interval=3, by_epoch=False))
    trainer.train()
    trainer.close()
    trainer = own.build(run, CheckpointHook(interval=3, by_epoch=False))
    trainer.resume(run / FORMER)
    damager = Damager(own, run, trainer)
    said: dict[str, Any] = {"damage": {}, "hostile": {}}
    for case, (name, change) in CASES.items():
        said["damage"][case] = damager.damage(lambda path: change(path / name))  # noqa: B023
    for case, hostile in HOSTILE.items():
        said["hostile"][case] = damager.hostile(hostile)
    with damager.damaged(sealed_evil):
        said["metadata"] = trainer.resume(run / NEWEST).name
    said["ran"] = (run / "ran").exists()
    said["verified"] = verified(own, damager)
    trainer.close()
    own.report(said)
