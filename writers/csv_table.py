"""A CSV file with one row per (mode, step) whose columns can grow; `CSVWriter` writes through it.

Rows are appended. A change to existing rows (a new column, a value for an earlier row, steps that a resumed
run repeats) writes a second file and renames it over the first, so the file is complete at any moment. This
costs one pass over the file. Values for earlier rows are therefore appended as a second row of the same mode
and step, and merged when the file has grown by a quarter: each row is rewritten a bounded number of times.
"""

from __future__ import annotations

import csv
import io
import logging
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from eventloop.util.append_file import cut_torn_line, replacing, write_all
from eventloop.util.surrogates import without_surrogates

logger = logging.getLogger("eventloop")

KEYS = ("mode", "step", "iter", "epoch")
"""The first columns. `mode` and `step` together are the key of a row."""
_FIRST = ",".join(KEYS)
SMALL = 1 << 18
"""Up to this size in bytes a file is merged after each `add` that needs it, which takes some milliseconds."""

Key = tuple[str, int]
Cells = list[str]


class Table:
    """A file of rows in which the steps of each mode increase.

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
            if self._cut_torn_row():  # else it was the header that was torn
                self.columns = header
                for mode, step, _ in self._rows():
                    self._note(mode, step)
        self._file = FileIO(self.path, "ab")
        self._merged_size = self._size()

    def add(self, rows: Mapping[Key, Mapping[str, str]]) -> None:
        """Append rows, given as cells by column name.

        A new column is empty in earlier rows. If a row of the same key exists, its cells stay, except those
        that the new row has too. Lone surrogates in names become escapes.
        """
        if not rows:
            return
        new = self._new_columns(rows)
        if not _is_text([*new, *(mode for mode, _ in rows)]):
            rows = without_surrogates(rows)
            new = self._new_columns(rows)
        self.columns += new
        empty = not self._size()
        if new and not empty:
            self._rewrite()
        lines = [self._cells(key, row) for key, row in rows.items()]
        self._append([self.columns, *lines] if empty else lines, {mode for mode, _ in rows})
        for mode, step in rows:
            self._note(mode, step)
        if self._unmerged and self._worth_merging():
            self.merge()

    def _new_columns(self, rows: Mapping[Key, Mapping[str, str]]) -> list[str]:
        known = set(self.columns)
        return list(dict.fromkeys(name for row in rows.values() for name in row if name not in known))

    def merge(self) -> None:
        """Rewrite the file with one row per key, in order, unless it is so already."""
        if self._unmerged:
            self._rewrite()

    def forget_after(self, step: int) -> None:
        """Remove the rows of all steps after `step`."""
        self._rewrite(upto=step)

    def set_aside(self) -> Path:
        """Rename the file to `name.1.csv`, or the next free number, start an empty one, return the path."""
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

    def _append(self, lines: Sequence[Cells], modes: Collection[str]) -> None:
        assert self._file is not None
        text = io.StringIO(newline="")
        self._writer(text, modes).writerows(lines)
        write_all(self._file, text.getvalue().encode())

    def _rewrite(self, upto: int | None = None) -> None:
        """Replace the file by one with all columns and one row per key, up to step `upto`.

        After a crash either the old or the new file exists, and is complete.
        """
        assert self._file is not None
        last: dict[str, int] = {}
        with replacing(self.path) as binary:
            text = io.TextIOWrapper(binary, encoding="utf-8", newline="", write_through=True)
            writer = self._writer(text, self.last)
            writer.writerow(self.columns)
            for cells in self._merged(upto):
                last[cells[0]] = int(cells[1])
                writer.writerow(cells)
            text.detach()
        self.last, self._unmerged = last, False
        self._file.close()
        self._file = FileIO(self.path, "ab")
        self._merged_size = self._size()

    def _writer(self, file: TextIO, modes: Collection[str]) -> Any:
        """Return a csv writer that also quotes carriage returns.

        Readers would take one for the end of a row; the csv module quotes them only since Python 3.13.
        """
        found = any("\r" in text for text in (*self.columns, *modes))
        return csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL if found else csv.QUOTE_MINIMAL)

    def _cells(self, key: Key, row: Mapping[str, str]) -> Cells:
        return [key[0], str(key[1]), *(row.get(name, "") for name in self.columns[2:])]

    def _note(self, mode: str, step: int) -> None:
        if step > self.last.get(mode, -1):
            self.last[mode] = step
        else:
            self._unmerged = True

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def _worth_merging(self) -> bool:
        size = self._size()
        return size <= SMALL or size - self._merged_size >= self._merged_size // 4

    # --- reading -------------------------------------------------------------------------------------------

    def _merged(self, upto: int | None) -> Iterator[Cells]:
        """Yield the rows up to step `upto`, one per key, in order; hold only rows out of order in memory."""
        late = {mode: deque(sorted(rows.items())) for mode, rows in self._late_rows().items()}
        last: dict[str, int] = {}
        for mode, step, cells in self._rows():
            if step <= last.get(mode, -1):
                continue  # it is in `late`
            last[mode] = step
            waiting = late.get(mode, ())
            while waiting and waiting[0][0] < step:
                earlier, found = waiting.popleft()
                if upto is None or earlier <= upto:
                    yield found
            if waiting and waiting[0][0] == step:
                cells = _overlay(cells, waiting.popleft()[1])
            if upto is None or step <= upto:
                yield cells

    def _late_rows(self) -> dict[str, dict[int, Cells]]:
        """Return the rows whose step is not above all earlier steps of their mode, by mode and step."""
        late: dict[str, dict[int, Cells]] = {}
        last: dict[str, int] = {}
        for mode, step, cells in self._rows() if self._unmerged else ():
            if step > last.get(mode, -1):
                last[mode] = step
            else:
                rows = late.setdefault(mode, {})
                rows[step] = _overlay(rows[step], cells) if step in rows else cells
        return late

    def _rows(self) -> Iterator[tuple[str, int, Cells]]:
        """Yield every row of the file as mode, step and cells, padded to the number of columns.

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
                yield cells[0], int(cells[1]), cells

    def _read_header(self) -> list[str]:
        """Return the column names; any list if a kill cut the first line, which `_open` then removes.

        Raises:
            ValueError: the first line is not the header of such a table.
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
        """Remove a last row without a line break, which a kill cut short, and return the size of the rest."""
        with FileIO(self.path, "rb+") as file:
            if torn := cut_torn_line(file.fileno(), bool):
                logger.warning(
                    "%s: the last row was cut short and is removed: %r (%s bytes)",
                    self.path, torn[:80], f"{len(torn):,}",
                )  # fmt: skip
            return os.fstat(file.fileno()).st_size


def _is_text(names: Sequence[str]) -> bool:
    """Return whether UTF-8 can encode all `names`."""
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return False
    return True


def _overlay(cells: Cells, later: Cells) -> Cells:
    """Return `cells` with each cell replaced for which `later` has a value."""
    return [new or old for old, new in zip(cells, later, strict=True)]
