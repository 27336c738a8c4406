"""Run trainings: the trainer, its loops and its evaluations.

Start with `trainer`, then read `loops`, which runs a training, and `loop_steps`, the steps of an iteration.
`evaluation_loop` runs a validation or a test, and `scopes` emits the events that begin and end a run and its
parts. The optimizer hook uses `accumulation`, `mixed_precision`, `outputs` and `update_batches`. The package
may import every package except `hooks`, `writers`, `bridges` and `cli`.
"""
