"""Subscribe handlers to events, and call them in priority order.

Start with `bus`. `handler` decides how a handler is called, `dispatch` compiles the calls of one event, and
`event_order` prints the handlers of all events. The package imports `background`, `costs`, `events`,
`migration` and `util`, and no torch, so that a bus serves any program. Only `modules`, imported on first use,
needs torch.
"""

from eventloop.bus.bus import Bus as Bus
