"""Attach bridges in the rank processes that Lightning starts, each of which runs the script again.

Lightning calls the entry point `callbacks` for each trainer of any program, so this module imports little.
"""

from __future__ import annotations

import os
from typing import Any

from eventloop.autoattach.options import options_of


def callbacks() -> list[Any]:
    """Return a list with a bridge in a rank process that a script under `eventloop run` has started, else [].

    In the process of `eventloop run`, `hosts` attaches the bridge. Every rank needs one, because the bridges
    of the ranks exchange numbers.
    """
    options = options_of(os.environ)
    if options is None or options.pid == os.getpid() or "LOCAL_RANK" not in os.environ:
        return []
    from eventloop.autoattach.attacher import Attacher
    from eventloop.autoattach.hosts import lightning_callback

    callback = lightning_callback(Attacher(options))
    return [] if callback is None else [callback]
