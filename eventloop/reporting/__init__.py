"""Read the files of a run and show what it cost, as text or as one HTML page.

Start with `report`, which reads a run's directory. `run_tables` makes the tables of one run and `comparison`
those of several; `text` draws them for a terminal, and `html` on the page, with the charts. The commands use
this package, and the trainer uses `summary`. May import `tracing` and everything below it.
"""
