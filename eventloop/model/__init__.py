"""Run, average and measure a whole module: forward pass, averages of weights, BatchNorm statistics.

Start with `forward` or `averages`. The trainer, EMAHook, PreciseBN and OptimizerHook use this package. It may
import `checkpoint`, `data`, `state` and the packages below them, and neither hooks nor the trainer.
"""
