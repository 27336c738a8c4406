"""Checking the options of `CheckpointHook`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eventloop.checkpoint import SUFFIXES


def check_options(interval: object, save_begin: object, max_keep: object, template: object) -> None:
    """Refuse what could not be saved by.

    Raises:
        ValueError: see the message.
    """
    for name, value in (("interval", interval), ("max_keep_ckpts", max_keep)):
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise ValueError(f"{name} must be -1 or a positive int, got {value!r}")
    if isinstance(save_begin, bool) or not isinstance(save_begin, int) or save_begin < 0:
        raise ValueError(f"save_begin must be an int of at least 0, got {save_begin!r}")
    if template is not None:
        _check_template(str(template))


def _check_template(template: str) -> None:
    try:
        filled = template.format(1)
    except (LookupError, ValueError):
        filled = ""
    if template.count("{}") != 1 or not filled:
        raise ValueError(f"filename_tmpl must have exactly one {{}} for the number, got {template!r}")
    if Path(filled).name != filled or not filled.endswith(SUFFIXES):
        raise ValueError(
            f"filename_tmpl must be a file's name ending in {', '.join(SUFFIXES)}, so that resume finds it; "
            f"got {template!r}"
        )


def published(keys: object) -> list[str]:
    """The keys to publish.

    Raises:
        TypeError, ValueError: they are no texts, or there are none, or one twice.
    """
    if keys is None:
        return []
    values = [keys] if isinstance(keys, str) else keys
    if not isinstance(values, Sequence) or not all(isinstance(key, str) for key in values):
        raise TypeError(f"published_keys must be a text or a list of them, got {keys!r}")
    if not values or len(set(values)) < len(values):
        raise ValueError(f"published_keys must name something, each once, got {keys!r}")
    return list(values)
