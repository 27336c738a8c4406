"""Turn texts into safe names of files, and check names that were read from a file.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from eventloop.util.printable import CONTROLS

LONGEST = 128
"""The largest number of bytes in a name.

File systems allow 255; the rest is left for a prefix, a suffix and a number.
"""
_UNSAFE = re.compile(rf'[{CONTROLS}\t\n%<>:"/\\|?*]|^\.|[. ]\Z')


def safe_name(text: str) -> str:
    """Turn any text into a valid name of a file or folder; different texts give different names.

    Separators, control characters, a leading dot and characters that some file systems refuse are escaped as
    in a URL: `%2F`. In a long name a hash of the text replaces the end.
    """
    name = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text) or "%"
    if len(encoded := name.encode()) <= LONGEST:
        return name
    digits = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{encoded[: LONGEST - 18].decode(errors='ignore')}%%{digits}"  # no other name has "%%"


def is_plain_name(name: object) -> bool:
    """Return whether a value is the name of a file within a folder, not empty and without a leading dot."""
    return (
        isinstance(name, str) and name[:1] not in ("", ".") and "\0" not in name and Path(name).name == name
    )
