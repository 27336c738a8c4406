"""Make texts from outside the program safe to show in a terminal. This module imports no torch.

A terminal obeys control characters: a metric's name that contains them could move the cursor, clear the
screen or set its title, and a bidirectional override could show a text in another order. The commands,
`ConsoleWriter` and the log therefore escape these characters.
"""

from __future__ import annotations

import logging
import re

CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""The control characters, as the inside of the brackets of a regular expression.

They are C0 except tab and line feed, DEL, C1, line separators, direction marks and lone surrogates.
"""
_CONTROL = re.compile(f"[{CONTROLS}]")


def printable(text: str) -> str:
    r"""Replace control characters by escapes, such as ESC by `\x1b`. Line feeds and tabs stay.

    A character from DEL on becomes an escape such as `\u009b`, so that an encoded JSON string stays valid.
    Characters before DEL need no such escape, because JSON has escaped them.
    """
    return _CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x20 else f"\\u{number:04x}"


def escape_log_record(record: logging.LogRecord) -> bool:
    """Escape control characters in a log record's message; return True, which lets the record pass."""
    try:
        message = record.getMessage()
    except Exception:  # the logging module reports a message that cannot be formatted
        return True
    if (shown := printable(message)) != message:
        record.msg, record.args = shown, None
    return True


logging.getLogger("eventloop").addFilter(escape_log_record)
