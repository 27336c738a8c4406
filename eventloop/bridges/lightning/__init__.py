"""Attach a bus to a Lightning training, and run Lightning's callbacks in this engine's `Trainer`.

Nothing here imports Lightning before a callback is made. `foreign` is the adapter for its callbacks.
"""

from eventloop.bridges.lightning.callback import EventLoopCallback

__all__ = ["EventLoopCallback"]
