"""Keep a CSV file with one row per mode and step, whose columns can grow; `CSVWriter` writes through it.

Rows are appended; a late value of an earlier row becomes a second row. For a new column, and in `merge`, the
rows are merged into a second file, which is renamed over the first, so the file is complete at any moment.
"""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from eventloop.util.append_file import cut_torn_line, replacing, write_all
from eventloop.util.surrogates import without_surrogates

logger = logging.getLogger("eventloop")

KEYS = ("mode", "step", "iter", "epoch")
"""The first columns. `mode` and `step` together are the key of a row."""
_FIRST = ",".join(KEYS)

Key = tuple[str, int]
Cells = list[str]


class Table:
    """Append rows to a CSV file, and merge them into one row per mode and step.

        table = Table(path)
        table.add({("train", 10): {"iter": "9", "epoch": "0", "loss": "0.5"}})
        table.close()

    Raises:
        ValueError: the file exists and is not such a table.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()  # a rewrite replaces the file itself, not a link to it
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self.columns = [*KEYS]
        self.last: dict[str, int] = {}  # the last step of each mode
        self._unmerged = False  # whether the file has two rows of a key, or a row that is out of order
        self._file: FileIO | None = None
        if self.path.exists() and self.path.stat().st_size:
            header = self._read_header()
            if self._cut_torn_row():  # else the header itself was torn
                self.columns = header
                for key, _ in self._rows():
                    self._record_step(*key)
        self._file = FileIO(self.path, "ab")

    def add(self, rows: Mapping[Key, Mapping[str, str]]) -> None:
        """Append rows, given as cells by column name.

        A new column is empty in earlier rows. If a row of the same mode and step exists, both are merged, and
        cells of the new row take precedence. Lone surrogates in names become escapes.
        """
        if not rows:
            return
        assert self._file is not None
        rows = _encodable(rows)
        known = set(self.columns)
        new = dict.fromkeys(name for row in rows.values() for name in row if name not in known)
        self.columns += new
        empty = not os.fstat(self._file.fileno()).st_size
        if new and not empty:
            self._rewrite()
        lines = [
            [mode, str(step), *(row.get(name, "") for name in self.columns[2:])]
            for (mode, step), row in rows.items()
        ]
        text = io.StringIO(newline="")
        self._writer(text, {mode for mode, _ in rows}).writerows([self.columns, *lines] if empty else lines)
        write_all(self._file, text.getvalue().encode())
        for key in rows:
            self._record_step(*key)

    def merge(self) -> None:
        """Rewrite the file with one row per key, in the order of steps, unless it is so already."""
        if self._unmerged:
            self._rewrite()

    def remove_after(self, step: int) -> None:
        """Remove the rows of all steps after `step`."""
        self._rewrite(upto=step)

    def set_aside(self) -> Path:
        """Rename the file to `name.1.csv` or the next free number, start an empty one, return the path."""
        self.close()
        number = 1
        while (other := self.path.with_suffix(f".{number}{self.path.suffix}")).exists():
            number += 1
        os.rename(self.path, other)
        self._open()
        return other

    def close(self) -> None:
        """Merge the rows and close the file."""
        if self._file is not None:
            try:
                self.merge()
            finally:
                self._file.close()
                self._file = None

    # --- writing -------------------------------------------------------------------------------------------

    def _rewrite(self, upto: int | None = None) -> None:
        """Replace the file by one with all columns and one row per key, up to step `upto`.

        After a crash either the old or the new file exists, and is complete. The rows are held in memory.
        """
        assert self._file is not None
        merged: dict[Key, Cells] = {}
        for key, cells in self._rows():
            former = merged.get(key, cells)
            merged[key] = [later or earlier for earlier, later in zip(former, cells, strict=True)]
        kept = {key: merged[key] for key in merged if upto is None or key[1] <= upto}
        if self._unmerged:
            kept = dict(sorted(kept.items(), key=lambda row: row[0][1]))
        with replacing(self.path) as binary:
            text = io.TextIOWrapper(binary, encoding="utf-8", newline="", write_through=True)
            self._writer(text, self.last).writerows([self.columns, *kept.values()])
            text.detach()
        self.last, self._unmerged = {}, False
        for key in kept:
            self._record_step(*key)
        self._file.close()
        self._file = FileIO(self.path, "ab")

    def _writer(self, file: TextIO, modes: Iterable[str]) -> Any:
        """Return a csv writer that also quotes carriage returns.

        Readers would take a carriage return for the end of a row; the csv module quotes it only since Python
        3.13.
        """
        found = any("\r" in text for text in (*self.columns, *modes))
        return csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL if found else csv.QUOTE_MINIMAL)

    def _record_step(self, mode: str, step: int) -> None:
        if step > self.last.get(mode, -1):
            self.last[mode] = step
        else:
            self._unmerged = True

    # --- reading -------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[Key, Cells]]:
        """Yield every row of the file as key and cells, padded to the number of columns."""
        width = len(self.columns)
        with open(self.path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            next(reader)
            for cells in reader:
                if not cells:
                    continue  # an empty line
                if len(cells) > width or len(cells) < len(KEYS) or not cells[1].isdecimal():
                    raise ValueError(
                        f"{self.path}, line {reader.line_num} is not a row of this table: expected the "
                        f"columns {', '.join(self.columns)}, got {','.join(cells)[:80]!r}; repair or "
                        "remove the file"
                    )
                cells += [""] * (width - len(cells))
                yield (cells[0], int(cells[1])), cells

    def _read_header(self) -> list[str]:
        """Return the column names in the file's first line.

        If a kill cut the first line short, `_open` ignores the result and removes the line.
        """
        # a kill may have cut a character in two
        with open(self.path, encoding="utf-8", errors="replace", newline="") as file:
            if _FIRST.startswith(file.read(len(_FIRST) + 1)):
                return []
            file.seek(0)
            header = next(csv.reader(file), [])
        if tuple(header[: len(KEYS)]) != KEYS:
            raise ValueError(
                f"{self.path} was not written by a CSVWriter: its first line must begin with "
                f"{','.join(KEYS)}, got {','.join(header)[:80]!r}; choose another filename"
            )
        return header

    def _cut_torn_row(self) -> int:
        """Remove a last row that a kill cut short, and return the size of the rest in bytes."""
        with FileIO(self.path, "rb+") as file:
            if torn := cut_torn_line(file.fileno(), bool):
                logger.warning(
                    "%s: the last row was cut short and is removed: %r (%s bytes)",
                    self.path,
                    torn[:80],
                    f"{len(torn):,}",
                )
            return os.fstat(file.fileno()).st_size


def _encodable(rows: Mapping[Key, Mapping[str, str]]) -> Mapping[Key, Mapping[str, str]]:
    """Return `rows`, with escapes for the lone surrogates in names, which UTF-8 cannot encode."""
    try:
        "".join([*(mode for mode, _ in rows), *(name for row in rows.values() for name in row)]).encode()
    except UnicodeEncodeError:
        rows = without_surrogates(rows)
    return rows
