"""Turn a trainer's state into a checkpoint and a checkpoint into a trainer's state.

Start with `state`. `settings` compares what a run was built with.
"""
