"""Check the arguments and environment variables of `MLflowWriter`, and the names that MLflow accepts."""

from __future__ import annotations

import importlib
import os
import re
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from eventloop.util.text import error_text
from eventloop.writers.tracker_arguments import check_mapping, masked, secrets_of

EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"
"""The environment variable with the name of the experiment."""
NAME_LENGTH = 500
"""The most characters of an experiment's name."""
_DATABASES = ("mssql", "mysql", "postgresql", "sqlite")
"""The schemes of the databases that MLflow supports."""
_DATABRICKS = ("databricks", "databricks-uc", "uc")
"""Tracking URIs without a colon that MLflow takes for a server, not for a folder."""
_SCHEMES = (
    f"MLflow takes the schemes http, https, {', '.join(_DATABASES)}, file, databricks and those of plugins"
)
_REFUSED = re.compile(r"[^\w\-. :/]")
"""Matches a character that MLflow refuses in the names of metrics, parameters and tags."""


ALLOWED = "at most 250 letters, digits and characters of _ - . : / and space, as MLflow does"
"""The rule for names, for errors and warnings."""


def check_requests(lib: Any) -> None:
    """Refuse a timeout or number of retries in the environment with which every request would fail.

    Raises:
        ValueError: the message names the environment variable.
    """
    for name, least in {"MLFLOW_HTTP_REQUEST_TIMEOUT": 1, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": 0}.items():
        try:
            is_valid = getattr(lib.environment_variables, name).get() >= least
        except ValueError:
            is_valid = False
        if not is_valid:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {os.environ[name]!r}")


def check_uri(lib: Any, uri: str, source: str) -> None:
    """Refuse a URI that MLflow cannot use; no request is sent and no file is created.

    Args:
        lib: the module `mlflow`.
        uri: the URI.
        source: the argument or environment variable that has the URI, for the message.

    Raises:
        ImportError: the database needs a package that is not installed.
        ValueError: MLflow or SQLAlchemy refuses the URI. The message has its reason, and no password.
    """
    secrets = secrets_of(uri)
    try:
        _try_uri(lib, uri)
    except ImportError as error:
        raise ImportError(f"{source} {masked(uri, secrets)!r} needs a package: {error}") from None
    except Exception as error:
        reason = str(error) if type(error) is ValueError else error_text(error)
        raise ValueError(
            f"{source} must be a server or a database, such as http://localhost:5000 or "
            f"sqlite:///mlflow.db, got {masked(uri, secrets)!r}: "
            f"{masked(' '.join(reason.split()), secrets)}"
        ) from None


def _try_uri(lib: Any, uri: str) -> None:
    """Raise the error of MLflow, SQLAlchemy or requests about a URI; connect to nothing."""
    parts = urlsplit(uri)
    scheme = uri if uri in _DATABRICKS else parts.scheme.partition("+")[0]
    if scheme in ("http", "https"):
        if parts.query or parts.fragment:
            raise ValueError("a server's URL has no ? and no #")
        importlib.import_module("requests").Request("GET", uri).prepare()
    if scheme in _DATABASES:
        importlib.import_module("sqlalchemy").create_engine(uri)
    elif scheme == "file" or len(scheme) < 2:  # a folder; one letter is a drive of Windows
        with TemporaryDirectory() as folder:
            lib.MlflowClient(folder)  # raises if this MLflow does not accept folders
    elif scheme in ("uc", "databricks-uc"):  # these servers store models, not runs
        raise ValueError(_SCHEMES)
    else:
        try:
            lib.MlflowClient(uri)
        except lib.exceptions.MlflowException as error:
            if "unsupported URI" not in str(error):
                raise
            raise ValueError(_SCHEMES) from None


def is_refused(key: str) -> bool:
    """Return whether MLflow refuses the name of a metric, parameter or tag.

    It refuses a name with other characters than those in `ALLOWED`, with more than 250 characters, or with
    "", "." or ".." as a part between slashes.
    """
    parts = key.split("/")
    return bool(_REFUSED.search(key)) or len(key) > 250 or any(part in ("", ".", "..") for part in parts)


def check_experiment(experiment: str | None) -> None:
    """Refuse an experiment's name, from the argument or the environment, that is too long for MLflow.

    Raises:
        ValueError: the message names the argument or the environment variable.
    """
    name, source = experiment, "experiment"
    if not name:
        name, source = os.environ.get(EXPERIMENT_VARIABLE, ""), EXPERIMENT_VARIABLE
    if len(name) > NAME_LENGTH:
        raise ValueError(f"{source} must have at most {NAME_LENGTH} characters, got {len(name)}")


def check_names(argument: str, value: object) -> dict[str, Any]:
    """Return an argument that is a mapping or None as a dict, after a check that MLflow accepts its keys."""
    mapping = check_mapping(argument, value)
    for key in mapping:
        if is_refused(key):
            raise ValueError(f"the names in {argument} must have {ALLOWED}, got {key!r}")
    return mapping
