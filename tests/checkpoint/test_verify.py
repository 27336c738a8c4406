"""Test that a checkpoint is compared with the sizes and hashes in its manifest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from eventloop.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.checkpoint.manifest import open_verified


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the path of a small checkpoint."""
    save_checkpoint({"state_dict": {"w": torch.arange(300.0)}}, tmp_path / "a")
    return tmp_path / "a"


def refused(path: Path, message: str) -> None:
    """Assert that a checkpoint is neither verified nor loaded, with the same message."""
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(path)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_every_byte_counts(saved: Path) -> None:
    """A flipped bit anywhere in the payload is detected, also where torch would not notice it."""
    assert verify_checkpoint(saved) == read_manifest(saved)
    raw = (saved / PAYLOAD).read_bytes()
    for position in range(0, len(raw), 31):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        (saved / PAYLOAD).write_bytes(changed)

        with pytest.raises(CheckpointError, match="is damaged: its SHA-256 is not that of what was saved"):
            verify_checkpoint(saved)
    refused(saved, f"{re.escape(str(saved / PAYLOAD))} is damaged: its SHA-256 is not that of what was saved")


@pytest.mark.parametrize("cut", [-1, 1])
def test_another_size(saved: Path, cut: int) -> None:
    """A file of another size is refused with both sizes."""
    raw = (saved / PAYLOAD).read_bytes()
    (saved / PAYLOAD).write_bytes(raw[:cut] if cut < 0 else raw + b"\0")

    refused(saved, f"state.pth is damaged: it has {len(raw) + cut} bytes, {len(raw)} were saved")


def test_a_file_that_is_missing(saved: Path) -> None:
    """A missing file is named in the error."""
    (saved / PAYLOAD).unlink()

    refused(saved, r"a is incomplete, state\.pth cannot be read: .*No such file")


def test_a_file_that_cannot_be_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk while the hash is computed is in the message."""

    def fail(file: object, name: str) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr("hashlib.file_digest", fail)

    refused(saved, r"state\.pth cannot be read: input/output error")


def test_a_name_that_is_not_in_it(saved: Path) -> None:
    """A file that the manifest does not list is not opened."""
    with (
        pytest.raises(CheckpointError, match=r"a has no other\.pth: its manifest lists state\.pth"),
        open_verified(saved, "other.pth"),
    ):
        pass


def test_what_is_read_is_what_was_compared(saved: Path) -> None:
    """The bytes read are those that were compared, also if the file is replaced meanwhile."""
    raw = (saved / PAYLOAD).read_bytes()

    with open_verified(saved, PAYLOAD) as file:
        (saved / PAYLOAD).unlink()
        (saved / PAYLOAD).write_bytes(b"something else")
        assert file.read() == raw
