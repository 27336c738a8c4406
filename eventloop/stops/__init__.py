"""End a run before its time: requests, signals, and the agreement of several ranks.

Start with `stopping`, which the loops ask at each boundary. `signals` turns SIGTERM and Ctrl-C into requests.
`ending` delivers the events at the end, and `held_loops` ends a hand-written loop.
May import lower packages (`reporting`, `metrics`, `bus`, `events` and `util`), and not `training`.
"""
