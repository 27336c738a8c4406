"""Deliver events off the thread that emits them.

Start with `loop`: one thread with an event loop routes events to the queues of their subscribers. `queues`
has the queue of a subscriber, `runners` the tasks and threads that deliver from it, `workers` the processes.
Only `eventloop.bus` and writers use it. May import `processes`, `costs`, `events` and `util`, and not torch.
"""
