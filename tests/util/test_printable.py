"""Texts from elsewhere, as a terminal may show them."""

from __future__ import annotations

import json
import logging
import unicodedata

import pytest

from eventloop.util.printable import printable

BIDI = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


def test_controls_are_escapes() -> None:
    """All of C0 but line feed and tab, DEL, C1 and what changes the direction; letters and emoji stay."""
    everything = "".join(map(chr, range(0x30000)))

    shown = printable(everything)

    left = {
        c
        for c in shown
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in BIDI
    }
    assert left == {"\n", "\t"}
    kept = "größer 数字 👩\u200d🔬 [bold]\n\tx\\x1b"
    assert printable(kept) == kept
    assert printable("\x1b[31m\r\x7f\x9b\u202e") == r"\x1b[31m\x0d\u007f\u009b\u202e"


def test_json_stays_the_same_value() -> None:
    """What an encoder leaves in a string of JSON becomes an escape of JSON."""
    text = json.dumps({"\x9b\u202e\x1b": "\x7f\n"}, ensure_ascii=False)

    assert json.loads(printable(text)) == json.loads(text)
    assert printable(text).isascii()


def test_a_log_line_is_printable(caplog: pytest.LogCaptureFixture) -> None:
    """Names of another program's files are in messages of the log."""
    logging.getLogger("eventloop").warning("passed over: %s, %d", "run\x1b[2J", 3)

    assert caplog.messages == [r"passed over: run\x1b[2J, 3"]
