"""End a run before its time: requests, signals, and the agreement of several ranks.

Start with `stopping`, which the loops ask at each boundary. `signals` turns SIGTERM and Ctrl-C into requests.
May import lower packages (`metrics`, `bus`, `events` and `util`), and not `training`.
"""
