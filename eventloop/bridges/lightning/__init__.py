"""Attach a bus to a Lightning training, and run Lightning's callbacks in this engine's `Trainer`.

No module here imports Lightning before a callback is created. `foreign` is the adapter for its callbacks.
"""

from eventloop.bridges.lightning.callback import EventLoopCallback

__all__ = ["EventLoopCallback"]
