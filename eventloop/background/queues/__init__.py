"""Queue events for one background subscriber, and account for each of them.

Start with `subscriber`, which builds on `queue` and `account`; `options` has the settings of a subscriber.
May import what `eventloop.background` may.
"""
