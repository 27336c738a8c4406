"""lock_file: one process at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eventloop.writers.file_lock import lock_file

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
