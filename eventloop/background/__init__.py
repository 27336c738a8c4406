"""Deliver events to background subscribers, on threads other than the emitting thread.

Start with `background`, which creates the queue of each subscriber and the thread that supervises the queues.
`queues` defines a subscriber with its counts and its queue, `runners` the threads and tasks that deliver its
events, and `workers` the worker processes. `closing` flushes and closes all subscribers.

Only `eventloop.bus` and writers use it. It may import `processes`, `costs`, `events` and `util`, not torch.
"""
