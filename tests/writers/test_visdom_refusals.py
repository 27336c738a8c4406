"""VisdomWriter: a refused curve is no outage, and what is not drawn is not counted as delivered."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from eventloop.events import ScalarsLogged
from eventloop.writers import VisdomWriter
from tests.support.process_support import until
from tests.writers.conftest import Account, Attach, emit, train, worker_of, write
from tests.writers.visdom_server import Proxy, Relay, Server

if importlib.util.find_spec("visdom") is None:
    pytest.skip(
        "visdom is not installed, so VisdomWriter is NOT tested: pip install 'torch-eventloop[visdom]'",
        allow_module_level=True,
    )

pytestmark = pytest.mark.slow

MakeProxy = Callable[[Callable[[str], int]], Proxy]


@pytest.fixture
def proxy(server: Server) -> Iterator[MakeProxy]:
    """`proxy(judge)` puts a proxy before the server, which ends with the test."""
    made: list[Proxy] = []

    def make(judge: Callable[[str], int]) -> Proxy:
        made.append(Proxy(server, judge))
        return made[-1]

    yield make
    for each in made:
        each.close()


def make(port: int, **options: object) -> VisdomWriter:
    settings = {"window_size": 1, "timeout": 20.0, "retry_seconds": 0.0, "offload": "thread"}
    return VisdomWriter("127.0.0.1", port, **{**settings, **options})  # type: ignore[arg-type]


def both(*steps: int) -> list[ScalarsLogged]:
    return train(*steps, bad=1.0, good=2.0)


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "left out" in (text := record.getMessage())]


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_refused_curve_costs_no_other(
    attach: Attach,
    account: Account,
    server: Server,
    env: str,
    proxy: MakeProxy,
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is named once, its events count as failed, and it is drawn again as soon as it is taken."""
    before = proxy(lambda body: status if '"bad"' in body and "data" in body else 0)
    bus = attach(make(before.port))

    emit(bus, *both(1))
    emit(bus, *both(2), *train(3, good=2.0))
    before.judge = lambda body: 0
    write(bus, *both(4))

    assert server.curve(env, "good") == [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    assert server.curve(env, "bad") == [(4, 1.0)]
    assert (account(bus).failed, account(bus).delivered) == (2, 2)
    (line,) = left_out(caplog)
    assert "train/bad" in line
    assert f"answered {status} for 'bad'" in line


def test_too_many_points_for_a_request_are_drawn_with_several(
    attach: Attach, account: Account, server: Server, env: str, proxy: MakeProxy
) -> None:
    """Also where a late point makes the writer draw its whole curve again."""
    before = proxy(lambda body: 413 if len(body) > 1500 else 0)
    bus = attach(make(before.port))

    emit(bus, *train(*range(2, 301)))
    write(bus, *train(1))

    assert server.curve(env, "loss") == [(step, step / 4) for step in range(1, 301)]
    assert (account(bus).failed, account(bus).delivered) == (0, 300)


def test_a_pane_of_another_kind_costs_one_curve(
    attach: Attach, account: Account, server: Server, env: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that shares the environment may have a text under the name of a metric."""
    server.client(env).text("hello", win="bad")
    bus = attach(make(server.port))

    write(bus, *both(1, 2))

    assert server.curve(env, "good") == [(1, 2.0), (2, 2.0)]
    assert server.windows(env)["bad"]["content"] == "hello"
    assert (account(bus).failed, account(bus).delivered) == (2, 0)
    (line,) = left_out(caplog)
    assert "'bad' is a pane of another kind" in line


def test_points_that_wait_are_queued(attach: Attach, account: Account, server: Server, env: str) -> None:
    """Events count as delivered once their points are on the server."""
    relay = Relay(0, server)
    bus = attach(make(relay.port))
    emit(bus, *train(1))
    relay.cut()

    emit(bus, *train(2, 3))
    assert (account(bus).delivered, account(bus).queued) == (1, 2)
    mended = Relay(relay.port, server)
    write(bus, *train(4))
    mended.cut()

    assert (account(bus).delivered, account(bus).queued, account(bus).failed) == (4, 0, 0)
    assert [step for step, _ in server.curve(env, "loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize("backlog", [2, 100])
def test_points_that_were_never_drawn_have_failed(
    attach: Attach, account: Account, server: Server, backlog: int
) -> None:
    """Each event once, whether the backlog is full or the run ends."""
    relay = Relay(0, server)
    bus = attach(make(relay.port, backlog=backlog))
    emit(bus, *train(1))
    relay.cut()

    for step in (2, 3, 4):
        emit(bus, *train(step))
    bus.close()

    assert (account(bus).delivered, account(bus).failed) == (1, 3)


def test_a_killed_worker_loses_no_point_that_waits(
    attach: Attach,
    account: Account,
    server: Server,
    env: str,
    proxy: MakeProxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next worker gets them again, though they were acknowledged."""
    before = proxy(lambda body: 0)
    bus = attach(make(before.port, offload="process"))
    emit(bus, *train(1, 2))
    before.judge = lambda body: 503
    emit(bus, *train(3, 4, 5))
    assert (account(bus).delivered, account(bus).queued) == (2, 3)

    os.kill(worker_of(bus), signal.SIGKILL)
    before.judge = lambda body: 0
    until(lambda: "is started again" in caplog.text)
    bus.close()

    assert server.curve(env, "loss") == [(step, step / 4) for step in range(1, 6)]
    assert (account(bus).delivered, account(bus).failed, account(bus).queued) == (5, 0, 0)
