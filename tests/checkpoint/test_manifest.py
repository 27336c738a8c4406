"""Test `manifest.json`, which describes a checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from datetime import datetime
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from eventloop import __version__
from eventloop.checkpoint import CheckpointError, read_manifest, save_checkpoint
from eventloop.checkpoint.commit import MANIFEST, PAYLOAD, seal
from eventloop.checkpoint.disk import FileHash
from eventloop.checkpoint.manifest import (
    FileEntry,
    Label,
    Manifest,
    TensorEntry,
    encode_body,
    score,
    tensor_table,
)
from eventloop.hooks import CheckpointHook
from tests.support.trainers import MakeTrainer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the path of a small checkpoint."""
    save_checkpoint({"meta": {}, "state_dict": {"w": torch.zeros(2)}}, tmp_path / "a", Label(sequence=7))
    return tmp_path / "a"


def write_manifest(directory: Path, body: bytes) -> None:
    """Replace a manifest by other bytes, with a matching hash."""
    envelope = {"sha256": hashlib.sha256(body).hexdigest(), "manifest": msgspec.Raw(body)}
    (directory / MANIFEST).write_bytes(msgspec.json.encode(envelope))


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", "", ".hidden"])
def test_files_lie_in_the_directory(saved: Path, name: str) -> None:
    """A manifest that lists a path instead of a plain name is refused, so no other file is opened."""
    files = {name: {"bytes": 1, "sha256": ""}}
    write_manifest(saved, msgspec.json.encode({"schema": 1, "files": files}))

    with pytest.raises(CheckpointError, match=rf"files: expected names of files .*, got '{re.escape(name)}'"):
        read_manifest(saved)


def test_a_trainers_manifest(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A trainer's manifest has counters, the length of the run, versions, the time, the keys and the
    tensors."""
    trainer = make_trainer(max_epochs=5, hooks=[CheckpointHook(interval=1)])
    trainer.bus.on("after_train_iter", start=3, once=True)(lambda trainer, event: trainer.stop("enough"))
    trainer.train()

    whole, cut = (read_manifest(tmp_path / "run" / name) for name in ("epoch_1", "iter_4"))

    assert (whole.iter, whole.epoch, whole.batch_idx) == (3, 1, 0)
    assert (cut.iter, cut.epoch, cut.batch_idx) == (4, 1, 1)
    assert (whole.max_epochs, whole.max_iters) == (5, 15)
    assert (whole.eventloop, whole.torch) == (__version__, str(torch.__version__))
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(whole.time)).total_seconds()) < 600
    assert whole.keys == ("meta", "state_dict", "optimizer", "param_schedulers", "hooks", "rng")
    assert (whole.sequence, cut.sequence) == (1, 2)
    assert [entry for entry in whole.tensors if entry.name.startswith("state_dict.0")] == [
        TensorEntry("state_dict.0.weight", "float32", (8, 2)),
        TensorEntry("state_dict.0.bias", "float32", (8,)),
    ]
    assert TensorEntry("optimizer.state.0.momentum_buffer", "float32", (8, 2)) in whole.tensors


def test_it_is_json(saved: Path) -> None:
    """The manifest is JSON with its own SHA-256, and the size and SHA-256 of every other file."""
    raw, payload = (saved / MANIFEST).read_bytes(), (saved / PAYLOAD).read_bytes()
    said = json.loads(raw)

    assert said["manifest"]["sequence"] == 7
    assert said["manifest"]["tensors"] == [{"name": "state_dict.w", "dtype": "float32", "shape": [2]}]
    body = raw.split(b'"manifest":', 1)[1][:-1]
    assert hashlib.sha256(body).hexdigest() == said["sha256"]
    hashed = FileEntry(len(payload), hashlib.sha256(payload).hexdigest())
    assert read_manifest(saved).files == {PAYLOAD: hashed}


def test_a_label_is_kept(tmp_path: Path) -> None:
    """The label's fields are read as they were given; scores that are not finite and keys become strings."""
    metrics = {"acc": score(0.1), "a": score(nan), "b": score(inf), "c": score(-inf)}
    label = Label(sequence=3, best={"acc": "greater"}, metrics=metrics)
    save_checkpoint({"state_dict": {}, 5: 1}, tmp_path / "a", label)  # type: ignore[dict-item]

    manifest = read_manifest(tmp_path / "a")
    assert (manifest.sequence, manifest.best, manifest.keys) == (3, {"acc": "greater"}, ("state_dict", "5"))
    assert manifest.metrics == {"acc": 0.1, "a": "nan", "b": "inf", "c": "-inf"}
    assert [str(float(value)) for value in manifest.metrics.values()] == ["0.1", "nan", "inf", "-inf"]


@pytest.mark.parametrize(
    ("state", "wrong"),
    [
        ({"meta": {"iter": "many"}}, r"Expected `int`, got `str` - at `\$\.iter`"),
        ({"meta": {"epoch": 5.0}}, r"Expected `int`, got `float` - at `\$\.epoch`"),
        ({"state_dict": {"\udcff": torch.zeros(1)}}, "surrogates not allowed"),
        ({"meta": {"iter": torch.tensor(1)}}, "Encoding objects of type Tensor is unsupported"),
    ],
    ids=["a text", "a float", "no text", "a tensor"],
)
def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path, state: dict[str, Any], wrong: str) -> None:
    """If a handler's values make the manifest unreadable, the save is an error, and no checkpoint exists."""
    message = f"could not be read again, so the checkpoint is not saved: .*{wrong}"
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint({"state_dict": {}, **state}, tmp_path / "a")

    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("metrics", [{}, {"loss": 0.5}, {"acc": "nan"}])
