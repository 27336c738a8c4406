"""Deliver events off the thread that emits them.

Start with `background`, which creates a queue for each subscriber and runs the event loop of the coroutines.
`queues` has the subscriber with its account and its queue, `runners` the threads and tasks that deliver its
events, `workers` the worker processes, and `closing` the end.

Only `eventloop.bus` and writers use it. May import `processes`, `costs`, `events` and `util`, and not torch.
"""
