"""Check the arguments of the writers of experiment trackers, where a writer is made."""

from __future__ import annotations

import inspect
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from shlex import quote
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from eventloop.eventlog.set_values import text_of
from eventloop.writers.plain import NoPlainValue, encodable

_SECRET = ("password", "passwd", "pwd", "token", "secret", "key")
"""What the name of a parameter in a URI ends with if its value is a secret."""
_LONG = 6
"""The length from which a secret is replaced wherever it is; a shorter one is a part of other words, too."""


class Setting(NamedTuple):
    """A value, and the argument or the environment variable that it comes from, for messages."""

    value: str
    source: str


def setting(argument: str, value: object, variable: str, service: str) -> Setting:
    """Return an argument, or else the environment variable that stands for it.

    Raises:
        TypeError: the argument is not a str.
        ValueError: neither is given.
    """
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, got {type(value).__name__}")
    found = Setting(value, argument) if value else Setting(os.environ.get(variable, ""), variable)
    if not found.value.strip():
        got = f"{variable}={found.value!r}" if found.value and not value else repr(value)
        raise ValueError(f"{service} needs {argument}, got {got}: pass {argument}=, or set {variable}")
    return found


def refuse_password(argument: str, uri: object, remedy: str) -> None:
    """Refuse a URI with a password, because arguments are written to files of the run.

    Raises:
        ValueError: the message has the URI without the password.
    """
    if isinstance(uri, str) and (found := secrets_of(uri)):
        raise ValueError(
            f"{argument} must not contain a password, got {masked(uri, found)}: pass it {remedy}"
        )


def secrets_of(uri: str) -> list[str]:
    """Return the secrets in a URI, as written: the password, and values of parameters such as `?api_key=`."""
    try:
        parts = urlsplit(uri)
        pairs = (pair.partition("=") for pair in parts.query.split("&"))
        found = [parts.password, *(value for name, _, value in pairs if name.lower().endswith(_SECRET))]
    except ValueError:  # such as a password with a bracket
        found = re.findall(r"://[^:@]*:(.+)@", uri)
    return [text for text in found if text]


def secrets_of_headers(headers: Mapping[str, str]) -> list[str]:
    """Return the secrets in HTTP headers, each in every form in which a server may repeat it.

    They are the whole values, the keys after a scheme such as `Bearer`, and the passwords that `Basic`
    encodes.
    """
    found = [*headers.values()]
    for scheme, _, key in [value.partition(" ") for value in headers.values()]:
        found.append(key.strip())
        if scheme.lower() == "basic":
            with suppress(ValueError):  # not base64
                found.append(b64decode(key).decode().partition(":")[2])
    return [text for text in found if text]


def basic_login(user: str, password: str) -> str:
    """Return a login as the header of HTTP's `Basic` has it, which a server may repeat."""
    return b64encode(f"{user}:{password}".encode()).decode()


def masked(text: str, secrets: Iterable[str]) -> str:
    """Replace secrets in a text, as they are and as a URI has them.

    A secret of less than 6 characters is replaced only in `name: secret`, `name=secret` and `user:secret@`.
    """
    for secret in filter(None, secrets):
        for form in {secret, unquote(secret)}:
            found = re.escape(form)
            if len(form) < _LONG:
                found = rf"(?:(?<=: )|(?<==)){found}(?!\w)|(?<=:){found}(?=@)"
            text = re.sub(found, "***", text)
    return text


def set_options(made_with: partial[Any] | None, *, secret: Sequence[str] = ()) -> str:
    """Return a writer's arguments as options of a replay, such as " --set project=digits".

    They are the texts and lists among the arguments. A mapping, such as a config, is left out, because it may
    be long or hold a key; other values have no form in an option.

    Args:
        made_with: makes a writer with the same arguments; None gives "".
        secret: names of arguments to leave out.
    """
    if made_with is None:
        return ""
    given = inspect.signature(made_with.func).bind(*made_with.args, **made_with.keywords).arguments
    left_out = {"offload", *secret}
    texts = {name: _option_text(value) for name, value in given.items() if name not in left_out}
    return "".join(f" --set {quote(f'{name}={text}')}" for name, text in texts.items() if text is not None)


def _option_text(value: object) -> str | None:
    """Return an argument as the text of an option; None if it has no form there."""
    if not isinstance(value, str | list | tuple):
        return None
    try:
        return text_of(encodable(value))
    except (NoPlainValue, TypeError, ValueError):  # of a writer that checks its arguments less strictly
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
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of names to values, got {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"the names in {name} must be a str, got {key!r}")
    return dict(value)


def check_config(config: object) -> dict[str, Any]:
    """Return the settings of a run as plain values, which each tracker can encode; others become texts.

    Raises:
        TypeError: it is no mapping of texts, or holds a tensor or an array.
    """
    given = check_mapping("config", config)
    try:
        plain: dict[str, Any] = encodable(given)
    except NoPlainValue as error:
        raise TypeError(
            f"config must hold numbers, texts, lists and mappings, got an array: {error}"
        ) from None
    return plain
