"""Write and read files of events, and replay them onto a bus or a writer.

Start with `reader` and `replay`; `format` defines the records.
"""
