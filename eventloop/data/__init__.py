"""Save and restore the position in a data loader and the random state that belongs to it.

Start with `position`, which the trainer uses. `readers` chooses a reader for each kind of loader, which skips
the batches that were already trained on; `loader_state` and `rng` save and restore random states;
`trainer_parts` describes the trainer for this package and those above it. The package may import `optim`,
`metrics`, `state` and the packages below them.
"""
