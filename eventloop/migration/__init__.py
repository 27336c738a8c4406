"""Explain names of other training systems: what is called what here.

Start with `names`, the table.
"""
