"""Validate and test a model: when, on which metrics, and whether they are there before the training begins.

Start with `evaluation`, which averages what a validation step returns. `schedule` decides when a training validates.
The loop over the batches is in `training`.
"""
