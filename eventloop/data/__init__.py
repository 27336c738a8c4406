"""Find the place in a data loader again, and the random state that goes with it.

Start with `position`. A reader for each kind of loader skips the batches that were trained on; `rng` saves generators.
"""
