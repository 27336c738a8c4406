"""End a run before its planned end: requests to stop, signals, and the agreement of several ranks.

Start with `stopping`, which the loops call at each boundary, that is at the end of an iteration, a pass or an
evaluation. `signals` turns SIGTERM and Ctrl-C into requests. `rank_stop` makes all ranks stop at the same
iteration, and `rank_times` compares the ranks' times with the same messages. `ending` delivers the events at
the end of a run, then `requeue` puts a Slurm job back into the queue. `held_loops` ends a hand-written loop.
This package may import lower packages (`reporting`, `metrics`, `bus`, `events` and `util`), not `training`.
"""
