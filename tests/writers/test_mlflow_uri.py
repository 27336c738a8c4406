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


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql+nope://me:s3cr3t@h/db", r"'postgresql\+nope://me:\*\*\*@h/db': NoSuchModuleError"),
        ("postgresql://me:s3cr3t[@h/db", r"'postgresql://me:\*\*\*@h/db': Invalid IPv6 URL"),
    ],
)
def test_a_url_that_is_refused_has_no_password(uri: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may have one, and neither the URI nor the library's reason shows it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(ValueError, match=f"MLFLOW_TRACKING_URI must be .*, got {shown}") as raised:
        MLflowWriter()
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize("uri", ["htp://x", "oracle://h/db", "databricks-uc"])
def test_a_scheme_that_mlflow_does_not_know(uri: str) -> None:
    """The schemes are listed; MLflow's reason is about its registry of models, or about folders."""
    with pytest.raises(ValueError, match=f"^tracking_uri must be .*, got '{uri}': .*http, ") as raised:
        MLflowWriter(uri)
    assert "egistry" not in str(raised.value)


@pytest.mark.parametrize("uri", ["databricks", "databricks://profile"])
def test_databricks_is_a_server(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow knows it by its name alone, which is no folder."""
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)

    assert MLflowWriter(uri).where() == f" at {uri}"


@pytest.mark.parametrize("source", ["tracking_uri", "MLFLOW_TRACKING_URI"])
def test_a_missing_driver(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the argument or the variable, and the driver; the database is not opened."""
    uri = "postgresql+psycopg2://h/db"
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(ImportError, match=rf"^{source} 'postgresql.*://h/db' needs a package: .*psycopg2"):
        MLflowWriter(uri if source == "tracking_uri" else None)


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "abc", 1),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "0", 1),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "-1", 0),
    ],
)
def test_a_wrong_number_in_the_environment(
    name: str, value: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request would fail with it."""
    monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match=f"^{name} must be .* at least {least}, got '{value}'"):
        MLflowWriter("http://localhost:5000")

    monkeypatch.setenv(name, "1")
    MLflowWriter("http://localhost:5000")
