"""Attach a bus to a runner of MMEngine, and run MMEngine's hooks in this engine's `Trainer`.

`hook` imports MMEngine; `foreign` is the adapter for its hooks. May import what `bridges` may.
"""

from eventloop.bridges.mmengine.hook import EventLoopHook

__all__ = ["EventLoopHook"]
