"""Compare the costs of two runs with statistics, and find regressions: `eventloop report A B --diff`.

Start with `comparing.compare`. `series` takes the values of each phase and handler over a run from a cost
record, `bootstrap` has the statistics, and `text` draws the result. May import `reporting` and everything
below it.
"""
