"""Run trainings: the trainer, its loops, evaluation and stops.

Start with `trainer`, then `loops`, which has the iteration.
May import every package except `hooks`, `writers` and `cli`.
"""
