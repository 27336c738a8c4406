"""Define and read the event log of a run, and replay it onto a bus or into writers.

Start with `reader` and `replay`; `format` defines the records that EventLogWriter writes, and `jsonl` the
lines of `metrics.jsonl`. `undelivered` stores the events that a run could not deliver, and `redelivery`
delivers them. No module here imports torch. The package may import `registry`, `ownership`, `bus`
and packages below them.
"""
