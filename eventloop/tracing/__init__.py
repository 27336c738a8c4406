"""Record a window of iterations, and write it to a file that Perfetto and Chrome's tracing open.

Start with `window`, which records. `chrome` converts the recording to the file's format, `files` writes,
lists and merges files, and `ranks` merges the files of several ranks. `TraceHook` and `eventloop trace` use
the package. It may import `resume` and the packages below it.
"""
