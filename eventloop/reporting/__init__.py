"""Read the files of a run and show what it cost, as text or as one HTML page.

Start with `report`, which reads a run's directory. `text` and `html` draw what `tables` and the charts
prepare. Only `eventloop.cli` uses it. May import `tracing` and everything below it.
"""
