"""Compare the costs and the scores of two runs with statistics: `eventloop report A B --diff`.

Start with `comparing.compare`, which finds regressions, and `scores.compare_scores`. `series` takes the
values of each phase and handler over a run from a cost record, `bootstrap` has the statistics, and `text`
draws the result. May import `reporting` and the packages below it.
"""
