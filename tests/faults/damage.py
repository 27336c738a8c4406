"""Checkpoints that are not what was saved, and what a live trainer has of them."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from eventloop import Trainer
from eventloop.checkpoint import CheckpointError, load_checkpoint
from eventloop.checkpoint.commit import MANIFEST, PAYLOAD
from tests.faults.operations import logged_faults
from tests.faults.training import expected, make_trainer, same, weights

FILES = (MANIFEST, PAYLOAD)


class Damaged:
    """Two checkpoints of a run, and a trainer that has gone on from them: whatever is done to the newer one, the
    trainer must not be touched by it.

    Args:
        directory: an empty one.
    """

    def __init__(self, directory: Path) -> None:
        self.run = directory / "run"
        make_trainer(self.run, max_iters=3, save_best=None).train()
        self.older, self.newer = self.run / "iter_2", self.run / "iter_3"
        self.trainer = make_trainer(self.run)
        self.trainer.resume(self.older)
        self.kept = directory / "kept"
        shutil.copytree(self.newer, self.kept)

    def restore(self) -> None:
        """The newer one is well again."""
        shutil.rmtree(self.newer)
        shutil.copytree(self.kept, self.newer)

    def check(self, *, automatic: bool, message: str | None = None) -> None:
        """The damage is found by all that load it by name, and nothing live is touched; `resume("auto")` takes the older
        one, and the log says why. The error says which checkpoint it is about, and has the message."""
        before, chance = everything(self.trainer), torch.get_rng_state()
        for load in (load_checkpoint, self.trainer.load_checkpoint, self.trainer.resume):
            with pytest.raises(CheckpointError, match=message) as caught:
                load(self.newer)
            assert str(self.newer) in str(caught.value)
        assert everything(self.trainer) == before, "a checkpoint that was refused has changed the trainer"
        assert torch.equal(torch.get_rng_state(), chance)
        if automatic:
            with logged_faults() as log:
                assert self.trainer.resume("auto") == self.older
            assert any("passed over" in line and self.newer.name in line for line in log), log
            assert same(weights(self.trainer), expected()[2])


def everything(trainer: Trainer) -> bytes:
    """Every bit of a trainer's model and optimizer, and its counters."""
    memory = io.BytesIO()
    torch.save(trainer.model.state_dict(), memory)
    torch.save(trainer.optimizer.state_dict(), memory)
    return memory.getvalue() + repr((trainer.iter, trainer.epoch, trainer.batch_idx)).encode()


