"""Build a trainer from its arguments: check them, create its directory, build and attach hooks and writers.

Start with `attach`, which has the default hooks and their order.

May import the packages below `evaluation`, and not `training`.
"""
