"""Texts as names of files: made safe where a path is made of them, checked where they come from a file.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from eventloop.util.printable import CONTROLS

LONGEST = 128
"""The most bytes of a name. File systems allow 255; the rest leaves room for a prefix, a suffix and a number."""
_UNSAFE = re.compile(rf'[{CONTROLS}\t\n%<>:"/\\|?*]|^\.|[. ]\Z')


def safe_name(text: str) -> str:
    """Turn any text into the name of one file or folder, another text into another name.

    Separators, control characters, a dot in front and what some file systems refuse are escaped as in a URL: `%2F`.
    The end of a long name is replaced by a hash of the text.
    """
    name = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text) or "%"
    if len(encoded := name.encode()) <= LONGEST:
        return name
    digits = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{encoded[: LONGEST - 18].decode(errors='ignore')}%%{digits}"  # no other name has "%%"


def is_plain_name(name: object) -> bool:
    """Tell whether this is the name of something in a folder: no path, not empty, and no dot in front."""
    return (
        isinstance(name, str) and name[:1] not in ("", ".") and "\0" not in name and Path(name).name == name
    )
