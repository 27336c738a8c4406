"""Run trainings: the trainer, its loops and its evaluations.

Start with `trainer`, then read `loops`, and `loop_steps`, which has the steps of an iteration.
`evaluation_loop` runs a validation or a test, and `scopes` emits the events that begin and end a run and its
parts. `accumulation`, `mixed_precision`, `outputs` and `update_batches` serve the optimizer hook. The package
may import every package except `hooks`, `writers`, `bridges` and `cli`.
"""
