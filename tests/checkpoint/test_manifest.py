"""manifest.json: what a checkpoint says of itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
from datetime import datetime
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from eventloop import __version__
from eventloop.checkpoint import CheckpointError, save_checkpoint
from eventloop.checkpoint.commit import MANIFEST, PAYLOAD
from eventloop.checkpoint.manifest import (
    FileEntry,
    Label,
    Manifest,
    TensorEntry,
    encode_manifest,
    read_manifest,
    score,
    tensor_table,
)
from eventloop.hooks import CheckpointHook
from tests.support.trainers import MakeTrainer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small checkpoint."""
    save_checkpoint({"meta": {}, "state_dict": {"w": torch.zeros(2)}}, tmp_path / "a", Label(sequence=7))
    return tmp_path / "a"


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", "", ".hidden"])
def test_files_lie_in_the_directory(saved: Path, name: str) -> None:
    """A manifest that names a path is none: no file elsewhere is opened to compare its hash."""
    entry = {"bytes": 1, "sha256": ""}
    body = msgspec.json.encode({"schema": 1, "files": {name: entry}})
    envelope = {"sha256": hashlib.sha256(body).hexdigest(), "manifest": msgspec.Raw(body)}
    (saved / MANIFEST).write_bytes(msgspec.json.encode(envelope))

    with pytest.raises(CheckpointError, match=rf"files: expected names of files .*, got '{re.escape(name)}'"):
        read_manifest(saved)


def test_a_trainers_manifest(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """It has the counters, what the run was to reach, the versions and the time, and the payload's keys."""
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
        TensorEntry("state_dict.0.weight", "float32", (8, 2)), TensorEntry("state_dict.0.bias", "float32", (8,)),
    ]  # fmt: skip
    assert TensorEntry("optimizer.state.0.momentum_buffer", "float32", (8, 2)) in whole.tensors


def test_hashes(saved: Path) -> None:
    """Every file but the manifest is in it, with its size and SHA-256."""
    raw = (saved / PAYLOAD).read_bytes()

    assert read_manifest(saved).files == {PAYLOAD: FileEntry(len(raw), hashlib.sha256(raw).hexdigest())}


def test_it_is_json(saved: Path) -> None:
    """Any program can read it, and check it: its own hash is that of the bytes after "manifest"."""
    raw = (saved / MANIFEST).read_bytes()
    said = json.loads(raw)

    assert said["manifest"]["sequence"] == 7
    assert said["manifest"]["tensors"] == [{"name": "state_dict.w", "dtype": "float32", "shape": [2]}]
    body = raw.split(b'"manifest":', 1)[1][:-1]
    assert hashlib.sha256(body).hexdigest() == said["sha256"]


def test_a_label_is_kept(tmp_path: Path) -> None:
    """What the one who saves says is in the manifest, and read again as it was."""
    label = Label(sequence=3, best={"acc": "greater"}, metrics={"acc": 0.5, "loss": score(nan)})
    save_checkpoint({"state_dict": {}}, tmp_path / "a", label)

    manifest = read_manifest(tmp_path / "a")
    assert (manifest.sequence, manifest.best, manifest.metrics) == (
        3,
        {"acc": "greater"},
        {"acc": 0.5, "loss": "nan"},
    )


def test_names_that_are_no_texts(tmp_path: Path) -> None:
    """A handler may put anything into the state under any key: the manifest has it as a text."""
    save_checkpoint({"state_dict": {}, 5: 1}, tmp_path / "a")  # type: ignore[dict-item]

    assert read_manifest(tmp_path / "a").keys == ("state_dict", "5")


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
    """What a handler has made of the counters and names may be no manifest: that is an error, not a checkpoint that is
    announced and cannot be loaded."""
    message = f"could not be read again, so the checkpoint is not saved: .*{wrong}"
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint({"state_dict": {}, **state}, tmp_path / "a")

    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("metrics", [{}, {"loss": 0.5}, {"acc": "nan"}])
def test_the_best_of_nothing(metrics: dict[str, float | str]) -> None:
    """It could not be compared with others."""
    with pytest.raises(ValueError, match="best names 'acc', expected a score of it in metrics, got none"):
        Label(best={"acc": "greater"}, metrics=metrics)


@pytest.mark.parametrize(("value", "said"), [(0.1, 0.1), (nan, "nan"), (inf, "inf"), (-inf, "-inf")])
def test_scores(value: float, said: float | str) -> None:
    """JSON has no NaN and no infinities: they are texts, which `float` takes."""
    assert score(value) == said
    assert str(float(score(value))) == str(value)


