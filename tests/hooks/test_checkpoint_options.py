"""Test where checkpoints go, how they are named, and which options are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop import Trainer
from eventloop.checkpoint import find_checkpoints
from eventloop.hooks import CheckpointHook

Make = Callable[..., Trainer]
Files = Callable[..., list[str]]


def test_files_go_to_the_work_directorys_name_in_out_dir(
    make_trainer: Make, files: Files, tmp_path: Path
) -> None:
    """As in MMEngine checkpoints go to `out_dir/<name of work_dir>`, where `resume` finds them."""
    hook = CheckpointHook(out_dir=tmp_path / "far")
    trainer = make_trainer(hooks=[hook])

    trainer.train()

    assert files("far/run") == ["epoch_1"]
    assert trainer.resume() == tmp_path / "far" / "run" / "epoch_1"


@pytest.mark.parametrize(
    ("template", "folder"),
    [("model_{}.pth", "model_{}"), ("a_{}_b.ckpt", "a_{}_b"), ("{}", "{}")],
)
def test_template_names_the_directories(make_trainer: Make, files: Files, template: str, folder: str) -> None:
    """The number replaces `{}` in the template, and MMEngine's suffix is dropped."""
    trainer = make_trainer(max_epochs=2, hooks=[CheckpointHook(interval=1, filename_tmpl=template)])

    trainer.train()

    assert files() == [folder.format(1), folder.format(2)]
    assert trainer.resume().name == folder.format(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"interval": value}, f"interval must be -1 or a positive int, got {value}")
            for value in (0, True)
        ),
        ({"max_keep_ckpts": 0}, "max_keep_ckpts must be -1 or a positive int, got 0"),
        ({"save_begin": -1}, "save_begin must be at least 0, got -1"),
        ({"rule": "grater"}, "rule must be 'greater' or 'less', got 'grater': did you mean 'greater'"),
        ({"save_best": "quality"}, "cannot infer from its name whether a greater 'quality' is better"),
        ({"save_best": 3}, "save_best must be a string or a list of strings, got 3"),
        *(
            ({"save_best": names}, "save_best must not be empty or have a name twice")
            for names in ([], ["a", "a"])
        ),
        ({"save_best": ["acc", "auto"]}, "save_best='auto' cannot be combined"),
        (
            {"save_best": ["acc/top", "acc_top"]},
            "'acc/top' and 'acc_top' would be saved under the same name, best_acc_top",
        ),
        (
            {"save_best": ["acc", "loss", "f1"], "rule": ["greater", "less"]},
            "rule: expected one, or one for each .*, got 2",
        ),
        (
            {"save_best": "quality", "greater_keys": "qual", "less_keys": "lity"},
            "both match 'quality': pass rule=",
        ),
        ({"published_keys": 3}, "published_keys must be a string or a list of strings, got 3"),
        *(
            ({"published_keys": keys}, "published_keys must not be empty or have a name twice")
            for keys in ([], ["a", "a"])
        ),
        *(
            ({"filename_tmpl": name}, r"filename_tmpl must have exactly one \{\}")
            for name in ("model.pth", "{}_{}.pth", "{}_{x}.pth", "{}_}.pth")
        ),
        *(
            ({"filename_tmpl": name}, "must be a plain name that does not begin with a dot")
            for name in ("sub/{}.pth", ".{}")
        ),
        ({"overlap": 1}, "overlap must be True or False, got 1"),
        (
            {"when_busy": "skipp"},
            "when_busy must be 'wait' or 'skip' or 'replace', got 'skipp': did you mean 'skip'",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Every option is checked when the hook is built."""
    with pytest.raises((TypeError, ValueError), match=message):
        CheckpointHook(**options)


def test_epochs_in_a_run_of_iterations_are_refused(make_trainer: Make) -> None:
    """`by_epoch=True` in a run of iterations is refused when the trainer is built."""
    with pytest.raises(
        ValueError, match=r"CheckpointHook\(by_epoch=True\) in a run measured in iterations would"
    ):
        make_trainer(max_iters=9, hooks=[CheckpointHook(interval=1, by_epoch=True)])


def test_hooks_that_would_remove_each_others_files(make_trainer: Make, tmp_path: Path) -> None:
    """Two hooks with one directory are refused, whatever their names or spellings of the directory."""

    def hooks(**options: Any) -> list[CheckpointHook]:
        seldom = CheckpointHook(interval=2, **options)
        seldom.name = "seldom"
        return [CheckpointHook(1, max_keep_ckpts=1, out_dir=tmp_path / "often"), seldom]

    with pytest.raises(
        ValueError, match=r"two CheckpointHooks save in .*expected one hook for each.*out_dir"
    ):
        make_trainer(hooks=hooks(out_dir=tmp_path / "x" / ".." / "often", filename_tmpl="seldom_{}"))

    trainer = make_trainer(hooks=hooks(out_dir=tmp_path / "seldom"), max_epochs=2)
    trainer.train()
    assert trainer.checkpoint_dir == tmp_path / "often" / "run"  # of the first hook
    for place in ("often", "seldom"):
        assert [path.name for path in find_checkpoints(tmp_path / place / "run")] == ["epoch_2"]
