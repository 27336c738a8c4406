"""Convert texts to safe names of files, and check names that were read from a file.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from eventloop.util.printable import CONTROLS

LONGEST = 128
"""The largest number of bytes in a name that `safe_name` returns.

File systems allow 255, which leaves room for a prefix, a suffix and a number.
"""
_UNSAFE = re.compile(rf'[{CONTROLS}\t\n%<>:"/\\|?*]|^\.|[. ]\Z')


def safe_name(text: str) -> str:
    """Convert any text to a valid name of a file or folder; different texts give different names.

    Separators, control characters, a leading dot and characters that some file systems refuse are escaped as
    in a URL, "/" as `%2F`. If the name is longer than `LONGEST` bytes, a hash of the text replaces its end.
    """
    name = _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text) or "%"
    if len(encoded := name.encode()) <= LONGEST:
        return name
    digits = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    # no shorter name contains "%%", because a "%" in the text is escaped
    return f"{encoded[: LONGEST - 18].decode(errors='ignore')}%%{digits}"


def is_plain_name(name: object) -> bool:
    """Return whether a value is a file's name without a folder, not empty and without a leading dot."""
    if not isinstance(name, str) or not name or name.startswith(".") or "\0" in name:
        return False
    return Path(name).name == name
