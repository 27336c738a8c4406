"""Check the addresses of `NotifyWriter`, and send messages to them by the library apprise.

An address holds a key, so no message of this module has more of it than its place and its scheme. While
apprise works, no log record of any library that it uses reaches a handler: some have the whole address.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any, NamedTuple

from eventloop.background.threads import BackgroundThread
from eventloop.util.suggest import near

VARIABLE = "EVENTLOOP_NOTIFY"
"""The environment variable with the addresses, separated by spaces."""
DROPPED = -1
"""A level below that of every handler, so that no handler takes a log record of this level."""
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,19})://")

_silent: ContextVar[bool] = ContextVar("eventloop_notify_silent", default=False)


class Message(NamedTuple):
    """A message to be sent: its title, its text, and its kind.

    The kinds are apprise's "info", "success", "warning" and "failure".
    """

    title: str
    body: str
    kind: str = "info"


class Address:
    """An address, to which one message at a time is sent on a thread of its own.

    Args:
        label: its place and its scheme, for messages.
        sender: apprise's object with this address.
    """

    def __init__(self, label: str, sender: Any) -> None:
        self.label = label
        self._sender = sender
        self._thread: BackgroundThread | None = None
        self._why = ""

    def start_sending(self, message: Message) -> None:
        """Start a thread that sends a message, unless the thread of an earlier message still runs."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._why = ""
        # a daemon, which is left behind if the service never answers
        self._thread = BackgroundThread(
            target=self._send, args=(message,), name=f"eventloop NotifyWriter {self.label}", daemon=True
        )
        self._thread.start()

    def wait_sent(self, seconds: float) -> str:
        """Wait at most so long, and return why the address has not taken the message; "" if it has."""
        assert self._thread is not None
        self._thread.join(seconds)
        return "it did not answer in time" if self._thread.is_alive() else self._why

    def _send(self, message: Message) -> None:
        title, body, kind = message
        with _without_logs():
            try:
                taken = self._sender.notify(body, title=title, notify_type=kind, body_format="text")
            except BaseException as error:  # its text may have the key
                self._why = f"apprise raised {type(error).__name__}"
            else:
                self._why = "" if taken else "the service cannot be reached, or refuses the message"


def send_to_all(addresses: Sequence[Address], message: Message, timeout: float) -> list[tuple[Address, str]]:
    """Send a message to all addresses at the same time; return those that have not taken it, with the reason.

    Args:
        addresses: where to send it.
        message: the message.
        timeout: the seconds that all of them together may take.
    """
    until = monotonic() + timeout
    for address in addresses:
        address.start_sending(message)
    results = [(address, address.wait_sent(max(0.0, until - monotonic()))) for address in addresses]
    return [(address, why) for address, why in results if why]


def check_urls(urls: Sequence[object]) -> tuple[str, ...]:
    """Return the addresses that are given, or else those in the environment variable.

    Raises:
        TypeError: an address is not a str.
        ValueError: neither has one.
    """
    for number, url in enumerate(urls, start=1):
        if not isinstance(url, str):
            raise TypeError(
                f"address {number} of NotifyWriter must be a str, got {type(url).__name__}: pass the "
                "addresses one by one, as in NotifyWriter('slack://...', 'mailto://...')"
            )
    found = tuple(str(url) for url in urls) or tuple(os.environ.get(VARIABLE, "").split())
    if not found:
        raise ValueError(
            f"NotifyWriter needs an address, got none: pass it, as in NotifyWriter('slack://...'), or set "
            f"{VARIABLE}"
        )
    return found


def load_services() -> None:
    """Import apprise and the modules of its services, which takes some 0.2 s.

    Raises:
        ImportError: apprise is not installed.
    """
    with warnings.catch_warnings(), _without_logs():
        warnings.simplefilter("ignore", DeprecationWarning)  # it imports imghdr
        try:
            apprise = importlib.import_module("apprise")
        except ImportError as error:
            raise ImportError("NotifyWriter needs apprise: pip install 'torch-eventloop[notify]'") from error
        apprise.NotificationManager().schemas()


def open_addresses(urls: Sequence[str]) -> list[Address]:
    """Return an `Address` for each of the apprise addresses, once the services are loaded.

    Raises:
        ValueError: apprise does not take an address; the message names its place and scheme.
    """
    apprise: Any = importlib.import_module("apprise")
    with _without_logs():  # an asset of its own, by which nothing is stored on the disk
        asset = apprise.AppriseAsset(
            app_id="eventloop", app_desc="eventloop", async_mode=False, storage_mode="memory"
        )
        return [_open(apprise, asset, url, at, len(urls)) for at, url in enumerate(urls, start=1)]


def _open(apprise: Any, asset: Any, url: str, at: int, count: int) -> Address:
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    label = f"address {at} of {count} ({f'{scheme}://' if scheme else 'without a scheme'})"
    sender = apprise.Apprise(asset=asset)
    try:
        taken = bool(scheme) and sender.add(url)
    except Exception:  # its text may have the key
        taken = False
    if not taken:
        raise ValueError(f"{label} of NotifyWriter is no address that apprise takes{_cure(apprise, scheme)}")
    return Address(label, sender)


def _cure(apprise: Any, scheme: str) -> str:
    if not scheme:
        return ": expected one such as slack://..., mailto://... or json://host/path"
    known = [*apprise.NotificationManager().schemas()]
    if scheme not in known:
        guess = near(scheme, known)
        return f"{guess or ': no service has this scheme'}; `apprise --details` lists the services"
    return (
        ": a part of it is missing or wrong, or the service needs a library that is not installed; "
        f"`apprise -vv -b test {scheme}://...` says what"
    )


# --- no log records -------------------------------------------------------------------------------------


@contextmanager
def _without_logs() -> Iterator[None]:
    """Drop the log records of this thread, such as those of urllib3, which have the path of each request."""
    if not isinstance(make := logging.getLogRecordFactory(), _RecordFactory):
        logging.setLogRecordFactory(_RecordFactory(make))
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


class _RecordFactory:
    """Make log records; those that are made while a message is sent get a level that no handler takes.

    The libraries that send may log addresses with their keys. A filter would have to be added to each logger,
    also to those that do not exist yet.

    Args:
        make: the program's own factory.
    """

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        if _silent.get():
            record.levelno = DROPPED
        return record
