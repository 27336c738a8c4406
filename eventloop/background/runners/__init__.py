"""Deliver the events of a subscriber: on a thread, in a task of an event loop, or in a worker process.

Start with `thread_runner`. `eventloop.background.workers` has the worker processes.
May import what `eventloop.background` may.
"""
