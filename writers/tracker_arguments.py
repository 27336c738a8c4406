"""Check the arguments of the writers of experiment trackers, where a writer is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit


def setting(argument: str, value: object, variable: str, service: str) -> str:
    """Return an argument, or else the environment variable that stands for it.

    Raises:
        TypeError: the argument is not a str.
        ValueError: neither is given.
    """
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, got {type(value).__name__}")
    if not (found := value or os.environ.get(variable)):
        raise ValueError(f"{service} needs {argument}, got {value!r}: pass {argument}=, or set {variable}")
    return found


def refuse_password(argument: str, uri: object, remedy: str) -> None:
    """Refuse a URI with a password, because arguments are written to files of the run.

    Raises:
        ValueError: the message has the URI without the password.
    """
    if isinstance(uri, str) and (password := password_of(uri)):
        raise ValueError(
            f"{argument} must not contain a password, got {uri.replace(password, '***')}: pass it {remedy}"
        )


def password_of(uri: str) -> str | None:
    """Return the password in a URI, None if it has none or cannot be read."""
    try:
        return urlsplit(uri).password
    except ValueError:
        return None


def check_texts(**texts: object) -> None:
    """Refuse arguments that are neither a str nor None.

    Raises:
        TypeError: naming the argument and its type.
    """
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name} must be a str or None, got {type(text).__name__}")


def check_mapping(name: str, value: object) -> dict[str, Any]:
    """Return a copy of a mapping with texts as keys; an empty one for None.

    Raises:
        TypeError: naming the argument and what it is.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be a mapping of names to values, got {type(value).__name__}")
    return dict(value)
