"""Read the files of a run, and show its costs and curves as text or as one HTML page.

Start with `report`, which reads a run's directory. `run_tables` makes the tables of one run, and `comparison`
the tables that compare several runs. `text` draws them for a terminal, `page` with charts as HTML. `diff`
compares two runs statistically. The commands use this package, and the trainer uses `summary`. May import
`tracing` and the packages below it.
"""