# --- by chance -------------------------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random) -> str:
    """Turn one bit."""
    data, bit = bytearray(path.read_bytes()), chance.randrange(path.stat().st_size * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"bit {bit} of {path.name}"


def truncate(path: Path, chance: random.Random) -> str:
    """Cut it short."""
    length = chance.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"{path.name} cut to {length} bytes"


def append(path: Path, chance: random.Random) -> str:
    """Let something follow it."""
    more = chance.choice([b"\n", b" ", b"\0", chance.randbytes(chance.randint(1, 99))])
    path.write_bytes(path.read_bytes() + more)
    return f"{path.name} with {more!r} after it"


def overwrite(path: Path, chance: random.Random) -> str:
    """Put a page of zeros or of nothing in particular in it."""
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    length = min(chance.choice([16, 512]), len(data) - start)
    data[start : start + length] = chance.choice([bytes(length), chance.randbytes(length)])
    if data == path.read_bytes():
        return flip(path, chance)
    path.write_bytes(data)
    return f"{length} bytes of {path.name} from {start} on"


BY_CHANCE: tuple[Callable[[Path, random.Random], str], ...] = (flip, truncate, append, overwrite)


# --- on purpose ------------------------------------------------------------------------------------------------


class Hostile:
    """Executes something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def rewrite_manifest(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, with the hash that belongs to it."""
    manifest = msgspec.json.decode((directory / MANIFEST).read_bytes())["manifest"]
    edit(manifest)
    body = msgspec.json.encode(manifest)
    sha256 = hashlib.sha256(body).hexdigest()
    (directory / MANIFEST).write_bytes(msgspec.json.encode({"sha256": sha256, "manifest": msgspec.Raw(body)}))


def replace_payload(directory: Path, payload: bytes) -> None:
    """Put another file in the place of the state, with a manifest that fits it."""
    (directory / PAYLOAD).write_bytes(payload)
    entry = {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
    rewrite_manifest(directory, lambda manifest: manifest.update(files={PAYLOAD: entry}))


def hostile_pickle(mark: Path) -> bytes:
    """A bare pickle that executes something."""
    return pickle.dumps({"state_dict": Hostile(mark), "meta": {}}, protocol=2)  # that of torch.save


def hostile_archive(mark: Path) -> bytes:
    """The same, as `torch.save` packs it."""
    memory = io.BytesIO()
    torch.save({"state_dict": Hostile(mark)}, memory)
    return memory.getvalue()


def hostile_zip(mark: Path) -> bytes:
    """The same, packed by another program."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("archive/data.pkl", hostile_pickle(mark))
        archive.writestr("archive/version", "3\n")
    return memory.getvalue()


HOSTILE = (hostile_pickle, hostile_archive, hostile_zip)


def _copied_from_older(name: str) -> Callable[[Damaged], object]:
    return lambda damaged: shutil.copy(damaged.older / name, damaged.newer / name)


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Damaged], object]:
    return lambda damaged: (damaged.newer / name).write_bytes(change((damaged.newer / name).read_bytes()))


def _put(name: str, make: Callable[[Path], object]) -> Callable[[Damaged], object]:
    """Put something else in the place of a file."""

    def put(damaged: Damaged) -> None:
        (damaged.newer / name).unlink()
        make(damaged.newer / name)

    return put


def _manifest(**fields: Any) -> Callable[[Damaged], object]:
    return lambda damaged: rewrite_manifest(damaged.newer, lambda manifest: manifest.update(fields))


def _state(state: Any) -> Callable[[Damaged], object]:
    memory = io.BytesIO()
    torch.save(state, memory)
    return lambda damaged: replace_payload(damaged.newer, memory.getvalue())


def _name_no_file(manifest: dict[str, Any]) -> None:
    manifest["files"]["a\0b"] = manifest["files"][PAYLOAD]


ON_PURPOSE: dict[str, tuple[Callable[[Damaged], object], str | None]] = {
    "the state of another checkpoint": (_copied_from_older(PAYLOAD), None),
    "a state with more behind it": (_bytes(PAYLOAD, lambda b: b + b" "), r"it has \d+ bytes, \d+ were saved"),
    "a state of as many other bytes": (
        _bytes(PAYLOAD, lambda b: b[:-1] + bytes([b[-1] ^ 1])),
        "its SHA-256 is not",
    ),
    "the manifest of another checkpoint": (_copied_from_older(MANIFEST), None),
    "a manifest with more behind it": (
        _bytes(MANIFEST, lambda b: b + b" "),
        "its contents do not match the hash",
    ),
    "no manifest": (_put(MANIFEST, lambda path: None), "no readable manifest.json: it was not completed"),
    "no state": (_put(PAYLOAD, lambda path: None), "is incomplete, state.pth cannot be read"),
    "an empty manifest": (_bytes(MANIFEST, lambda b: b""), None),
    "a manifest nested too deep": (
        _bytes(MANIFEST, lambda b: b.replace(b'"manifest":', b'"manifest":' + b"[" * 100_000)),
        "is damaged: maximum recursion depth exceeded",
    ),
    "a later schema": (
        _manifest(schema=3),
        "has schema 3, this version of eventloop reads 1 and 2: update eventloop",
    ),
    "no schema": (lambda damaged: rewrite_manifest(damaged.newer, lambda m: m.pop("schema")), None),
    "a field of another type": (_manifest(files=1), "is not a manifest: Expected `object`"),
    "a file that none can be": (
        lambda damaged: rewrite_manifest(damaged.newer, _name_no_file),
        r"is not a manifest: files: expected names of files in the directory, got 'a\\x00b'",
    ),
    "the best of nothing": (
        _manifest(best={"f1": "less"}),
        "names 'f1', expected a score .* metrics, got none",
    ),
    "the best by a text": (
        _manifest(best={"acc": "less"}, metrics={"acc": "much"}),
        "could not convert string to float: 'much'",
    ),
    "no file named": (_manifest(files={}), "has no state.pth: its manifest lists no file"),
    "a manifest that is a directory": (_put(MANIFEST, Path.mkdir), None),
    "a state that is a directory": (_put(PAYLOAD, Path.mkdir), None),
    "a state that is no mapping": (_state([1, 2]), "expected a mapping with a 'state_dict'"),
    "a state without weights": (_state({"meta": {}}), None),
    "a state that is no archive": (lambda damaged: replace_payload(damaged.newer, b"not at all"), None),
}
"""How the newer one may be damaged, and the error; each must be found, though some have all the right hashes."""
