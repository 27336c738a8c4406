"""Attach a bus to an engine of pytorch-ignite, and run ignite's handlers in this engine's `Trainer`.

`attaching` imports ignite; `foreign` is the adapter for its handlers. May import what `bridges` may.
"""

from eventloop.bridges.ignite.attaching import attach, bridge_of, bridge_to

__all__ = ["attach", "bridge_of", "bridge_to"]
