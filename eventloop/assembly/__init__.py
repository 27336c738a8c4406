"""Build a trainer: check its arguments, create its directory, and attach its hooks and writers.

Start with `attach`, which has the default hooks and their order. The package may import the packages below
`evaluation`, and not `training`.
"""
