"""Translate names of other training systems to those of eventloop, for error messages.

Start with `tables`, which has the names. `names` looks them up and raises the errors, and `overrides` refuses
methods that only other systems' trainers call. The package imports only `util`.
"""
