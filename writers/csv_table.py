"""A CSV file with one row per (mode, step), whose columns grow, and which is whole at any moment.

Rows are appended. Whatever changes rows that are there already (a new column, a value for a row that was written
before, steps that a resumed run does again) is done in a second file, which then takes the place of the first.
That costs a pass over the file, so values for earlier rows wait at the end of the file, as a second row of the same
mode and step, until the file has grown by a quarter: each row is rewritten a bounded number of times.
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
"""The first columns. `mode` and `step` tell rows apart."""
_FIRST = ",".join(KEYS)
SMALL = 1 << 18
"""Bytes of a file that is cheap enough to be rewritten whenever there is a reason to: some milliseconds."""

Key = tuple[str, int]
Cells = list[str]


class Table:
    """A file of rows, in which the steps of each mode increase.

    table = Table(path)
    table.add({("train", 10): {"iter": "9", "epoch": "0", "loss": "0.5"}})
    table.close()

    Raises:
        ValueError: the file is there, and is no such table.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()  # the file, not a link to it, is what a rewritten one takes the place of
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self.columns = [*KEYS]
        self.last: dict[str, int] = {}  # the last step of each mode
        self._tangled = False  # whether the file has two rows of a key, or a row that is out of order
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
        """Append rows, cells by column; the columns grow as needed, empty in earlier rows. What a row of the same
        key has already stays, unless the new row has it too. Lone surrogates in names become escapes."""
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
        if self._tangled and self._worth_merging():
            self.merge()

    def _new_columns(self, rows: Mapping[Key, Mapping[str, str]]) -> list[str]:
        known = set(self.columns)
        return list(dict.fromkeys(name for row in rows.values() for name in row if name not in known))

    def merge(self) -> None:
        """Make it one row per key, in order, if it is not."""
        if self._tangled:
            self._rewrite()

    def forget_after(self, step: int) -> None:
        """Drop the rows of later steps."""
        self._rewrite(upto=step)

    def set_aside(self) -> Path:
        """Keep the file under another name, `name.1.csv`, and begin anew. Returns the other name."""
        self.close()
        number = 1
        while (other := self.path.with_suffix(f".{number}{self.path.suffix}")).exists():
            number += 1
        os.rename(self.path, other)
        self._open()
        return other

    def close(self) -> None:
        """Merge, and close the file."""
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
        """Replace the file by one with all columns and one row per key; a crash leaves one of the two."""
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
        self.last, self._tangled = last, False
        self._file.close()
        self._file = FileIO(self.path, "ab")
        self._merged_size = self._size()

    def _writer(self, file: TextIO, modes: Collection[str]) -> Any:
        """Return a csv writer that quotes carriage returns too, which the csv module does only since Python 3.13. Readers
        would take one for the end of a row."""
        found = any("\r" in text for text in (*self.columns, *modes))
        return csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL if found else csv.QUOTE_MINIMAL)

    def _cells(self, key: Key, row: Mapping[str, str]) -> Cells:
        return [key[0], str(key[1]), *(row.get(name, "") for name in self.columns[2:])]

    def _note(self, mode: str, step: int) -> None:
        if step > self.last.get(mode, -1):
            self.last[mode] = step
        else:
            self._tangled = True

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size if self._file is not None else 0

    def _worth_merging(self) -> bool:
        size = self._size()
        return size <= SMALL or size - self._merged_size >= self._merged_size // 4

    # --- reading -------------------------------------------------------------------------------------------

    def _merged(self, upto: int | None) -> Iterator[Cells]:
        """The rows up to a step, one per key and in order. Only those that are out of order are held in memory."""
        late = {mode: deque(sorted(rows.items())) for mode, rows in self._late_rows().items()}
        last: dict[str, int] = {}
        for mode, step, cells in self._rows():
            if step <= last.get(mode, -1):
                continue  # one of `late`
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
        """The rows with a step that is not above all before it in their mode, by mode and step."""
        late: dict[str, dict[int, Cells]] = {}
        last: dict[str, int] = {}
        for mode, step, cells in self._rows() if self._tangled else ():
            if step > last.get(mode, -1):
                last[mode] = step
            else:
                rows = late.setdefault(mode, {})
                rows[step] = _overlay(rows[step], cells) if step in rows else cells
        return late

    def _rows(self) -> Iterator[tuple[str, int, Cells]]:
        """Every row of the file, with as many cells as there are columns now."""
        width = len(self.columns)
        with open(self.path, encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            next(reader)
            for cells in reader:
                if not cells:
                    continue  # an empty line
                if len(cells) > width or len(cells) < len(KEYS) or not cells[1].isdecimal():
                    raise ValueError(
                        f"{self.path}, line {reader.line_num} is no row of this table, which has the columns "
                        f"{', '.join(self.columns)}: got {','.join(cells)[:80]!r}; repair or remove the file"
                    )
                cells += [""] * (width - len(cells))
                yield cells[0], int(cells[1]), cells

    def _read_header(self) -> list[str]:
        """The columns; none, or any, where a kill left a part of the first line."""
        # a kill may have cut a letter in two
        with open(self.path, encoding="utf-8", errors="replace", newline="") as file:
            if _FIRST.startswith(file.read(len(_FIRST) + 1)):
                return []
            file.seek(0)
            header = next(csv.reader(file), [])
        if tuple(header[: len(KEYS)]) != KEYS:
            raise ValueError(
                f"{self.path} is no file of a CSVWriter: its first line must begin with {','.join(KEYS)}, got "
                f"{','.join(header)[:80]!r}; choose another filename"
            )
        return header

    def _cut_torn_row(self) -> int:
        """Remove a last row that lacks its end: nobody can tell 0.12 from the beginning of 0.1234. Returns the bytes
        that are left."""
        with FileIO(self.path, "rb+") as file:
            if torn := cut_torn_line(file.fileno(), bool):
                logger.warning(
                    "%s: the last row was cut short and is left out: %r (%s bytes are removed)",
                    self.path, torn[:80], f"{len(torn):,}",
                )  # fmt: skip
            return os.fstat(file.fileno()).st_size


def _is_text(names: Sequence[str]) -> bool:
    """Whether UTF-8 has bytes for all of them."""
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return False
    return True


def _overlay(cells: Cells, later: Cells) -> Cells:
    """`cells`, with what `later` has in place of it."""
    return [new or old for old, new in zip(cells, later, strict=True)]
