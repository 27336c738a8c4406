"""Describe a run in `run.json`: its options, model, machine, versions and commit when it began.

Start with `record`, which has the format of the file. `plain_values` converts settings for JSON, and `commit`
finds the git commit of the program. `assembly.description` makes the record of a trainer. May import `util`
and `temporary`.
"""
