"""Keep links from a page to a file outside `docs/` working on the built site, as they do in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def offer_files(app: Any, docname: str, source: list[str]) -> None:
    """Turn links that leave `docs/` into downloads, as the event `source-read` asks; those to folders become text."""
    here, top = Path(app.srcdir, docname).parent, Path(app.srcdir)

    def offered(match: re.Match[str]) -> str:
        path = (here / match["path"]).resolve()
        if match["image"] or path.is_relative_to(top):
            return match[0]
        text = match["text"].replace("`", "")
        return f"{{download}}`{text} <{match['path']}>`" if path.is_file() else text

    parts = FENCED.split(source[0])
    source[0] = "".join(part if part.startswith("```") else OUTSIDE.sub(offered, part) for part in parts)
