"""Evaluate a model: compute the metrics of a validation, and decide when a training validates.

Start with `evaluation`, which averages the results of validation steps. `schedule` decides when a training
validates. `monitored_metrics` checks before a training that hooks find the metrics they monitor. The loop
over the batches is in `training`.

May import lower packages (`checkpoint`, `data`, `metrics`, `costs` and `util`), and not `training`.
"""
