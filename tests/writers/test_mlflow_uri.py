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
        ("postgresql://me:s3cr3t[@h/db", r"'postgresql://me:\*\*\*@h/db': Invalid IPv6 URL"),
    ],
)
def test_a_url_that_is_refused_has_no_password(uri: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may have one, and neither the URI nor the library's reason shows it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    with pytest.raises(ValueError, match=f"MLFLOW_TRACKING_URI must be .*, got {shown}") as raised:
        MLflowWriter()
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    "uri", ["htp://x", "localhost:5000", "oracle://h/db", "databricks-uc", "uc:http://x"]
)
@pytest.mark.parametrize("in_environment", [False, True])
def test_a_scheme_that_mlflow_does_not_know(
    uri: str, in_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schemes are listed; MLflow's reason is about its registry of models, or about folders."""
    if in_environment:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    source = "MLFLOW_TRACKING_URI" if in_environment else "tracking_uri"

    with pytest.raises(
        ValueError, match=f"^{source} must be a server or .*, got '{uri}': MLflow takes the schemes http, "
    ) as raised:
        MLflowWriter(None if in_environment else uri)
    assert "egistry" not in str(raised.value)


@pytest.mark.parametrize("uri", ["databricks", "databricks://profile"])
def test_databricks_is_a_server(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow knows it by its name alone, which is no folder."""
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)

    assert MLflowWriter(uri).where() == f" at {uri}"


def test_a_missing_driver_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable with the URI."""
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg2://h/db")

    with pytest.raises(
        ImportError, match=r"^MLFLOW_TRACKING_URI 'postgresql.*://h/db' needs a package: .*psycopg2"
    ):
        MLflowWriter()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "abc", "must be a whole number of at least 1, got 'abc'"),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "0", "must be a whole number of at least 1, got '0'"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "abc", "must be a whole number of at least 0, got 'abc'"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "-1", "must be a whole number of at least 0, got '-1'"),
    ],
)
def test_a_wrong_number_in_the_environment(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request would fail with it."""
    monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match=f"^{name} {text}$"):
        MLflowWriter("http://localhost:5000")

    monkeypatch.setenv(name, "1")
    MLflowWriter("http://localhost:5000")
