"""VisdomWriter: what a real visdom server has to show afterwards."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventloop.events import BeforeTrain, ScalarsLogged
from eventloop.writers import VisdomWriter
from tests.writers.conftest import Account, Attach, emit, train, val, worker_of, write
from tests.writers.visdom_server import Relay, Server, free_port

if importlib.util.find_spec("visdom") is None:
    pytest.skip(
        "visdom is not installed, so VisdomWriter is NOT tested: pip install 'torch-eventloop[visdom]'",
        allow_module_level=True,
    )

Make = Callable[..., VisdomWriter]


@pytest.fixture
def make(server: Server) -> Make:
    def build(**options: Any) -> VisdomWriter:
        return VisdomWriter("127.0.0.1", server.port, **{"window_size": 1, "timeout": 20.0, **options})

    return build


# --- curves ------------------------------------------------------------------------------------------------


def test_every_value_is_on_the_server(attach: Attach, make: Make, server: Server, env: str) -> None:
    """Each metric is a panel with a curve that has each value at its step."""
    names = ["loss", "acc/top1", "größe, (m)"]

    write(
        attach(make()),
        *(ScalarsLogged(step=s, scalars={n: s + i for i, n in enumerate(names)}) for s in range(1, 31)),
    )

    for i, name in enumerate(names):
        assert server.curve(env, name) == [(s, s + i) for s in range(1, 31)]
    assert sorted(server.windows(env)) == sorted(names)


def test_names_that_are_no_utf8(attach: Attach, make: Make, server: Server, tmp_path: Path) -> None:
    """Panel and environment have escapes in their names; after each flush the server has all values so far."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    bus = attach(make(offload="thread"), work_dir=str(folder))

    for step in (1, 2, 3):
        emit(bus, ScalarsLogged(step=step, scalars={"loss\udce9": 0.5, "b": 0.25}))
        assert server.curve("caf\\udce9", "loss\\udce9") == [(s, 0.5) for s in range(1, step + 1)]

    assert server.curve("caf\\udce9", "b") == [(1, 0.25), (2, 0.25), (3, 0.25)]


@pytest.mark.slow
def test_only_interested_keys_are_drawn(attach: Attach, make: Make, server: Server, env: str) -> None:
    """A key names a metric in every mode, or in one; the modes share a panel. Runs may share an environment."""
    scalars = {"loss": 1.0, "accuracy": 0.5, "lr": 0.1}
    bus = attach(make(interested_keys=["loss", "val/accuracy"], env=f"{env}-shared"))

    write(bus, *(ScalarsLogged(mode=mode, step=1, scalars=scalars) for mode in ("train", "val")))

    env = f"{env}-shared"
    assert sorted(server.windows(env)) == ["accuracy", "loss"]
    assert server.windows(env)["loss"]["title"] == "loss"
    assert server.curve(env, "accuracy", "train") == []
    assert server.curve(env, "accuracy", "val") == [(1, 0.5)]
    assert server.curve(env, "loss", "train") == server.curve(env, "loss", "val") == [(1, 1.0)]


