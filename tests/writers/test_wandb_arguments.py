"""WandbWriter: wrong arguments and environment variables."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from eventloop.writers import WandbWriter

if importlib.util.find_spec("wandb") is None:
    pytest.skip(
        "wandb is not installed, so WandbWriter is NOT tested: pip install 'torch-eventloop[wandb]'",
        allow_module_level=True,
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, "WandbWriter needs project, got None: pass project=, or set WANDB_PROJECT"),
        ({"project": 3}, TypeError, "project must be a str, got int"),
        (
            {"project": "a/b"},
            ValueError,
            r"project must have at most 128 characters, none of them .*, got 'a/b'",
        ),
        ({"mode": "later"}, ValueError, "mode must be 'online' or 'offline' or 'disabled', got 'later'"),
        ({"tags": None}, TypeError, "tags must be a list of texts of 1 to 64 characters, got None"),
        ({"config": {1: 2}}, TypeError, "the names in config must be a str, got 1"),
        ({"tags": "x"}, TypeError, "tags must be a list of texts of 1 to 64 characters, got 'x'"),
        ({"best": {"val/acc": "high"}}, ValueError, r"best\['val/acc'\] must be 'min' or 'max', got 'high'"),
        ({"best": ["val/acc"]}, TypeError, "best must be a mapping of names to values, got list"),
        ({"config": 3}, TypeError, "config must be a mapping of names to values, got int"),
        ({"config": {"w": np.ones(2)}}, TypeError, "config must hold numbers, texts, .*, got an array"),
        ({"entity": 3}, TypeError, "entity must be a str or None, got int"),
        ({"entity": "a/b"}, ValueError, "entity must be the name of a user or a team, without /, got 'a/b'"),
        ({"entity": "  "}, ValueError, "entity must be the name of a user or a team, without /, got '  '"),
        ({"group": 3}, TypeError, "group must be a str or None, got int"),
        ({"run_name": 3}, TypeError, "run_name must be a str or None, got int"),
        ({"checkpoints": "no"}, TypeError, "checkpoints must be True or False, got 'no'"),
        ({"offload": "gpu"}, ValueError, "offload must be 'auto' or 'thread' or 'process', got 'gpu'"),
    ],
)
def test_bad_arguments(
    options: dict[str, Any], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong argument is an error where the writer is made."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if options and "project" not in options:
        options = {"project": "digits", **options}

    with pytest.raises(error, match=text):
        WandbWriter(**options)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("WANDB_API_KEY", "s3cr3t\r", r"WANDB_API_KEY must be .*, got '\*\*\*'"),
        ("WANDB_BASE_URL", "ftp://me:s3cr3t'\r@h", r"WANDB_BASE_URL must be .*, got '\*\*\*@h'"),
        ("WANDB_PROJECT", "a/b", "^WANDB_PROJECT must have at most 128 characters, none .*, got 'a/b'"),
        ("WANDB_PROJECT", "  ", "WandbWriter needs project, got WANDB_PROJECT='  ': pass project=, or set"),
        (
            "WANDB_MODE",
            "ofline",
            "WANDB_MODE must be a value that wandb takes, got 'ofline': Input should be 'on",
        ),
        (
            "WANDB_BASE_URL",
            "http://",
            "WANDB_BASE_URL must be .*, got 'http://': Input should be a valid URL, empty",
        ),
        (
            "WANDB_BASE_URL",
            "u:s3cr3t@host",
            r"WANDB_BASE_URL must be .*, got '\*\*\*@host': URL scheme should be",
        ),
        (
            "WANDB_BASE_URL",
            "ftp://h?token=s3cr3t",
            r"WANDB_BASE_URL must be .*, got 'ftp://h\?\*\*\*': URL scheme",
        ),
        (
            "WANDB__EXTRA_HTTP_HEADERS",
            '{"A": "s3cr3t"',
            r"WANDB__EXTRA_HTTP_HEADERS must be .*, got '\*\*\*'",
        ),
        (
            "WANDB_API_KEY",
            " s3cr3t",
            r"WANDB_API_KEY must be .*, got '\*\*\*': API key cannot start or end with",
        ),
    ],
)
def test_a_wrong_value_of_the_environment(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb would refuse it when the run begins, in any mode: it is an error where the writer is made."""
    monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match=text) as caught:
        WandbWriter(None if name == "WANDB_PROJECT" else "digits", mode="offline")

    assert "s3cr3t" not in str(caught.value)


def test_a_wrong_entity_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error where the writer is made, unless it is given another."""
    monkeypatch.setenv("WANDB_ENTITY", "a/b")

    with pytest.raises(ValueError, match=r"WANDB_ENTITY must be the name of a user or a team, .*, got 'a/b'"):
        WandbWriter("digits", mode="offline")

    WandbWriter("digits", entity="team", mode="offline")


def test_a_key_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is too short is an error where the writer is made, without the key; offline none is needed."""
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    monkeypatch.setenv("WANDB_MODE", "online")

    with pytest.raises(
        ValueError, match=r"WANDB_API_KEY must be a key of W&B, got \*\*\* .* 40\+ char"
    ) as caught:
        WandbWriter("digits")

    assert "s3cr3t" not in str(caught.value)
    WandbWriter("digits", mode="offline")
