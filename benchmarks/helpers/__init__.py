"""What the benchmarks share: timing, processes that take turns, the systems that are compared, and the pages of results.

A script in `benchmarks/` answers one question; no helper imports a script.
"""
