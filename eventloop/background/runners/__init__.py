"""Deliver the events of a subscriber on a thread, or in a task of an event loop.

Start with `thread_runner`. `eventloop.background.workers` delivers in worker processes. The package may
import the packages that `eventloop.background` may.
"""
