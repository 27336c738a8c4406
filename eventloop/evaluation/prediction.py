"""Collect the outputs of a prediction, or stream them to a function or writer in the background.

`eventloop.training.evaluation_loop.predict` runs the pass over the loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from eventloop.bus.subscription import Subscription
from eventloop.checkpoint.weights import save_modes
from eventloop.costs.waits import waiting
from eventloop.data.loader_state import own_random_state, set_samplers
from eventloop.data.rng import module_generators, set_module_generators
from eventloop.data.side_pass import apart, position_of
from eventloop.data.trainer_parts import TrainerParts
from eventloop.evaluation.dataset_order import RecordedIndices, in_dataset_order
from eventloop.evaluation.encoding import encode, outputs_of
from eventloop.evaluation.outputs import OnHost
from eventloop.events import BatchPredicted
from eventloop.events.catalogue import find_event, several
from eventloop.state.exchange import has_other_ranks
from eventloop.state.undo import Undo
from eventloop.util.functions import check_call, handler_name, is_coroutine_function

BACKLOG_BYTES = 256 * 2**20
"""The most bytes of outputs that `predict(to=...)` queues; the prediction waits for a slower subscriber."""
_POLL_SECONDS = 0.1
"""Seconds between two checks of how many outputs the subscriber has handled."""


class Sink(Protocol):
    """A receiver of the outputs of each batch, in order and on the host."""

    def receive(self, outputs: Any) -> None:
        """Receive the outputs of the next batch."""

    def end(self, *, complete: bool) -> Any:
        """Return the result of the prediction; `complete` is False if a stop interrupted the pass."""

    def close(self) -> None:
        """Release resources, after `end` or an error."""


def begin_prediction(undo: Undo, trainer: TrainerParts, loader: Iterable[Any], to: Any) -> Prediction:
    """Set the model to eval mode, and return the prediction to which a loop adds the outputs of each batch.

    `undo` restores the modes of all modules, the random states from which the pass has drawn, and the
    trainer's batch and outputs, and ends the subscription of `to`.

    Args:
        to: None to collect the outputs, or the function or writer that receives them.

    Raises:
        TypeError: the pass would move the position of the train loader, within an epoch.
        ValueError: some ranks have the same data, and the loader has no indices that show which ranks.
    """
    is_trained_on = loader is trainer.loader and trainer.passing is not None
    if is_trained_on and (stateful := position_of(loader)) is not None:
        raise TypeError(
            f"predict: loader must be another than the train loader within an epoch, got one with a "
            f"{type(stateful).__name__} that has a state_dict: a second pass would move its position"
        )
    undo.attributes(trainer, "batch", "outputs")
    undo.step(set_module_generators, trainer.model, module_generators(trainer.model))
    # the samplers of the train loader must keep the position that the training has reached
    if loader is not trainer.loader:
        undo.step(set_samplers, loader, own_random_state(loader)["samplers"])
    separate_pass = apart(undo, loader)
    save_modes(undo, trainer.model)
    trainer.model.eval()
    recorded = RecordedIndices(separate_pass)
    if to is not None:
        return Prediction(separate_pass, Stream(undo, trainer, to, recorded))
    if not recorded.known and trainer.data_ranks not in (1, trainer.world_size):
        raise ValueError(
            f"predict: loader must be a DataLoader over a map-style data set, got a {type(loader).__name__}: "
            f"of {trainer.world_size} ranks with data_ranks={trainer.data_ranks} no index shows which have "
            "the same batches; with to=... each rank passes on its own"
        )
    return Prediction(separate_pass, Collection(recorded, trainer.data_ranks))


class Prediction:
    """Copy the outputs of each batch to the host while the device computes the next batch.

    Args:
        loader: the iterable of batches to read.
        sink: the receiver of each batch's outputs, which it receives when the next batch is computed.
    """

    def __init__(self, loader: Iterable[Any], sink: Sink) -> None:
        self.loader = loader
        self._sink = sink
        self._copy: OnHost | None = None

    def add(self, outputs: Any) -> None:
        """Start to copy the outputs of a batch, and send the outputs of the batch before to the sink."""
        copy = OnHost(outputs)
        self._send_copied()
        self._copy = copy

    def _send_copied(self) -> None:
        """Wait for the running copy, if there is one, and send the outputs to the sink."""
        if self._copy is not None:
            outputs, self._copy = self._copy.wait(), None
            self._sink.receive(outputs)

    def end(self, *, complete: bool) -> Any:
        """Send the outputs of the last batch to the sink, and return the result of the prediction."""
        self._send_copied()
        return self._sink.end(complete=complete)

    def close(self) -> None:
        """Release the resources of the sink; called after `end` or an error, but not after an interrupt."""
        self._sink.close()


class Collection:
    """Collect the outputs of all batches and ranks, in the order of the data set."""

    def __init__(self, recorded: RecordedIndices, data_ranks: int) -> None:
        self._recorded, self._data_ranks = recorded, data_ranks
        self._batches: list[Any] = []

    def receive(self, outputs: Any) -> None:
        """Store the outputs of the next batch."""
        self._batches.append(outputs)

    def end(self, *, complete: bool) -> Any:
        """Return the joined outputs of all ranks; None if the pass was interrupted."""
        if not complete:
            return None
        indices = self._recorded.all()
        data_set = self._recorded.data_set() if has_other_ranks() else ()
        return in_dataset_order(self._batches, indices, data_set, data_ranks=self._data_ranks)

    def close(self) -> None:
        """Do nothing."""


class Stream:
    """Emit `batch_predicted` for each batch, to a background subscriber of this prediction.

    Args:
        to: a function or coroutine function of a batch's outputs, or a writer of `batch_predicted`.

    Raises:
        TypeError, ValueError: `to` cannot be called with outputs, or is a writer of other events.
    """

    def __init__(self, undo: Undo, trainer: TrainerParts, to: Any, recorded: RecordedIndices) -> None:
        self._trainer, self._recorded = trainer, recorded
        self._errors: list[Exception] = []  # raised by a function; the first error ends the subscription
        subscriptions: list[Subscription] = []
        # registered before the subscription is made, so that an interrupt between the lines leaves none
        undo.step(_cancel, subscriptions)
        subscriptions.append(_subscribe(trainer, to, self._errors))
        self._subscription = subscriptions[0]
        assert self._subscription.subscriber is not None
        self._subscriber = self._subscription.subscriber
        self._sent = 0  # the number of emitted events
        self._sizes: deque[int] = deque()  # the bytes of each event that the subscriber has not handled
        self._bytes = 0  # the sum of these sizes

    def receive(self, outputs: Any) -> None:
        """Emit the outputs of the next batch, and wait if too many outputs are queued.

        Raises:
            RuntimeError: the subscriber has ended.
        """
        data = encode(outputs)
        indices = self._recorded.of_batch(self._sent)
        self._trainer.announce(BatchPredicted, batch_idx=self._sent, indices=indices, data=data)
        self._sent += 1
        self._sizes.append(len(data))
        self._bytes += len(data)
        self._await_backlog(BACKLOG_BYTES)
        if self._subscriber.done:
            self._raise_if_incomplete()

    def end(self, *, complete: bool) -> None:
        """Wait until the subscriber has received the outputs of all batches.

        Raises:
            Exception: the error that `to` has raised.
            RuntimeError: the subscriber has ended, or an event was dropped or has failed.
        """
        self._await_backlog(0)
        self._raise_if_incomplete()

    def _await_backlog(self, max_bytes: int) -> None:
        """Wait until at most `max_bytes` of outputs are not handled, or the subscriber has ended."""
        while self._backlog() > max_bytes and not self._subscriber.done:
            with waiting("background", self._subscriber.name):
                self._subscriber.request_flush(calls=False).made.wait(_POLL_SECONDS)

    def _backlog(self) -> int:
        """Return the bytes of the events that the subscriber has not handled."""
        counts = self._subscriber.counts
        unhandled = self._sent - (counts.delivered + counts.failed + counts.dropped)
        while len(self._sizes) > unhandled:
            self._bytes -= self._sizes.popleft()
        return self._bytes

    def _raise_if_incomplete(self) -> None:
        """End the subscription, and raise an error if `to` has failed or has not received all batches."""
        self.close()
        if self._errors:
            raise self._errors[0]
        stats = self._subscription.stats
        if stats.delivered < self._sent:
            raise RuntimeError(
                f"predict(to=...): {stats.name} received {stats.delivered} of {self._sent} batches - "
                f"{stats.error or 'the rest was dropped'}"
            )

    def close(self) -> None:
        """End the subscription, and wait until the subscriber has ended."""
        self._subscription.cancel()
        with waiting("background", self._subscriber.name):
            self._subscriber.wait_closed(self._trainer.bus.drain_timeout)


def _cancel(subscriptions: list[Subscription]) -> None:
    for subscription in subscriptions:
        subscription.cancel()


def _subscribe(trainer: TrainerParts, to: Any, errors: list[Exception]) -> Subscription:
    """Subscribe a writer or a function to `batch_predicted`; the errors of a function go to `errors`."""
    if hasattr(to, "attach") and hasattr(to, "write"):
        if not any(each == "*" or find_event(each) is BatchPredicted for each in several(to.events)):
            raise ValueError(
                f"to: the writer {type(to).__name__} must receive batch_predicted, got events={to.events!r}: "
                "set its events = (BatchPredicted,)"
            )
        return cast(Subscription, to.attach(trainer.bus, trainer.facts))
    check_call("to", to, "outputs")
    offload = None if is_coroutine_function(to) else "thread"
    return trainer.bus.subscribe(_handler(to, errors), BatchPredicted, offload=offload)


def _handler(to: Callable[[Any], Any], errors: list[Exception]) -> Callable[[BatchPredicted], Any]:
    """Return a handler that calls `to` with the outputs of an event, and appends its error to `errors`."""

    @contextmanager
    def storing_errors() -> Iterator[None]:
        """Store an error of the block in `errors`, and raise it as well."""
        try:
            yield
        except Exception as error:
            errors.append(error)
            raise

    async def call_coroutine(event: BatchPredicted) -> None:
        with storing_errors():
            await to(outputs_of(event))

    def call(event: BatchPredicted) -> None:
        with storing_errors():
            to(outputs_of(event))

    handler = call_coroutine if is_coroutine_function(to) else call
    handler.__qualname__ = handler_name(to)
    return handler
