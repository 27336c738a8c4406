"""Queue events for one background subscriber, and account for each of them.

Start with `subscriber`, which holds an `account`, an `inbox` and a `runner`; `options` has its settings.
May import what `eventloop.background` may.
"""
