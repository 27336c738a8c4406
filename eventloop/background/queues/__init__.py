"""Queue events for one background subscriber, and count each of them as delivered, failed or dropped.

Start with `subscriber`. A subscriber has an `account`, which counts its events, an `inbox`, which queues
them, and a `runner`, which delivers them; `options` defines its settings. The package may import the packages
that `eventloop.background` may.
"""