def test_tensor_table() -> None:
    """The tensors of nested mappings, lists and tuples, by the keys that lead to them."""
    state: dict[str, Any] = {
        "a": {0: torch.zeros(2, 3), "b": [1, (torch.tensor(1), None)]}, "n": 1, "t": torch.zeros(0, dtype=torch.uint8),
    }  # fmt: skip

    assert [*tensor_table(state)] == [
        TensorEntry("a.0", "float32", (2, 3)), TensorEntry("a.b.1.0", "int64", ()), TensorEntry("t", "uint8", (0,)),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_in_the_table(layout: torch.layout) -> None:
    """A size that its parts differ in is -1."""
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)

    assert [*tensor_table({"n": nested})] == [TensorEntry("n", "float32", (2, -1, 4))]


# --- manifests that are refused ----------------------------------------------------------------------------


def test_no_manifest(saved: Path) -> None:
    """A directory without one is a checkpoint that was not completed."""
    (saved / MANIFEST).unlink()

    with pytest.raises(CheckpointError, match=r"a has no readable manifest\.json: it was not completed"):
        read_manifest(saved)


def test_a_manifest_that_cannot_be_opened(saved: Path) -> None:
    """The system's reason is in the message."""
    (saved / MANIFEST).unlink()
    (saved / MANIFEST).mkdir()

    with pytest.raises(CheckpointError, match=r"a has no readable manifest\.json: .*Is a directory"):
        read_manifest(saved)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b'{"manifest":{}}', b"\xff\xff", b'{"sha256":3,"manifest":{}}',
        b'{"sha256":"a","manifest":' + b"[" * 100_000,
    ],
    ids=["empty", "torn", "a list", "no hash", "no text", "no text for a hash", "nested too deep"],
)  # fmt: skip
def test_no_json(saved: Path, raw: bytes) -> None:
    """What is not the JSON of a manifest is damaged."""
    (saved / MANIFEST).write_bytes(raw)

    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: "):
        read_manifest(saved)


def test_a_flipped_bit(saved: Path) -> None:
    """Every single bit of it counts."""
    raw = (saved / MANIFEST).read_bytes()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        (saved / MANIFEST).write_bytes(changed)

        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: "):
            read_manifest(saved)


def test_a_changed_number(saved: Path) -> None:
    """A number that was edited is not taken for the number."""
    path = saved / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"sequence":7', b'"sequence":8'))

    with pytest.raises(
        CheckpointError, match=r"manifest\.json is damaged: its contents do not match the hash in it"
    ):
        read_manifest(saved)


def test_more_than_was_saved(saved: Path) -> None:
    """Bytes that were added are noticed too."""
    path = saved / MANIFEST
    path.write_bytes(path.read_bytes() + b"\n")

    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: it holds more than was saved"):
        read_manifest(saved)


def test_a_later_version(saved: Path) -> None:
    """A layout that is not known here is refused as that, whatever else is in it."""
    body = msgspec.json.encode({"schema": 2, "iter": "many"})
    envelope = {"sha256": hashlib.sha256(body).hexdigest(), "manifest": msgspec.Raw(body)}
    (saved / MANIFEST).write_bytes(msgspec.json.encode(envelope))

    with pytest.raises(
        CheckpointError, match="has schema 2, this version of eventloop reads 1: update eventloop"
    ):
        read_manifest(saved)


def test_something_else_under_its_name(saved: Path) -> None:
    """A manifest of this version with other fields is none."""
    body = msgspec.json.encode({"schema": 1, "iter": "many"})
    envelope = {"sha256": hashlib.sha256(body).hexdigest(), "manifest": msgspec.Raw(body)}
    (saved / MANIFEST).write_bytes(msgspec.json.encode(envelope))

    with pytest.raises(CheckpointError, match=r"manifest\.json is not a manifest: Expected `int`"):
        read_manifest(saved)


@pytest.mark.parametrize(
    "schema",
    [b"[" * 100_000 + b"]" * 100_000, b"1" * 100_000],
    ids=["nested too deep", "thousands of digits"],
)
def test_what_no_decoder_takes(saved: Path, schema: bytes) -> None:
    """It has the right hash and is no manifest all the same, which is said as of any other."""
    body = b'{"schema":' + schema + b"}"
    envelope = {"sha256": hashlib.sha256(body).hexdigest(), "manifest": msgspec.Raw(body)}
    (saved / MANIFEST).write_bytes(msgspec.json.encode(envelope))

    with pytest.raises(CheckpointError, match=r"manifest\.json is (damaged|not a manifest): "):
        read_manifest(saved)


def test_a_manifest_that_is_no_file(saved: Path) -> None:
    """A named pipe is not waited for."""
    (saved / MANIFEST).unlink()
    os.mkfifo(saved / MANIFEST)

    with pytest.raises(
        CheckpointError, match=r"a has no readable manifest\.json: .*it is not a regular file"
    ):
        read_manifest(saved)


def test_encode_and_read(tmp_path: Path) -> None:
    """What was encoded is read again."""
    manifest = Manifest(
        sequence=2, iter=3, metrics={"acc": 0.1}, tensors=(TensorEntry("w", "float32", (1, 2)),)
    )
    (tmp_path / MANIFEST).write_bytes(encode_manifest(manifest))

    assert read_manifest(tmp_path) == manifest