def test_a_key_that_never_came_is_named(attach: Attach, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelled key is warned of."""
    with caplog.at_level(logging.WARNING, "eventloop"):
        write(attach(make(interested_keys=["loss", "acuracy"], offload="thread")), *train(1))

    assert "interested_keys never logged: 'acuracy'; expected names of metrics, or mode/name" in caplog.text


@pytest.mark.slow
def test_training_values_are_medians_of_the_window(
    attach: Attach, make: Make, server: Server, env: str
) -> None:
    """A point is the median of the values of the last window_size iterations; rates and scores are not smoothed."""
    bus = attach(make(window_size=20))
    values = [1.0, 9.0, 2.0, 8.0]
    events = [ScalarsLogged(step=10 * i, scalars={"loss": v, "lr": v}) for i, v in enumerate(values, start=1)]

    write(bus, *events, *(val(i, f1=i / 4) for i in (1, 2, 3)))

    assert server.curve(env, "loss") == [(10, 1.0), (20, 5.0), (30, 5.5), (40, 5.0)]
    assert [y for _, y in server.curve(env, "lr")] == values
    assert server.curve(env, "f1", "val") == [(1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.slow
def test_what_is_not_finite_is_a_gap(attach: Attach, make: Make, server: Server, env: str) -> None:
    """NaN and infinities have their step, and no height; the values around them are unharmed, smoothed ones too."""
    values = [2.0, math.nan, math.inf, 4.0]

    write(attach(make(window_size=10)), *(train(s, loss=v)[0] for s, v in enumerate(values, start=1)))

    assert server.curve(env, "loss") == [(1, 2.0), (2, None), (3, None), (4, 3.0)]


@pytest.mark.slow
def test_a_late_value_takes_its_place(attach: Attach, make: Make, server: Server, env: str) -> None:
    """A curve never goes back, in whatever order its values come."""
    bus = attach(make())

    emit(bus, *train(10, 30))
    write(bus, *train(20, 5, 40))

    assert [step for step, _ in server.curve(env, "loss")] == [5, 10, 20, 30, 40]


@pytest.mark.slow
def test_a_resumed_run_replaces_the_steps_it_runs_again(
    attach: Attach, make: Make, server: Server, env: str
) -> None:
    """Points after the checkpoint are those of the resumed run; earlier ones stay."""
    write(attach(make()), *train(10, 20, 30, 40, 50, loss=1.0))

    write(attach(make()), BeforeTrain(iter=20), *train(25, 35, loss=2.0))

    assert server.curve(env, "loss") == [(10, 1.0), (20, 1.0), (25, 2.0), (35, 2.0)]


# --- servers that do not answer ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["thread", "process"])
def test_a_server_that_is_not_there_is_one_warning(
    attach: Attach, account: Account, caplog: pytest.LogCaptureFixture, offload: str
) -> None:
    """It names the server, the command that starts one, and the consequence for the run and its events."""
    port = free_port()
    bus = attach(VisdomWriter("127.0.0.1", port, base_url="/curves", offload=offload))

    with caplog.at_level(logging.DEBUG, "eventloop"):
        write(bus, *train(1, 2, 3))

    (warning,) = caplog.records
    assert (warning.levelname, warning.exc_info) == ("WARNING", None)
    assert account(bus).failed == 3
    missing = (
        f"no visdom server answers at http://127.0.0.1:{port}/curves: Connection refused; "
        f"`python -m visdom.server -port {port} -base_url /curves` starts one there"
    )
    assert warning.getMessage() == (
        f"background subscriber VisdomWriter failed and is disabled: {missing}; "
        "the run goes on without it, and its events count as failed or dropped"
    )
    assert account(bus).error == f"[error] UnavailableError: {missing}"


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up(attach: Attach, account: Account) -> None:
    """A connection that is taken and never answered costs one timeout, not the run."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        bus = attach(VisdomWriter("127.0.0.1", port, timeout=0.1))
        write(bus, *train(1))

    assert account(bus).failed == 1
    assert "timed out" in account(bus).error.lower()


@pytest.mark.slow
def test_another_kind_of_server_is_refused(attach: Attach, account: Account, tmp_path: Path) -> None:
    """An error page is no success."""
    program = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler);"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program + "print(s.server_port); s.serve_forever()"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    ) as other:
        assert other.stdout is not None
        bus = attach(VisdomWriter("127.0.0.1", int(other.stdout.readline())))
        write(bus, *train(1))
        other.kill()

    assert account(bus).failed == 1
    assert "no visdom server answers" in account(bus).error


@pytest.mark.slow
def test_points_wait_for_a_server_that_comes_back(attach: Attach, server: Server, env: str) -> None:
    """Values logged while the server was away are drawn, once, when it is there again."""
    relay = Relay(0, server)
    bus = attach(VisdomWriter("127.0.0.1", relay.port, window_size=1, retry_seconds=1e-9, timeout=20.0))
    emit(bus, *train(1))
    relay.cut()

    emit(bus, *train(2, 3))
    mended = Relay(relay.port, server)
    write(bus, *train(4))
    mended.cut()

    assert server.curve(env, "loss") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


