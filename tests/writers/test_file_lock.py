"""lock_file and locked: one process at a time."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest

from eventloop.writers.file_lock import lock_file, locked

HOLD = """
import sys
from pathlib import Path
from eventloop.writers.file_lock import lock_file
file = lock_file(Path(sys.argv[1]), 0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_another_process_waits_until_the_lock_is_free(tmp_path: Path) -> None:
    """While one process holds the lock another gives up; a kill of the holder frees it."""
    path = tmp_path / "run.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            TimeoutError, match=r"another process writes this run: it has held .*run.lock for 0 s"
        ):
            lock_file(path, 0)
        holder.kill()

    lock_file(path, 60).close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_a_block_does_not_wait_for_ever(tmp_path: Path) -> None:
    """While another file of the same path is locked the block runs later, without the lock."""
    path = tmp_path / "lines"
    with FileIO(path, "ab") as one, FileIO(path, "ab") as other, FileIO(path, "ab") as third:
        with locked(one, 60), locked(other, 0):
            other.write(b"late")
            with pytest.raises(BlockingIOError):
                fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert path.read_bytes() == b"late"
