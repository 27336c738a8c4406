"""Keep a CSV file with one row per mode and step, whose columns can grow; `CSVWriter` writes through it.

Rows are appended. If a mode and step has a row already, its further values are first appended as a second
row. `merge`, and every new column, rewrite the file with one row per mode and step. The new content is
written to a temporary file, which then replaces the file, so the file is complete at any moment.
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
"""The begin of the first line of every table."""

Key = tuple[str, int]
"""Mode and step of a row."""
Cells = list[str]
"""The texts of a row, in the order of the columns."""


class Table:
    """Append rows to a CSV file, and merge them into one row per mode and step.

        table = Table(path)
        table.add({("train", 10): {"iter": "9", "epoch": "0", "loss": "0.5"}})
        table.close()

    Raises:
        ValueError: the file exists and its first columns are not `KEYS`, or it has a malformed row.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()  # a rewrite would replace a symbolic link, not the file it leads to
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        """Open the file for appending, and read its columns and the last step of each mode."""
        self.columns = [*KEYS]
        self.last: dict[str, int] = {}  # the last step of each mode
        # whether `merge` has to rewrite the file: two rows have one mode and step, or are not sorted by step
        self._needs_merge = False
        self._file: FileIO | None = None
        if self.path.exists() and self.path.stat().st_size:
            header = self._read_header()
            remaining_bytes = self._cut_torn_row()
            if remaining_bytes:  # 0 if a kill cut the header itself short
                self.columns = header
                for key, _ in self._rows():
                    self._record_step(*key)
        self._file = FileIO(self.path, "ab")

    def add(self, rows: Mapping[Key, Mapping[str, str]]) -> None:
        """Append rows, each a mapping of column names to cells, by mode and step.

        A new column is empty in earlier rows. If the file has a row of the same mode and step, a later
        `merge` makes one row of both, in which the new cells take precedence. Lone surrogates in names become
        escapes.
        """
        if not rows:
            return
        assert self._file is not None
        rows = _encodable(rows)
        columns = set(self.columns)
        new_columns = dict.fromkeys(name for row in rows.values() for name in row if name not in columns)
        self.columns += new_columns
        is_empty = not os.fstat(self._file.fileno()).st_size
        if new_columns and not is_empty:
            self._rewrite()
        lines = [self.columns] if is_empty else []
        for (mode, step), row in rows.items():
            lines.append([mode, str(step), *(row.get(name, "") for name in self.columns[2:])])
        text = io.StringIO(newline="")
        self._writer(text, {mode for mode, _ in rows}).writerows(lines)
        write_all(self._file, text.getvalue().encode())
        for key in rows:
            self._record_step(*key)

    def merge(self) -> None:
        """Rewrite the file with one row per mode and step, sorted by step, unless it has that form."""
        if self._needs_merge:
            self._rewrite()

    def remove_after(self, step: int) -> None:
        """Remove the rows of all steps after `step`."""
        self._rewrite(upto=step)

    def set_aside(self) -> Path:
        """Rename the file to `name.1.csv` or the next free number, and start an empty file.

        Returns:
            the new path of the renamed file.
        """
        self.close()
        number = 1
        while (new_path := self.path.with_suffix(f".{number}{self.path.suffix}")).exists():
            number += 1
        os.rename(self.path, new_path)
        self._open()
        return new_path

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
        """Replace the file by one with all columns and one row per mode and step.

        After a crash either the old or the new file exists, and is complete. All rows are held in memory.

        Args:
            upto: the last step whose rows are written; None for all.
        """
        assert self._file is not None
        rows: dict[Key, Cells] = {}
        for key, cells in self._rows():
            if upto is None or key[1] <= upto:
                earlier_cells = rows.get(key, cells)
                rows[key] = [new or earlier for earlier, new in zip(earlier_cells, cells, strict=True)]
        if self._needs_merge:
            rows = dict(sorted(rows.items(), key=lambda row: row[0][1]))  # by step
        with replacing(self.path) as binary:
            text = io.TextIOWrapper(binary, encoding="utf-8", newline="", write_through=True)
            self._writer(text, self.last).writerows([self.columns, *rows.values()])
            text.detach()
        self.last, self._needs_merge = {}, False
        for key in rows:
            self._record_step(*key)
        self._file.close()
        self._file = FileIO(self.path, "ab")

    def _writer(self, file: TextIO, modes: Iterable[str]) -> Any:
        """Return a csv writer for `file` that quotes all cells if a name or mode has a carriage return.

        Readers would take an unquoted carriage return for the end of a row. The csv module quotes it by
        itself only since Python 3.13.
        """
        has_return = any("\r" in text for text in (*self.columns, *modes))
        return csv.writer(
            file, lineterminator="\n", quoting=csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL
        )

    def _record_step(self, mode: str, step: int) -> None:
        """Record the row that is now the last; `merge` is needed if its mode had this or a later step."""
        if step > self.last.get(mode, -1):
            self.last[mode] = step
        else:
            self._needs_merge = True

    # --- reading -------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[tuple[Key, Cells]]:
        """Yield the mode and step of every row, and its cells, padded to the number of columns.

        Raises:
            ValueError: a row has too few or too many cells, or its step is not a number.
        """
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
        """Return the column names in the file's first line, or [] if it is not a whole list of `KEYS`.

        Raises:
            ValueError: the first line does not begin with `KEYS`.
        """
        # "replace", because a kill may have written only the first bytes of a character
        with open(self.path, encoding="utf-8", errors="replace", newline="") as file:
            if _FIRST.startswith(file.read(len(_FIRST) + 1)):
                return []  # a kill cut the line short
            file.seek(0)
            header = next(csv.reader(file), [])
        if tuple(header[: len(KEYS)]) != KEYS:
            raise ValueError(
                f"{self.path} was not written by a CSVWriter: its first line must begin with "
                f"{','.join(KEYS)}, got {','.join(header)[:80]!r}; choose another filename"
            )
        return header

    def _cut_torn_row(self) -> int:
        """Remove the last row if a kill cut it short, and return the remaining size of the file in bytes."""
        with FileIO(self.path, "rb+") as file:
            if removed := cut_torn_line(file.fileno(), bool):
                logger.warning(
                    "%s: the last row was cut short and is removed: %r (%s bytes)",
                    self.path,
                    removed[:80],
                    f"{len(removed):,}",
                )
            return os.fstat(file.fileno()).st_size


def _encodable(rows: Mapping[Key, Mapping[str, str]]) -> Mapping[Key, Mapping[str, str]]:
    """Return `rows`; lone surrogates in modes and names, which UTF-8 cannot encode, become escapes."""
    try:
        for (mode, _), row in rows.items():
            "".join([mode, *row]).encode()
    except UnicodeEncodeError:
        rows = without_surrogates(rows)
    return rows
