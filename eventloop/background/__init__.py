"""Deliver events off the thread that emits them.

Start with `background`, which creates a queue for each subscriber and runs the event loop of the coroutines.
`queues` has the queue of a subscriber, `runners` the tasks and threads that deliver its events, and `workers`
the worker processes.

Only `eventloop.bus` and writers use it. May import `processes`, `costs`, `events` and `util`, and not torch.
"""
