"""Translate names of other training systems, for error messages.

Start with `names`, the table.
"""
