"""The summaries of runs that end in processes which the script has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.autoattach.child_runs import pass_on, passed_on


def test_the_last_summary_of_each_directory(tmp_path: Path) -> None:
    """The command gets them in the order in which the runs ended; a file that is cut short is left out."""
    pass_on(tmp_path, Path("first"), "4 iterations")
    pass_on(tmp_path, Path("second"), "1 iteration")
    pass_on(tmp_path, Path("first"), "8 iterations")
    (tmp_path / "000003-1.json").write_text('{"direc')

    assert list(passed_on(tmp_path).items()) == [
        (Path("first"), "8 iterations"), (Path("second"), "1 iteration"),
    ]  # fmt: skip


def test_a_folder_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run outlives the command: a warning names the report of its directory, and nothing fails."""
    pass_on(tmp_path / "gone", Path("out"), "4 iterations")

    assert "the summary is not shown: " in caplog.text
    assert "see `eventloop report out`" in caplog.text
