"""Step optimizers and schedule their parameters.

Start with `schedulers`, MMEngine's parameter schedulers; `optimizers` serves one optimizer or several by name.
"""
