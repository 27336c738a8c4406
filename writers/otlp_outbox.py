"""Send OTLP requests one after the other, and find what a collector refuses in them.

`OpenTelemetryWriter` uses this module, which sends requests with the client of `otlp_client`.
"""

from __future__ import annotations

from collections.abc import Callable

from eventloop.writers.otlp_client import METRICS, REQUEST_BYTES, Client, RefusedError, halves, names

SPLITS = 100
"""The number of refused requests that may be split in a row.

A value that is refused among 20,000 is found by 14 splits. Without a limit, a collector that refuses
everything would be asked twice for each value.
"""

Drop = Callable[[str, bytes, str, int | None], None]
"""The type of a function that is called with path and body of a request of which something is lost.

The others are why, and how many of its items are lost, None for all.
"""


class Outbox:
    """Hold requests until a collector has answered them; split refused ones, and drop single refused items.

    An accepted request, and each call of `send`, permits one more split, up to `SPLITS` in total. Without a
    split left, a refused request is dropped as a whole.

    Args:
        client: sends the requests.
        drop: is called for each loss.
    """

    def __init__(self, client: Client, drop: Drop) -> None:
        self.requests: list[tuple[str, bytes]] = []
        """The requests that wait, each with its path."""
        self.doubtful: set[str] = set()
        """Metrics of which a value was refused; their later values belong into a request of their own."""
        self._client = client
        self._drop = drop
        self._splits = SPLITS

    def send(self) -> None:
        """Send the requests.

        Raises:
            OSError: the collector is away; the requests that it has not answered stay.
        """
        self._earn_split()
        while self.requests:
            path, body = self.requests[0]
            first, last = self._send_or_split(path, body)
            rest = self.requests[1:]
            self.requests = [*((path, part) for part in first), *rest, *((path, part) for part in last)]

    def _send_or_split(self, path: str, body: bytes) -> tuple[list[bytes], list[bytes]]:
        """Send a request, or return its halves: those to be sent next, and those to be sent last."""
        if len(body) > REQUEST_BYTES and (parts := halves(path, body, points=True)):
            return parts, []
        try:
            rejected = self._client.post(path, body)
        except RefusedError as error:
            return self._split(path, body, error)
        self._earn_split()
        if rejected is not None:
            self._drop(path, body, rejected.why, rejected.number)
        return [], []

    def _split(self, path: str, body: bytes, error: RefusedError) -> tuple[list[bytes], list[bytes]]:
        """Return the halves of a refused request; call `drop` if it has one item, or no split is left.

        The values of one metric are split last: to find the metrics that are refused saves all others.
        """
        metrics = set(names(path, body)) if path == METRICS else set()
        if len(metrics) == 1 and not error.too_large:
            self.doubtful |= metrics
        found_before = bool(metrics) and metrics <= self.doubtful
        if self._splits > (SPLITS // 2 if found_before else 0):  # the rest is for metrics not yet in doubt
            first = halves(path, body, points=False)
            last = [] if first else halves(path, body, points=True)
            if first or last:
                self._splits -= 1
                return first, last
        self._drop(path, body, str(error), None)
        return [], []

    def _earn_split(self) -> None:
        self._splits = min(SPLITS, self._splits + 1)
