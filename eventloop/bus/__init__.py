"""Subscribe handlers to events, and call them in priority order.

Start with `bus`. `handler` decides how a handler is called, `dispatch` compiles the calls of one event,
`event_order` prints their order. Imports no torch, so that a bus serves any program.
"""

from eventloop.bus.bus import Bus as Bus
