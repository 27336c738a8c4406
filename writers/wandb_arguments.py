"""Check the arguments and environment variables of `WandbWriter`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from eventloop.writers.tracker_arguments import check_texts

_SECRET = ("KEY", "TOKEN", "HEADER", "PROX", "PASSWORD", "SECRET")
"""Parts of the names of environment variables whose values no message may contain."""


def check_environment(lib: Any) -> None:
    """Refuse environment variables that wandb would refuse when the run begins.

    Raises:
        ValueError: the message names the variable and hides a secret in its value.
    """
    for name in [variable for variable in os.environ if variable.startswith("WANDB_")]:
        value = os.environ[name]
        try:
            lib.Settings().update_from_env_vars({name: value})
        except Exception as error:
            reason = error.errors()[0]["msg"] if hasattr(error, "errors") else error  # an error of pydantic
            shown = "***" if any(word in name for word in _SECRET) else _without_secrets(value)
            text = f"{name} must be a value that wandb takes, got {shown!r}"
            raise ValueError(text if value in str(reason) else f"{text}: {reason}") from None


def _without_secrets(value: str) -> str:
    """Return a text with `***` for a login before "@" and for a query after "?", as in a URL."""
    _, at_sign, after_login = value.rpartition("@")
    address, question_mark, _ = after_login.partition("?")
    return ("***@" if at_sign else "") + address + ("?***" if question_mark else "")


def check_key() -> None:
    """Refuse a WANDB_API_KEY that is malformed; only the server can say whether a key is valid.

    Raises:
        ValueError: the message has wandb's reason.
    """
    key = os.environ.get("WANDB_API_KEY")
    with suppress(ImportError):  # this version of wandb has no such module, and checks when the run begins
        validation: Any = import_module("wandb.sdk.lib.wbauth.validation")
        if key and (reason := validation.check_api_key(key)):
            raise ValueError(f"WANDB_API_KEY must be a key of W&B, got *** (in wandb's words: {reason})")


def check_project(project: str, source: str) -> str:
    """Return the name of a project, after a check that W&B accepts it.

    Args:
        project: the name.
        source: the argument or environment variable that has the name, for the message.

    Raises:
        ValueError: the name is too long, or has a character that W&B does not allow.
    """
    if len(project) > 128 or any(character in "/\\#?%:" for character in project):
        raise ValueError(
            f"{source} must have at most 128 characters, none of them / \\ # ? % or :, got {project!r}"
        )
    return project


def check_entity(source: str, entity: str | None) -> None:
    """Refuse an entity that cannot be the name of a user or a team, such as "team/project".

    Args:
        source: the argument or environment variable that has the entity, for the message.
        entity: the entity, or None.

    Raises:
        TypeError: the entity is neither a str nor None.
        ValueError: it is blank or has a "/".
    """
    check_texts(**{source: entity})
    if entity and ("/" in entity or not entity.strip()):
        raise ValueError(f"{source} must be the name of a user or a team, without /, got {entity!r}")


def check_tags(tags: Any) -> list[str]:
    """Return tags as a list; raise a TypeError unless they are texts of 1 to 64 characters."""
    is_list = isinstance(tags, Sequence) and not isinstance(tags, str)
    if not is_list or not all(isinstance(tag, str) and 1 <= len(tag) <= 64 for tag in tags):
        raise TypeError(f"tags must be a list of texts of 1 to 64 characters, got {tags!r}")
    return list(tags)
