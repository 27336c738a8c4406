"""Run trainings: the trainer, its loops and its evaluations.

Start with `trainer`, then `loops`, and `loop_steps`, which has the iteration.
May import every package except `hooks`, `writers`, `bridges` and `cli`.
"""
