"""Translate names of other training systems to names of eventloop, for error messages.

Start with `names`, the tables of arguments, classes and hook methods. `attributes` has the table of a
trainer's attributes. The package imports only `util`.
"""
