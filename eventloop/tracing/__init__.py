"""Record a window of iterations, and write it as a file that Perfetto and Chrome's tracing open.

Start with `window`, which records; `chrome` makes the events of the file, `files` writes, lists and merges
files. `TraceHook` and `eventloop trace` use it. May import `resume` and everything below it.
"""