def test_the_best_of_nothing(metrics: dict[str, float | str]) -> None:
    """A label that names a best metric without a finite score of it is refused."""
    with pytest.raises(ValueError, match="best names 'acc', expected a score of it in metrics, got none"):
        Label(best={"acc": "greater"}, metrics=metrics)


def test_tensor_table() -> None:
    """The tensors of nested mappings, lists and tuples are described by their keys, joined by dots."""
    state: dict[str, Any] = {
        "a": {0: torch.zeros(2, 3), "b": [1, (torch.tensor(1), None)]},
        "n": 1,
        "t": torch.zeros(0, dtype=torch.uint8),
    }

    assert [*tensor_table(state)] == [
        TensorEntry("a.0", "float32", (2, 3)),
        TensorEntry("a.b.1.0", "int64", ()),
        TensorEntry("t", "uint8", (0,)),
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_in_the_table(layout: torch.layout) -> None:
    """The shape of a nested tensor is empty."""
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)

    assert [*tensor_table({"n": nested})] == [TensorEntry("n", "float32", ())]


# --- manifests that are refused ----------------------------------------------------------------------------


CHANGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda raw: b"", "is damaged: "),
    "torn": (lambda raw: b"{", "is damaged: "),
    "a list": (lambda raw: b"[]", "is damaged: "),
    "no hash": (lambda raw: b'{"manifest":{}}', "is damaged: "),
    "no text": (lambda raw: b"\xff\xff", "is damaged: "),
    "no text for a hash": (lambda raw: b'{"sha256":3,"manifest":{}}', "is damaged: "),
    "nested too deep": (lambda raw: b'{"sha256":"a","manifest":' + b"[" * 100_000, "is damaged: "),
    "a number": (
        lambda raw: raw.replace(b'"sequence":7', b'"sequence":8'),
        "damaged: its contents do not match the hash",
    ),
    "more": (lambda raw: raw + b"\n", "damaged: its contents do not match the hash"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_damaged(saved: Path, what: str) -> None:
    """A file that is not the JSON of a manifest, or does not match its hash, is refused as damaged."""
    change, message = CHANGED[what]
    (saved / MANIFEST).write_bytes(change((saved / MANIFEST).read_bytes()))

    with pytest.raises(CheckpointError, match=message):
        read_manifest(saved)


def test_a_flipped_bit(saved: Path) -> None:
    """A flip of any single bit of the file is detected."""
    raw = (saved / MANIFEST).read_bytes()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        (saved / MANIFEST).write_bytes(changed)

        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: "):
            read_manifest(saved)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"schema":3,"iter":"many"}',
            "has schema 3, this version of eventloop reads 1 and 2: update eventloop",
        ),
        (b'{"schema":1,"iter":"many"}', r"manifest\.json is not a manifest: Expected `int`"),
        (
            b'{"schema":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            r"manifest\.json is (damaged|not a manifest): ",
        ),
        (b'{"schema":' + b"1" * 100_000 + b"}", r"manifest\.json is (damaged|not a manifest): "),
    ],
    ids=["a later version", "other fields", "nested too deep", "thousands of digits"],
)
def test_no_manifest_with_the_right_hash(saved: Path, body: bytes, message: str) -> None:
    """With a correct hash, an unknown version is refused as such, and other wrong contents by their error."""
    write_manifest(saved, body)

    with pytest.raises(CheckpointError, match=message):
        read_manifest(saved)


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda path: None, "it was not completed"), (Path.mkdir, ".*Is a directory")],
    ids=["absent", "directory"],
)
def test_a_manifest_that_is_no_file(saved: Path, make: Callable[[Path], object], why: str) -> None:
    """A directory without a manifest was not completed; a manifest that is a directory cannot be read."""
    (saved / MANIFEST).unlink()
    make(saved / MANIFEST)

    with pytest.raises(CheckpointError, match=rf"a has no readable manifest\.json: {why}"):
        read_manifest(saved)


def test_encode_and_read(tmp_path: Path) -> None:
    """An encoded manifest with its files is read as it was."""
    body = Manifest(sequence=2, iter=3, tensors=(TensorEntry("w", "float32", (1, 2)),))
    (tmp_path / MANIFEST).write_bytes(seal(encode_body(body), {PAYLOAD: FileHash(3, "ab")}))

    assert read_manifest(tmp_path) == msgspec.structs.replace(body, files={PAYLOAD: FileEntry(3, "ab")})
