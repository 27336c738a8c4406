"""Attach a bus to a training of Transformers, and run its callbacks in this engine's `Trainer`.

`callback` imports Transformers; `foreign` is the adapter for its callbacks. May import what `bridges` may.
"""

from eventloop.bridges.transformers.callback import EventLoopCallback

__all__ = ["EventLoopCallback"]
