"""The examples of the bridges run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from tests import forked
from tests.test_examples import EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("host", ["ignite", "mmengine", "transformers"])
def test_example(host: str) -> None:
    """The example of a host trains, and its handlers print losses."""
    if find_spec(host) is None:
        pytest.skip(f"{host} is not installed: pip install 'torch-eventloop[{host}]'")

    ran = forked.run([EXAMPLES / f"{host}_bridge.py"], env={**os.environ, "PYTHONPATH": forked.ROOT})

    assert ran.returncode == 0, ran.stderr
    assert "\n31 " in "\n" + ran.stdout
