"""Keep the pages for maintainers out of the menu and the search of the built site."""

from __future__ import annotations

from typing import Any

PAGES = ("dev/", "architecture", "contributing")
"""How the names of these pages begin."""


def allow_without_menu(app: Any, env: Any) -> None:
    """Mark the pages as in no menu on purpose, as the event `env-updated` asks; else each is a warning."""
    for page in env.all_docs:
        if page.startswith(PAGES):
            env.metadata[page]["orphan"] = True


def remove_from_search(app: Any) -> list[Any]:
    """Remove the pages from the search index before it is written, at `html-collect-pages`; add no page."""
    app.builder.indexer.prune([page for page in app.env.all_docs if not page.startswith(PAGES)])
    return []
