"""Measure and record what handlers, phases and iterations cost.

Start with `records`, the structs that reports read. Imports only `events` and `util`.
"""
