"""Support one or several optimizers, and schedule the values of their param groups.

Start with `schedulers`, MMEngine's parameter schedulers, built on `windows`; `optimizers` names and checks
optimizers, and `optimizer_states` loads their states. `policies` and `clipping` serve the hooks of mmcv's
policies and the optimizer hook. Imports `registry`, `state` and `util`.
"""
