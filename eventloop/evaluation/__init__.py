"""Evaluate a model: which metrics a validation reports, when a training validates, and predictions.

Start with `evaluation`, which averages what a validation step returns. `schedule` decides when a training
validates. `monitored_metrics` checks before a training that hooks find the metrics they monitor. `prediction`
takes the outputs of a prediction, which `outputs` joins and `dataset_order` sorts. The loop over the batches
is in `training`.
May import lower packages (`checkpoint`, `data`, `metrics`, `costs` and `util`), and not `training`.
"""
