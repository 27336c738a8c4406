"""Work on a module as a whole: its forward pass, averages of its weights, BatchNorm statistics.

Start with `forward` or `averages`. The trainer, EMAHook, PreciseBN and OptimizerHook use this package. It may
import `checkpoint`, `data`, `state` and the packages below them, and neither hooks nor the trainer.
"""
