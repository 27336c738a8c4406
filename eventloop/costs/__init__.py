"""Measure the durations of handlers, phases and iterations, and record them as the costs of a run.

Start with `records`, the structs that reports read. Imports only `events` and `util`.
"""
