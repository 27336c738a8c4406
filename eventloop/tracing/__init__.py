"""Record a window of iterations in `trace.jsonl`, and convert it for Perfetto.

Start with `window`, which records; `writer` and `file` write and read the file, and `chrome` makes the format
that viewers read. May import `training` and everything below it.
"""
