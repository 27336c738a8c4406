"""The summaries of runs that end in processes which the script has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventloop.autoattach.attacher import Attacher
from eventloop.autoattach.child_runs import pass_on, passed_on
from eventloop.autoattach.options import RunOptions


def test_the_last_summary_of_each_directory(tmp_path: Path) -> None:
    """The command gets them in the order in which the runs ended; a file that is cut short is left out."""
    pass_on(tmp_path, Path("first"), "4 iterations")
    pass_on(tmp_path, Path("second"), "1 iteration")
    pass_on(tmp_path, Path("first"), "8 iterations")
    (tmp_path / "000003-1.json").write_text('{"direc')

    assert list(passed_on(tmp_path).items()) == [
        (Path("first"), "8 iterations"),
        (Path("second"), "1 iteration"),
    ]


def test_the_directory_after_a_child_s_run(tmp_path: Path) -> None:
    """A second launch of ranks does not write to the directory of the first one, which ended elsewhere."""
    (folder := tmp_path / "summaries").mkdir()
    options = RunOptions(summaries=str(folder))
    ranks = [Attacher(options).free_directory(tmp_path) for _ in range(2)]
    pass_on(folder, tmp_path, "4 iterations")

    again = [Attacher(options).free_directory(tmp_path) for _ in range(2)]

    assert ranks == [tmp_path] * 2
    assert again == [tmp_path / "trainer-2"] * 2


def test_a_folder_that_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run outlives the command: a warning names the report of its directory, and nothing fails."""
    pass_on(tmp_path / "gone", Path("out"), "4 iterations")

    assert passed_on(tmp_path / "gone") == {}
    assert "the summary is not shown: " in caplog.text
    assert "see `eventloop report out`" in caplog.text
