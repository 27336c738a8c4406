"""Test the payload file: it has the format of `torch.save`, and is written without torch."""

from __future__ import annotations

import zipfile
from io import FileIO
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from eventloop.checkpoint import save_checkpoint
from eventloop.checkpoint.archive import ALIGNMENT, CHECKED, write_archive
from eventloop.checkpoint.commit import PAYLOAD
from eventloop.checkpoint.disk import PIECE, Disk, write_file
from tests.support.saving import same

STATE: dict[str, Any] = {
    "state_dict": {
        "transposed": torch.randn(4, 6).t(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0),
        "bfloat16": torch.randn(5).bfloat16(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 2], dtype=torch.uint16),
        "complex": torch.tensor([1 + 2j]),
        "sparse": torch.eye(4).to_sparse().coalesce(),
        "large": torch.randn(CHECKED // 4 + 1),
    },
    "meta": {"set": {1, 2}, "pair": (1, 2.5), "text": "\u00e4", "bytes": b"\0\1", "none": None},
}


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_reads_every_kind_of_value(tmp_path: Path, mapped: bool) -> None:
    """`torch.load(weights_only=True)` reads every type of value bit by bit, also when it maps the file."""
    save_checkpoint(STATE, tmp_path / "a")
    loaded = torch.load(tmp_path / "a" / PAYLOAD, weights_only=True, mmap=mapped)

    floats = {name: loaded["state_dict"].pop(name) for name in ("bfloat16", "float8")}
    assert all(
        torch.equal(value.float(), STATE["state_dict"][name].float()) for name, value in floats.items()
    )
    expected = {name: value for name, value in STATE["state_dict"].items() if name not in floats}
    assert same(loaded["state_dict"], expected)
    assert loaded["meta"] == STATE["meta"]


def sizes(path: Path) -> dict[str, int]:
    """Return the size of each record of an archive, by name."""
    with zipfile.ZipFile(path) as file:
        return {info.filename.partition("/")[2]: info.file_size for info in file.infolist()}


def test_it_is_the_file_of_torch_save(tmp_path: Path) -> None:
    """The records are those of `torch.save`, with the same sizes."""
    torch.save(STATE, tmp_path / "torch.pth")
    save_checkpoint(STATE, tmp_path / "a")

    theirs, own = sizes(tmp_path / "torch.pth"), sizes(tmp_path / "a" / PAYLOAD)

    assert own.items() <= theirs.items()
    left_out = {name.split("/")[0] for name in theirs.keys() - own.keys()}
    assert left_out <= {".format_version", ".storage_alignment", ".data"}


def test_tied_tensors_are_tied_again(tmp_path: Path) -> None:
    """Tied tensors share one storage in the file, and after loading."""
    weight = torch.ones(3)
    save_checkpoint({"state_dict": {"a": weight, "b": weight.detach()}}, tmp_path / "a")

    loaded = torch.load(tmp_path / "a" / PAYLOAD, weights_only=True)["state_dict"]
    loaded["a"].zero_()
    assert loaded["b"].tolist() == [0.0] * 3


def test_records_are_aligned(tmp_path: Path) -> None:
    """The data of every record are aligned for the processor, and small records have a valid CRC-32."""
    records = [(f"data/{number}", bytes(number)) for number in (1, 63, 64, 65)]
    write_file(tmp_path / "file", lambda sink: write_archive(records, sink))
    raw = (tmp_path / "file").read_bytes()

    with zipfile.ZipFile(tmp_path / "file") as file:
        assert file.testzip() is None
        for info in file.infolist():
            name, extra = (int.from_bytes(raw[info.header_offset + at :][:2], "little") for at in (26, 28))
            assert (info.header_offset + 30 + name + extra) % ALIGNMENT == 0


class Sparse(Disk):
    """A disk that leaves holes in place of large pieces of zeros."""

    def write(self, file: FileIO, data: memoryview) -> int:
        """Write small pieces; skip a large one."""
        if len(data) < PIECE:
            return super().write(file, data)
        file.seek(len(data), 1)
        return len(data)


@pytest.mark.slow
def test_more_than_four_gigabytes(tmp_path: Path) -> None:
    """Sizes and positions that need more than 32 bits are read as they were written."""
    zeros = memoryview(mmap(-1, (4 << 30) + PIECE))
    records: list[tuple[str, bytes | memoryview]] = [("data/0", zeros), ("data/1", b"end")]
    write_file(tmp_path / "file", lambda sink: write_archive(records, sink), disk=Sparse())

    reader = torch._C.PyTorchFileReader(str(tmp_path / "file"))
    with zipfile.ZipFile(tmp_path / "file") as file:
        assert file.getinfo("archive/data/0").file_size == len(zeros)
        assert file.read("archive/data/1") == b"end"
    assert reader.get_record("data/1") == b"end"
