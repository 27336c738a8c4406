"""Compute the metrics of validations and tests, decide when a training validates, and collect predictions.

Start with `evaluation`, which averages the values that a validation step returns. `schedule` decides when a
training validates. `monitored_metrics` checks before a training that the validation reports the metrics that
hooks monitor. `prediction` receives the outputs of a prediction; `outputs` joins them, and `dataset_order`
puts them into the order of the data set. The loop over the batches is in `training`. This package may import
lower packages (`checkpoint`, `data`, `metrics`, `costs` and `util`), and not `training`.
"""
