"""Queue events for one background subscriber, and account for each of them.

Start with `subscriber`.
"""
