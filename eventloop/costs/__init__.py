"""Measure handlers, phases and iterations, and record their costs.

Start with `records`, the structs that reports read. Imports only `events` and `util`.
"""
