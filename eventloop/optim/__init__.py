"""Support one or several optimizers, and schedule the values of their param groups.

Start with `schedulers`, MMEngine's parameter schedulers, built on `windows`: a window lets a PyTorch
scheduler run from one step of the run to another. `optimizers` names and checks optimizers, and
`optimizer_states` loads their states. `policies` has the formulas of mmcv's hooks that set learning rates and
momenta, and `clipping` clips gradients for the optimizer hook. The package imports `registry`, `state` and
`util`.
"""
