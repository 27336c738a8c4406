"""From its main thread's end on Python 3.12 starts no thread, nor does a system that has no more: so it is made here on
any version."""

from __future__ import annotations

import threading

import pytest

REFUSAL = "can't create new thread at interpreter shutdown"

REFUSE = f"""
import threading
def refuse():
    def refusing(thread):
        raise RuntimeError({REFUSAL!r})
    threading.Thread.start = refusing
"""
"""For a script: it calls that from the moment on that no thread starts."""
AT_EXIT = f"""{REFUSE}
import atexit
atexit.register(refuse)
"""
"""For a script, behind its imports: what is registered last is called first."""


def refuse(monkeypatch: pytest.MonkeyPatch, name: str = "eventloop ") -> None:
    """Start no thread any more whose name begins so."""
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError(REFUSAL)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
