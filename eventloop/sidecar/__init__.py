"""Validate the checkpoints of a run in another process, and report the metrics to the run.

Start with `evaluator`, which validates each durable checkpoint once. `building` builds the trainer, `reports`
sends the metrics and finds those that were sent before, `outstanding` finds the checkpoints. `child` starts
an evaluator as a child process of a training; the child runs `program`. The package may import `training` and
the packages below it; `child`, `reports` and `outstanding` import no torch.
"""
