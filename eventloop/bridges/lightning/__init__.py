"""Attach a bus to a Lightning training, and run Lightning's callbacks in this engine's `Trainer`.

No module here imports Lightning before an `EventLoopCallback` is created. `foreign` is the adapter for
Lightning's callbacks.
"""

from eventloop.bridges.lightning.callback import EventLoopCallback

__all__ = ["EventLoopCallback"]
