"""Copy a training's state and write it while the training goes on.

Start with `saver`. `snapshot` copies tensors, `saver_process` is the program of the process that writes.
These modules may import the rest of `eventloop.checkpoint` and what it may import.
"""
