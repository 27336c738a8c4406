"""Provide small helpers for text, files, paths, argument checks and waiting.

Every other package may import them; they import only `temporary`.
"""
