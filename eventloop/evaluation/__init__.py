"""Evaluate a model: which metrics a validation reports, and when a training validates.

Start with `evaluation`, which averages what a validation step returns. `schedule` decides when a training
validates. `monitored_metrics` checks before a training that hooks find the metrics they monitor. The loop
over the batches is in `training`.
May import lower packages (`checkpoint`, `data`, `metrics`, `costs` and `util`), and not `training`.
"""
