"""Send OTLP requests one after the other, and find the items in them that a collector refuses.

`OpenTelemetryWriter` uses this module; the module `otlp_client` posts the requests.
"""

from __future__ import annotations

from collections.abc import Callable

from eventloop.writers.otlp_client import METRICS, REQUEST_BYTES, Client, RefusedError, halves, names

SPLITS = 100
"""The most refused requests that are split in a row.

To find one refused value among 20,000 takes 14 splits. Without a limit, a collector that refuses everything
would receive two requests for each value.
"""

ReportLoss = Callable[[str, bytes, str, int | None], None]
"""A function `(path, body, reason, count)` to call for a request with items that the collector has refused.

`count` is the number of these items, None for all.
"""


class Outbox:
    """Queue requests until a collector has accepted them; split refused requests, and drop refused items.

    At most `SPLITS` refused requests are split. Each accepted request, and each call of `send`, permits one
    more split, up to `SPLITS`. If no split is permitted, a refused request is dropped as a whole.

    Args:
        client: posts the requests.
        report_loss: is called for each request with refused items.
    """

    def __init__(self, client: Client, report_loss: ReportLoss) -> None:
        self.requests: list[tuple[str, bytes]] = []
        """The path and body of each request that waits."""
        self.doubtful: set[str] = set()
        """The metrics of which a value was refused; put their later values into requests of their own."""
        self._client = client
        self._report_loss = report_loss
        self._permitted_splits = SPLITS

    def send(self) -> None:
        """Send all requests.

        Raises:
            OSError: the collector cannot be reached; unanswered requests stay in `requests`.
        """
        self._permit_split()
        while self.requests:
            path, body = self.requests[0]
            next_parts, last_parts = self._send_or_split(path, body)
            others = self.requests[1:]
            self.requests = [
                *((path, part) for part in next_parts),
                *others,
                *((path, part) for part in last_parts),
            ]

    def _send_or_split(self, path: str, body: bytes) -> tuple[list[bytes], list[bytes]]:
        """Send a request, or split it if it is too large or refused.

        Returns:
            the halves to be sent next, and the halves to be sent last; at least one list is empty.
        """
        if len(body) > REQUEST_BYTES and (smaller_requests := halves(path, body, points=True)):
            return smaller_requests, []
        try:
            rejected = self._client.post(path, body)
        except RefusedError as error:
            return self._split(path, body, error)
        self._permit_split()
        if rejected is not None:
            self._report_loss(path, body, rejected.why, rejected.number)
        return [], []

    def _split(self, path: str, body: bytes, error: RefusedError) -> tuple[list[bytes], list[bytes]]:
        """Return the halves of a refused request as `_send_or_split` does, or drop and report the request.

        A request with several metrics is split between two metrics, and its halves are sent next. A request
        with one metric is split between two points, and its halves are sent last. So the refused metrics are
        found first, and all other metrics arrive.
        """
        metrics = set(names(path, body)) if path == METRICS else set()
        if len(metrics) == 1 and not error.too_large:
            self.doubtful |= metrics
        is_doubtful = bool(metrics) and metrics <= self.doubtful
        reserved = SPLITS // 2 if is_doubtful else 0  # splits for metrics that were not refused before
        if self._permitted_splits > reserved:
            next_parts = halves(path, body, points=False)
            last_parts = [] if next_parts else halves(path, body, points=True)
            if next_parts or last_parts:
                self._permitted_splits -= 1
                return next_parts, last_parts
        self._report_loss(path, body, str(error), None)
        return [], []

    def _permit_split(self) -> None:
        """Permit one more split, up to `SPLITS`."""
        self._permitted_splits = min(SPLITS, self._permitted_splits + 1)
