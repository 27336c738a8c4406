"""Hold small helpers for text, files, paths, argument checks and waiting.

Every other package may use them. They import nothing of eventloop.
"""
