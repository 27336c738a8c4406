"""Copy a training's state and write it while the training continues.

Start with `saver`. `snapshot` copies tensors. `saver_client` sends saves to the process that runs
`saver_process`, which writes them with `eventloop.checkpoint.commit`.

These modules may import the rest of `eventloop.checkpoint` and what it may import.
"""