@pytest.mark.slow
def test_a_server_that_forgot_is_drawn_on_again(attach: Attach, server: Server, env: str, make: Make) -> None:
    """A panel that was closed, or that a restarted server does not have, is created again."""
    bus = attach(make())
    emit(bus, *train(1))

    server.client(env).close()
    write(bus, *train(2))

    assert server.curve(env, "loss") == [(2, 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize("backlog", [2, 100])
def test_a_full_backlog_ends_the_writer(
    attach: Attach, account: Account, server: Server, backlog: int
) -> None:
    """It is bounded; where it is full, or the run ends, the account has the number of points that were not drawn."""
    relay = Relay(0, server)
    bus = attach(VisdomWriter("127.0.0.1", relay.port, timeout=20.0, backlog=backlog))
    emit(bus, *train(1))
    relay.cut()

    emit(bus, *train(2, 3, 4))
    assert (account(bus).failed > 0) == (backlog == 2)
    bus.close()

    assert "ConnectionError: 3 points were not drawn: no visdom server answers" in account(bus).error


# --- the constructor ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window_size": 0}, ValueError, "window_size must be at least 1, got 0"),
        ({"window_size": 2.5}, TypeError, "window_size must be an int, got 2.5"),
        ({"backlog": True}, TypeError, "backlog must be an int, got True"),
        ({"port": "x"}, TypeError, "port must be an int, got 'x'"),
        ({"port": 0}, ValueError, "port must be at least 1, got 0"),
        ({"host": 5}, TypeError, "host must be a str, got int"),
        ({"base_url": None}, TypeError, "base_url must be a str, got NoneType"),
        ({"env": 3}, TypeError, "env must be a str or None, got int"),
        ({"username": "me", "password": 3}, TypeError, "password must be a str or None, got int"),
        ({"timeout": "x"}, TypeError, "timeout must be a number of seconds, got 'x'"),
        ({"timeout": 0}, ValueError, "timeout must be above 0 seconds, got 0"),
        ({"retry_seconds": True}, TypeError, "retry_seconds must be a number of seconds, got True"),
        ({"retry_seconds": -1}, ValueError, "retry_seconds must be at least 0 seconds, got -1"),
        ({"interested_keys": "loss"}, TypeError, r"interested_keys must be a list of names .*, got 'loss'"),
        ({"interested_keys": []}, ValueError, r"interested_keys must name at least one metric, got \[\]"),
        ({"offload": "gpu"}, ValueError, "offload must be 'auto' or 'thread' or 'process', got 'gpu'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The constructor names the argument, and what came."""
    with pytest.raises(error, match=message):
        VisdomWriter(**options)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor says what to install."""
    monkeypatch.setitem(sys.modules, "visdom", None)

    with pytest.raises(ImportError, match=r"needs visdom: pip install 'torch-eventloop\[visdom\]'"):
        VisdomWriter()


# --- the process -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_runs_in_a_process(attach: Attach, account: Account, make: Make, server: Server, env: str) -> None:
    """Unless a thread is asked for."""
    places = []
    for offload in (None, "thread", "process"):
        bus = attach(make(offload=offload))
        write(bus, *train(1))
        places.append((account(bus).runs_on, account(bus).delivered))

    assert places == [("process", 1), ("thread", 1), ("process", 1)]
    assert server.curve(env, "loss") == [(1, 0.25)]


def test_class_that_no_process_can_import_runs_on_a_thread(attach: Attach, account: Account) -> None:
    """A user's class need not be in a module; its server may be started later."""

    class Mine(VisdomWriter):
        pass

    assert account(attach(Mine("no.such.host.invalid"))).runs_on == "thread"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_process_that_is_killed_is_replaced(attach: Attach, make: Make, server: Server, env: str) -> None:
    """The curve is whole: the next one goes on where it ended. No process has torch, which visdom would import."""
    bus = attach(make())
    emit(bus, *train(1, 2))
    mapped = Path(f"/proc/{worker_of(bus)}/maps").read_text()
    os.kill(worker_of(bus), signal.SIGKILL)
    write(bus, *train(3, 4))

    assert server.curve(env, "loss") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert "numpy" in mapped
    assert "libtorch" not in mapped
