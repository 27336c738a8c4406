"""Save and restore the position in a data loader and the random state that belongs to it.

Start with `position`, which the trainer uses. `readers` chooses a reader for each kind of loader: an object
that opens a pass over it without the batches that were already trained on. `loader_state` and `rng` save and
restore random states. `trainer_parts` describes the trainer for this package and the packages above it. The
package may import `optim`, `metrics`, `state` and the packages below them.
"""
