"""Read the files of a run and show what it cost, as text or as one HTML page.

Start with `report`, which reads a run's directory. `glance` draws the lines that matter; `text` and `html`
draw everything that `tables`, `comparison` and the charts prepare. The commands use this package, and the
trainer uses `summary`. May import `tracing` and everything below it.
"""
