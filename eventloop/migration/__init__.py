"""Translate names of other training systems to names of eventloop, for error messages.

Start with `tables`, which holds the names; `names` looks them up and raises the errors. The package imports
only `util`.
"""
