"""The examples of the bridges run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from tests import forked
from tests.test_examples import EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("host", ["ignite", "lightning", "mmengine", "transformers"])
def test_example(host: str) -> None:
    """The example of a host trains, and its handlers print losses."""
    if find_spec(host) is None:
        pytest.skip(f"{host} is not installed: pip install 'torch-eventloop[{host}]'")

    ran = forked.run([EXAMPLES / f"{host}_bridge.py"], env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert ran.returncode == 0, ran.stderr
    assert "\n31 " in "\n" + ran.stdout


@pytest.mark.slow
def test_lightnings_callbacks_example() -> None:
    """The example of Lightning's callbacks stops by one of them, and prints their rows."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed: pip install 'torch-eventloop[lightning]'")

    path = EXAMPLES / "lightning_callbacks.py"
    ran = forked.run([path], env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert ran.returncode == 0, ran.stderr
    assert "EarlyStopping of Lightning set trainer.should_stop" in ran.stdout
    assert "EarlyStopping.on_train_epoch_end (lightning)" in ran.stdout
