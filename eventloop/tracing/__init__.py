"""Record the spans of a window of iterations, and convert them for Perfetto.

Start with `window`; `chrome` writes the format that viewers read.
"""
