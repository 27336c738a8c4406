"""Measure the durations of handlers, phases and iterations, and record them as the costs of a run.

Start with `records`, which defines the record that reports read. The package imports only `events` and
`util`.
"""
