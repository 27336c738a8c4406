"""Deliver events off the thread that emits them.

Start with `loop`: one thread with an event loop, which routes events to the queues of their subscribers. Imports no torch.
"""
