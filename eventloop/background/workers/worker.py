"""Run as the worker process of a subscriber with `offload="process"`.

`eventloop.processes.child` starts it. It imports the handler and nothing else of the program, and torch only
if the handler imports it. Commands come on standard input; the handler itself finds an empty standard input.
The handler's prints go to the program's standard output, and its records of the logger "eventloop" to the
program's logger. The process ends at a `CLOSE` command, at the end of the pipe with the commands, or when the
program has ended, even if another process has the pipe open.

The worker has the scheduling priority of the program, because a flush, a close and the end of a run wait for
it. With a lower priority it would get 5 to 10 % of a processor on a busy machine, and an ordinary user may
not raise the priority again.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter, sleep
from typing import Any

import msgspec

from eventloop.background.workers.importable import Target, owner_of, unpack
from eventloop.background.workers.log_records import LogForwarder
from eventloop.background.workers.protocol import EventDecoder, Progress, Setup, pack_error, with_times
from eventloop.events import Event
from eventloop.events.encoding_errors import bad_events
from eventloop.processes.channel import Frame, Inbox, Kind, frame
from eventloop.processes.exiting import skip_collections
from eventloop.processes.launch import END_SIGNALS
from eventloop.util.functions import awaited_by, untaken_by

ACK_SECONDS = 0.05
"""The seconds for which a finished delivery may stay unacknowledged while the next one runs."""
LOOK_SECONDS = 1.0
"""The interval in seconds at which the worker checks whether the program still runs."""
ORPHAN_SECONDS = 10.0
"""The seconds for which a worker without its program may continue with the events it has received."""


def main() -> None:
    """Run the worker process: deliver the events that arrive on standard input.

    The command-line arguments are the file descriptor for answers and the program's process id.
    """
    # signals of Ctrl-C and of a job scheduler reach this process too, but only the program may end it
    for signum in END_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    answers, program = (int(argument) for argument in sys.argv[1:])
    os.set_inheritable(answers, False)
    commands = os.dup(0)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    with suppress(AttributeError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a kill then loses no whole line
    with suppress(BrokenPipeError):  # the program has ended
        Worker(commands, answers, program).run()
    skip_collections()  # for a fast exit, because a close waits for it


class Worker:
    """Receive commands, call the handler, and acknowledge events.

    Args:
        commands, answers: the file descriptors of the two pipes.
        program: the process id of the program.
    """

    def __init__(self, commands: int, answers: int, program: int) -> None:
        self._commands = commands
        self._inbox = Inbox(commands)
        self._frames: deque[Frame] = deque()
        self._program = program
        self._acks = _Acks(answers, self._orphaned)
        self._decoder = EventDecoder()
        self._target: Target
        self._stop_on_error = False
        self._stopped = False  # after a failure with on_error="disable": later events are not delivered
        self._begin: Frame | None = None  # the BEGIN message, handled at the first event

    def run(self) -> None:
        """Execute commands until the end; if the handler cannot be imported, end at once."""
        with LogForwarder(self._send_log):
            last_answer = self._serve()
        # not within the block, because the program receives no log records after the last answer
        self._acks.send(last_answer)

    def _serve(self) -> bytes:
        """Execute commands until the end, and return the last answer, which may be empty."""
        if (refusal := self._set_up()) is not None:
            return refusal
        threading.Thread(target=self._acks.watch, name="eventloop acks", daemon=True).start()
        while (message := self._next()) is not None and message.kind != Kind.CLOSE:
            self._handle(message)
        closed = self._call(self._target.on_close)
        return frame(Kind.CLOSED, 0, closed)

    def _set_up(self) -> bytes | None:
        """Import the handler; if that fails, return the answer with which the worker ends, else None."""
        message = self._next()
        if message is None:
            return b""
        try:
            setup = msgspec.msgpack.decode(message.body, type=Setup)
            sys.path[:] = map(os.fsdecode, setup.path)
            self._stop_on_error = setup.stop_on_error
            logging.getLogger("eventloop").setLevel(setup.log_level)
            self._target = unpack(setup.target)
        except BaseException as error:  # an imported module may call sys.exit
            return frame(Kind.REFUSED, 0, pack_error(error))
        _limit_torch_threads()
        self._acks.send(frame(Kind.READY))
        return None

    def _handle(self, message: Frame) -> None:
        """Execute one command."""
        match message.kind:
            case Kind.BEGIN:
                self._begin = message
            case Kind.TYPE:
                self._decoder.learn(message)
            case Kind.EVENT | Kind.PICKLED | Kind.LIKENESS:
                self._deliver([message])
            case Kind.BATCH:
                self._deliver(self._events(message.number), batch=True, times=message.body)
            case Kind.RECORD:
                self._acks.recording = bool(message.number)
            case Kind.FLUSH:
                flushed = self._call(self._target.on_flush)
                self._acks.send(frame(Kind.FLUSHED, 0, flushed))

    def _events(self, count: int) -> list[Frame]:
        """Read the messages of a batch, and return the messages of its `count` events.

        Messages between them describe classes of events. If the pipe ends early, fewer are returned.
        """
        events: list[Frame] = []
        while len(events) < count and (message := self._next()) is not None:
            if message.kind == Kind.TYPE:
                self._decoder.learn(message)
            else:
                events.append(message)
        return events

    def _deliver(self, messages: list[Frame], *, batch: bool = False, times: bytes = b"") -> None:
        """Call the handler with the events of some messages, and acknowledge them.

        Args:
            batch: whether the handler receives a list.
            times: the encoded times of the events, b"" without times.
        """
        if self._stopped:
            return
        began = perf_counter()
        try:
            events = [self._decoder.decode(message) for message in messages]
            if self._begin is not None:
                self._pass_facts(self._begin, events[0])
                self._begin = None
            batched = with_times(events, times) if times else events
            self._target.fn(batched if batch else events[0])
        except BaseException as error:  # also a SystemExit, which must not end the worker
            seconds = perf_counter() - began
            self._acks.set_unconfirmed(untaken_by(self._target.fn))
            self._acks.send(
                frame(Kind.FAILED, len(messages), pack_error(error, seconds)), failed=len(messages)
            )
            self._stopped = self._stop_on_error and not bad_events(error, len(messages))
        else:
            self._acks.set_unconfirmed(untaken_by(self._target.fn))
            self._acks.done(len(messages), began, perf_counter() - began, awaited_by(self._target.fn))

    def _pass_facts(self, message: Frame, first: Event) -> None:
        """Pass the facts in a `BEGIN` message to the object of the handler, if it is `Remade`."""
        owner = owner_of(self._target.fn)
        if owner is not None:
            import pickle

            owner.begin_in_worker(pickle.loads(message.body), restarts=message.number, first=first)

    def _call(self, callback: Callable[[], Any] | None) -> bytes:
        """Call a callback; return its encoded error, or b""."""
        try:
            if callback is not None:
                callback()
            if sys.stdout is not None:
                sys.stdout.flush()
        except BaseException as error:
            return pack_error(error)
        finally:
            self._acks.set_unconfirmed(untaken_by(self._target.fn))
        return b""

    def _next(self) -> Frame | None:
        """Return the next command, or None at the end of the pipe or of the program.

        Before a wait for it, acknowledge the finished deliveries.
        """
        while not self._frames:
            if not _readable(self._commands, 0.0):
                self._acks.acknowledge()
                while not _readable(self._commands, LOOK_SECONDS):
                    if self._orphaned():
                        return None
            if not self._inbox.read():
                return None
            self._frames.extend(self._inbox.frames())
        return self._frames.popleft()

    def _send_log(self, record: bytes) -> None:
        """Send a log record to the program.

        Raises:
            OSError: the program has ended, or this process is a fork of the worker.
        """
        if self._orphaned():
            raise BrokenPipeError
        self._acks.send(frame(Kind.LOG, 0, record))

    def _orphaned(self) -> bool:
        """Return whether the program has ended, so that this process has another parent."""
        return os.getppid() != self._program


class _Acks:
    """Send acknowledgements and other messages from the worker to the program.

    Several deliveries are acknowledged at a time, because each message wakes the program. A thread sends the
    acknowledgements in time even if the next delivery hangs.
    """

    def __init__(self, fd: int, orphaned: Callable[[], bool]) -> None:
        self._fd = fd
        self._orphaned = orphaned
        self._lock = threading.RLock()  # reentrant, because a finalizer that runs in `_acknowledge` may log
        self._news = threading.Event()
        self._finished = self._acknowledged = 0  # the numbers of delivered and of acknowledged events
        # the number of events that the destination has not accepted: now, and at the last acknowledgement
        self._unconfirmed = self._unconfirmed_acknowledged = 0
        self.recording = False
        self._awaited_text = ""  # ", waiting for X" if the last delivery waited for X, such as a server
        self._durations: list[float] = []
        self._spans: list[tuple[float, float]] = []

    def done(self, count: int, began: float, seconds: float, awaited: str) -> None:
        """Record a delivery of `count` events that has succeeded.

        Args:
            awaited: ", waiting for X" if deliveries wait for X, such as a server, else "".
        """
        with self._lock:
            self._awaited_text = awaited
            self._finished += count
            self._durations.append(seconds)
            if self.recording:
                self._spans.append((began, seconds))
        self._news.set()

    def set_unconfirmed(self, count: int) -> None:
        """Set how many of the delivered events, the last ones, the destination has not accepted yet."""
        with self._lock:
            self._unconfirmed = count

    def acknowledge(self) -> None:
        """Acknowledge the finished deliveries."""
        with self._lock:
            self._acknowledge()

    def send(self, message: bytes, failed: int = 0) -> None:
        """Acknowledge the finished deliveries, and send a message.

        Args:
            failed: the number of events that the message itself acknowledges, as failed.
        """
        with self._lock:
            self._acknowledge()
            _write_all(self._fd, message)
            self._finished += failed
            self._acknowledged += failed

    def watch(self) -> None:
        """Acknowledge finished deliveries while another one runs, and end the worker if the program is gone.

        Runs on its own thread.
        """
        while True:
            if self._news.wait(LOOK_SECONDS):
                self._news.clear()
                sleep(ACK_SECONDS)
                with suppress(OSError):
                    self.acknowledge()
            if self._orphaned():
                sleep(ORPHAN_SECONDS)
                os._exit(1)

    def _acknowledge(self) -> None:
        """Send an acknowledgement if there is news since the last one; the caller holds the lock."""
        if (self._acknowledged, self._unconfirmed_acknowledged) != (self._finished, self._unconfirmed):
            self._acknowledged, self._unconfirmed_acknowledged = self._finished, self._unconfirmed
            progress = Progress(self._durations, self._spans, self._unconfirmed, self._awaited_text)
            self._durations, self._spans = [], []
            _write_all(self._fd, frame(Kind.DONE, self._finished, msgspec.msgpack.encode(progress)))


def _write_all(fd: int, data: bytes) -> None:
    """Write all bytes to a file descriptor, in as many writes as are needed."""
    while data:
        data = data[os.write(fd, data) :]


def _readable(fd: int, seconds: float) -> bool:
    """Wait until a file descriptor has data or is at its end; return False on a timeout."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


def _limit_torch_threads() -> None:
    """Limit torch, if it is imported, to one thread; its default would use all processors of the training."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


if __name__ == "__main__":
    main()
