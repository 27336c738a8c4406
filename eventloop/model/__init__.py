"""Act on a module as a whole: averages of its weights, BatchNorm statistics, unused parameters.

Start with `averages`. EMAHook, PreciseBNHook and OptimizerHook use this package. It may import `checkpoint`,
`data`, `state` and the packages below them, and neither hooks nor the trainer.
"""
