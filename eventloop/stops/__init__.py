"""End a run before its planned end: requests to stop, signals, and the agreement of several ranks.

Start with `stopping`, which the loops poll at each boundary, that is at the end of an iteration, a pass or an
evaluation. `signals` turns SIGTERM and Ctrl-C into requests. `rank_stop` makes all ranks stop at the same
iteration, and `rank_times` compares their times with the same messages. `ending` delivers the events at the
end, `requeue` puts a Slurm job back into the queue after it, and `held_loops` ends a hand-written loop. The
package may import lower packages (`reporting`, `metrics`, `bus`, `events` and `util`), and not `training`.
"""
