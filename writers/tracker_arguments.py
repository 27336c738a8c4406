"""Check the arguments of the writers of experiment trackers, and hide the secrets in them.

The constructors of the writers use it; `TrackerWriter` hides secrets in its messages.
"""

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
"""The endings of the names of URI parameters whose values are secrets."""
_LONG = 6
"""The least length of a secret that is replaced wherever it occurs; a shorter one may be part of a word."""


class Setting(NamedTuple):
    """A value, and the name of the argument or environment variable that has it."""

    value: str
    source: str


def setting(argument: str, value: object, variable: str, service: str) -> Setting:
    """Return the value of an argument, or by default of an environment variable, and its source.

    Args:
        argument: the name of the argument.
        value: its value; None or "" if the argument is not given.
        variable: the name of the environment variable.
        service: the class of the writer, for the message.

    Raises:
        TypeError: the argument is not a str.
        ValueError: the argument and the variable are both missing or blank.
    """
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, got {type(value).__name__}")
    result = Setting(value, argument) if value else Setting(os.environ.get(variable, ""), variable)
    if not result.value.strip():
        got = f"{variable}={result.value!r}" if result.value and not value else repr(value)
        raise ValueError(f"{service} needs {argument}, got {got}: pass {argument}=, or set {variable}")
    return result


def refuse_password(argument: str, uri: object, remedy: str) -> None:
    """Refuse a URI with a password, because arguments are written to files of the run.

    Args:
        argument: the name of the argument.
        uri: its value.
        remedy: where to pass the password instead, such as "in MLFLOW_TRACKING_URI".

    Raises:
        ValueError: the URI has a password, which the message hides.
    """
    if isinstance(uri, str) and (secrets := secrets_of(uri)):
        raise ValueError(
            f"{argument} must not contain a password, got {masked(uri, secrets)}: pass it {remedy}"
        )


def secrets_of(uri: str) -> list[str]:
    """Return the secrets in a URI, as written: the password, and values of parameters such as `?api_key=`."""
    secrets: list[str | None]
    try:
        parts = urlsplit(uri)
        parameters = (parameter.partition("=") for parameter in parts.query.split("&"))
        secrets = [value for name, _, value in parameters if name.lower().endswith(_SECRET)]
        secrets.append(parts.password)
    except ValueError:  # for example a password with a bracket
        secrets = re.findall(r"://[^:@]*:(.+)@", uri)
    return [secret for secret in secrets if secret]


def secrets_of_headers(headers: Mapping[str, str]) -> list[str]:
    """Return the secrets in HTTP headers, each in every form that a server may repeat in an error.

    These are the whole values, the keys after a scheme such as `Bearer`, and the passwords that `Basic`
    encodes.
    """
    secrets = [*headers.values()]
    for value in headers.values():
        scheme, _, key = value.partition(" ")
        secrets.append(key.strip())
        if scheme.lower() == "basic":
            with suppress(ValueError):  # not base64
                secrets.append(b64decode(key).decode().partition(":")[2])
    return [secret for secret in secrets if secret]


def basic_login(user: str, password: str) -> str:
    """Return user and password as HTTP's `Basic` header encodes them; a server may repeat this text."""
    return b64encode(f"{user}:{password}".encode()).decode()


def masked(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with `***` for each secret, both as it is and with its `%XX` escapes decoded.

    A secret of less than 6 characters is replaced only in `name: secret`, `name=secret` and `user:secret@`.
    """
    # the longest first: a shorter secret may be a part of it, and would leave the rest readable
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for form in {secret, unquote(secret)}:
            pattern = re.escape(form)
            if len(form) < _LONG:
                pattern = rf"(?:(?<=: )|(?<==)){pattern}(?!\w)|(?<=:){pattern}(?=@)"
            text = re.sub(pattern, "***", text)
    return text


def set_options(made_with: partial[Any] | None, *, secret: Sequence[str] = ()) -> str:
    """Return a writer's arguments as options of `eventloop replay`, such as " --set project=digits".

    Only texts and lists become options. A mapping, such as a config, is left out, because it may be long or
    hold a key. The command line has no form for other values.

    Args:
        made_with: the class and the arguments of the writer; None gives "".
        secret: names of arguments to leave out.
    """
    if made_with is None:
        return ""
    arguments = inspect.signature(made_with.func).bind(*made_with.args, **made_with.keywords).arguments
    options = []
    for name, value in arguments.items():
        text = None if name in ("offload", *secret) else _option_text(value)
        if text is not None:
            options.append(f" --set {quote(f'{name}={text}')}")
    return "".join(options)


def _option_text(value: object) -> str | None:
    """Return a text or list as the value of an option on the command line; None for any other value."""
    if not isinstance(value, str | list | tuple):
        return None
    try:
        return text_of(encodable(value))
    except (NoPlainValue, TypeError, ValueError):  # a list of values that the command line has no form for
        return None


def check_texts(**texts: object) -> None:
    """Refuse arguments that are neither a str nor None.

    Raises:
        TypeError: the message names the argument and its type.
    """
    for name, text in texts.items():
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name} must be a str or None, got {type(text).__name__}")


def check_mapping(name: str, value: object) -> dict[str, Any]:
    """Return a copy of an argument that is a mapping with texts as keys; an empty dict for None.

    Raises:
        TypeError: the argument is no mapping, or a key is not a str.
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
    """Return the settings of a run as numbers, texts, lists and mappings; other objects become texts.

    Raises:
        TypeError: `config` is no mapping with texts as keys, or holds an array of several elements.
    """
    settings = check_mapping("config", config)
    try:
        plain: dict[str, Any] = encodable(settings)
    except NoPlainValue as error:
        raise TypeError(
            f"config must hold numbers, texts, lists and mappings, got an array: {error}"
        ) from None
    return plain
