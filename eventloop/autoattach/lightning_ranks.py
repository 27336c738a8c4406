"""Attach bridges in the rank processes that Lightning starts, in which the script runs again.

Lightning calls `callbacks`, an entry point, for each trainer of any program, so this module imports little.
"""

from __future__ import annotations

import os
from typing import Any

from eventloop.autoattach.options import options_of


def callbacks() -> list[Any]:
    """Return a bridge, but only in a rank process of a training that `eventloop run` has started.

    The command's own process attaches the bridge by itself. A rank process needs one too, because the ranks
    of a run exchange numbers.
    """
    options = options_of(os.environ)
    if options is None or options.pid == os.getpid() or "LOCAL_RANK" not in os.environ:
        return []
    from eventloop.autoattach.attacher import Attacher
    from eventloop.autoattach.hosts import lightning_callback

    callback = lightning_callback(Attacher(options))
    return [] if callback is None else [callback]
