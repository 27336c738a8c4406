"""The URIs that `MLflowWriter` refuses where it is made, beside the bad arguments in `test_mlflow`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("sqlalchemy") is None:
    pytest.skip(
        "mlflow is not installed, so MLflowWriter is NOT tested: pip install 'torch-eventloop[mlflow]'",
        allow_module_level=True,
    )

from eventloop.writers import MLflowWriter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("folder", ["mlruns", "file:mlruns", "C:\\mlruns"])
def test_a_folder_is_refused_unless_mlflow_takes_it(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow decides, and the message has its reason; no folder is made before the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)

    with pytest.raises(ValueError, match=r"tracking_uri must be .*mlruns': .*MLFLOW_ALLOW_FILE_STORE=true"):
        MLflowWriter(folder)

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MLflowWriter(folder)
    assert [*tmp_path.iterdir()] == []


def test_a_database_without_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver that is not installed is named where the writer is made; the database is not opened."""
    monkeypatch.setitem(sys.modules, "psycopg2", None)

    with pytest.raises(ImportError, match=r"tracking_uri 'postgresql.*://h/db' needs a package: .*psycopg2"):
        MLflowWriter("postgresql+psycopg2://h/db")


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql+nope://me:s3cr3t@h/db", r"'postgresql\+nope://me:\*\*\*@h/db': NoSuchModuleError"),
        ("postgresql://me:s3cr3t[@h/db", r"'postgresql://me:\*\*\*@h/db': ValueError: Invalid IPv6 URL"),
    ],
)
def test_a_url_that_is_refused_has_no_password(uri: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may have one, and neither the URI nor the library's reason shows it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(ValueError, match=f"tracking_uri must be .*, got {shown}") as raised:
        MLflowWriter()
    assert "s3cr3t" not in str(raised.value)
