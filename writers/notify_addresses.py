"""Check the addresses of `NotifyWriter`, and send messages to them with the library apprise.

An address contains a key, so errors and logs name it only by its number and its scheme. Libraries that
apprise uses log whole addresses, so their log records are dropped while apprise runs.
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
"""The level given to log records that must not be written; it is below the level of every handler."""
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,19})://")
"""Matches the begin of an address, such as `slack://`."""

_silent: ContextVar[bool] = ContextVar("eventloop_notify_silent", default=False)
"""Whether the log records of this thread are dropped."""


class Message(NamedTuple):
    """A message to be sent: its title, its text, and its kind."""

    title: str
    body: str
    kind: str = "info"
    """One of apprise's "info", "success", "warning" and "failure"."""


class Address:
    """Send messages to one address, one at a time, each on a new thread.

    Args:
        label: the number and the scheme of the address, for errors and logs.
        sender: apprise's object for this address.
    """

    def __init__(self, label: str, sender: Any) -> None:
        self.label = label
        self._sender = sender
        self._thread: BackgroundThread | None = None
        self._is_busy = False  # whether the last message was not sent, because an earlier one was being sent
        self._error = ""

    def start_sending(self, message: Message) -> None:
        """Start a thread that sends a message, unless the thread of an earlier message still runs."""
        self._is_busy = self._thread is not None and self._thread.is_alive()
        if self._is_busy:
            return
        self._error = ""
        # a daemon thread, so that a service that never answers does not keep the program from ending
        self._thread = BackgroundThread(
            target=self._send, args=(message,), name=f"eventloop NotifyWriter {self.label}", daemon=True
        )
        self._thread.start()

    def wait_sent(self, seconds: float) -> str:
        """Wait at most `seconds` until the message is sent; return the error, or "" if it was accepted."""
        assert self._thread is not None
        if self._is_busy:
            return "it has not answered to an earlier message"
        self._thread.join(seconds)
        return "it did not answer in time" if self._thread.is_alive() else self._error

    def _send(self, message: Message) -> None:
        """Send a message, and store an error if the address does not accept it."""
        title, body, kind = message
        with _without_logs():
            try:
                accepted = self._sender.notify(body, title=title, notify_type=kind, body_format="text")
            except BaseException as error:  # the text of the error may contain the key
                self._error = f"apprise raised {type(error).__name__}"
            else:
                self._error = "" if accepted else "the service cannot be reached, or refuses the message"


def send_to_all(addresses: Sequence[Address], message: Message, timeout: float) -> list[tuple[Address, str]]:
    """Send a message to all addresses at the same time.

    Args:
        addresses: the addresses.
        message: the message.
        timeout: the most seconds to wait until all addresses have accepted the message.

    Returns:
        each address that has not accepted the message, with the error.
    """
    deadline = monotonic() + timeout
    for address in addresses:
        address.start_sending(message)
    results = [(address, address.wait_sent(max(0.0, deadline - monotonic()))) for address in addresses]
    return [(address, error) for address, error in results if error]


def check_urls(urls: Sequence[object]) -> tuple[str, ...]:
    """Return the given addresses, or by default the addresses in the environment variable EVENTLOOP_NOTIFY.

    Raises:
        TypeError: an address is not a str.
        ValueError: no address is given, and the variable has none.
    """
    for number, url in enumerate(urls, start=1):
        if not isinstance(url, str):
            raise TypeError(
                f"address {number} of NotifyWriter must be a str, got {type(url).__name__}: pass the "
                "addresses one by one, as in NotifyWriter('slack://...', 'mailto://...')"
            )
    chosen = tuple(str(url) for url in urls) or tuple(os.environ.get(VARIABLE, "").split())
    if not chosen:
        raise ValueError(
            f"NotifyWriter needs an address, got none: pass it, as in NotifyWriter('slack://...'), or set "
            f"{VARIABLE}"
        )
    return chosen


def load_services() -> None:
    """Import apprise and the modules of its services, which takes about 0.2 s.

    Raises:
        ImportError: apprise is not installed.
    """
    with warnings.catch_warnings(), _without_logs():
        warnings.simplefilter("ignore", DeprecationWarning)  # apprise imports imghdr
        try:
            apprise = importlib.import_module("apprise")
        except ImportError as error:
            raise ImportError("NotifyWriter needs apprise: pip install 'torch-eventloop[notify]'") from error
        apprise.NotificationManager().schemas()


def open_addresses(urls: Sequence[str]) -> list[Address]:
    """Return an `Address` for each URL; call it after `load_services`.

    Raises:
        ValueError: apprise refuses a URL; the message has its number and its scheme.
    """
    apprise: Any = importlib.import_module("apprise")
    with _without_logs():
        # by default apprise stores data about addresses on the disk
        asset = apprise.AppriseAsset(
            app_id="eventloop", app_desc="eventloop", async_mode=False, storage_mode="memory"
        )
        return [_open(apprise, asset, url, number, len(urls)) for number, url in enumerate(urls, start=1)]


def _open(apprise: Any, asset: Any, url: str, number: int, count: int) -> Address:
    """Return the `Address` of URL `number` of `count`; raise ValueError if apprise refuses it."""
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else ""
    shown_scheme = f"{scheme}://" if scheme else "without a scheme"
    label = f"address {number} of {count} ({shown_scheme})"
    sender = apprise.Apprise(asset=asset)
    try:
        is_accepted = bool(scheme) and sender.add(url)
    except Exception:  # not raised, because its text may contain the key
        is_accepted = False
    if not is_accepted:
        hint = _address_hint(apprise, scheme)
        raise ValueError(f"{label} of NotifyWriter is no address that apprise takes{hint}")
    return Address(label, sender)


def _address_hint(apprise: Any, scheme: str) -> str:
    """Return the end of the error about a wrong address, with advice for its scheme.

    Args:
        apprise: the module.
        scheme: the scheme of the address; "" if it has none.
    """
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
    """Drop the log records of this thread, for example urllib3's, which have the path of a request."""
    if not isinstance(factory := logging.getLogRecordFactory(), _RecordFactory):
        logging.setLogRecordFactory(_RecordFactory(factory))
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


class _RecordFactory:
    """Create log records; inside `_without_logs` they get the level `DROPPED`, so that none is written.

    A logging filter would have to be added to each logger, also to those that do not exist yet.

    Args:
        factory: the program's own factory, which creates the records.
    """

    def __init__(self, factory: Callable[..., logging.LogRecord]) -> None:
        self._factory = factory

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        """Create a record, whose level is `DROPPED` while logs are switched off."""
        record = self._factory(*args, **kwargs)
        if _silent.get():
            record.levelno = DROPPED
        return record
