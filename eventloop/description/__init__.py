"""Describe what a run was begun with, in `run.json`: its options, model, machine, versions and commit.

Start with `record`, which has the format of the file. `plain_values` makes settings fit for JSON, `commit`
finds the git commit of the program. `assembly.description` fills the record of a trainer. May import `util`
and `temporary`.
"""
