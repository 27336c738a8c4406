"""The server of the live page: who may ask it for what, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventloop.cli import main
from eventloop.ownership.status import FILE, write_status
from tests.ownership.trainings import training
from tests.watching.conftest import add_rows, row, scalar, status
from tests.watching.page_server import PageServer, page_server

CHECKPOINT = {"run": 0, "command": "checkpoint"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has ended."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    run.mkdir()
    write_status(run, status(state="ended", reason="completed", iter=100))
    add_rows(run, *(row(step, loss=1 / step) for step in range(1, 101)))
    return run


@pytest.fixture(scope="module")
def server(finished: Path) -> Iterator[PageServer]:
    """A server of it."""
    with page_server(finished) as server:
        yield server


# --- requests ----------------------------------------------------------------------------------------------


def test_only_this_machine_can_connect(server: PageServer) -> None:
    """The socket listens at 127.0.0.1 and at no other address, by the kernel's table."""
    tables = [Path(f"/proc/{server.process.pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    port = f"{server.port:04X}"

    assert [row[1] for row in rows if row[1].endswith(f":{port}") and row[3] == "0A"] == [f"0100007F:{port}"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "10.0.0.1", "localhost@evil"]
)
def test_another_host_is_refused(server: PageServer, host: str) -> None:
    """A site whose name was made to lead here gets nothing, not even the page."""
    answered = server.request("GET", "/", Host=host)

    assert answered.status == 403
    assert answered.error == f"expected the host 127.0.0.1 or localhost, got {host!r}"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9999", "LOCALHOST", "[::1]:80"])
def test_names_of_this_machine_are_accepted(server: PageServer, host: str) -> None:
    """With any port, because a tunnel has its own."""
    assert server.request("GET", "/", Host=host).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"])
def test_a_command_of_another_origin_is_refused(server: PageServer, origin: str) -> None:
    """Another site, another server of this machine, and a page without an origin, although they have the token."""
    answered = server.command(CHECKPOINT, Origin=origin)

    assert answered.status == 403
    assert answered.error == f"expected the origin {server.origin}, got {origin!r}"


def test_a_command_without_an_origin_is_refused(server: PageServer) -> None:
    """Browsers always send one."""
    answered = server.request("POST", "/command", b"{}", X_Eventloop_Token=server.token)

    assert (answered.status, answered.error) == (403, f"expected the origin {server.origin}, got none")


@pytest.mark.parametrize(
    ("token", "got"), [("", "another one"), ("wrong", "another one"), ("\xe9", "another one")]
)
def test_a_wrong_token_is_refused(server: PageServer, token: str, got: str) -> None:
    """For commands and for what is read of a run; the token itself is in no answer."""
    for answered in (
        server.command(CHECKPOINT, X_Eventloop_Token=token),
        server.request("GET", f"/events?token={'%C3%A9' if token == chr(0xE9) else token}"),
    ):
        assert answered.status == 403
        assert (
            f"expected the token of the address that eventloop watch has printed, got {got}" in answered.error
        )
        assert server.token not in answered.error


def test_messages_need_the_token(server: PageServer) -> None:
    """Another user of the machine can connect, and reads nothing of the run."""
    answered = server.request("GET", "/events")

    assert answered.status == 403
    assert "expected the token of the address that eventloop watch has printed, got none" in answered.error


@pytest.mark.parametrize(
    ("request_body", "problem"),
    [
        ({"run": 1, "command": "stop"}, "expected a run from 0 to 0, got 1"),
        ({"run": 0}, "missing required field `command`"),
        ({"run": 0, "command": "stop", "path": "/etc"}, "unknown field `path`"),
        ({"run": 0, "command": "x" * 20_000}, "expected at most 16,384 bytes, got more"),
        ("stop", "Expected `object`, got `str`"),
    ],
)
def test_a_malformed_command_is_refused(server: PageServer, request_body: object, problem: str) -> None:
    """With what was expected and what came."""
    answered = server.command(request_body)

    assert answered.status == 400
    assert problem in answered.error


def test_a_form_of_another_site_is_refused(server: PageServer) -> None:
    """A form cannot have the type of JSON."""
    answered = server.command(CHECKPOINT, Content_Type="text/plain")

    assert answered.status == 400
    assert "expected the content type application/json, got 'text/plain'" in answered.error


def test_commands_are_posted(server: PageServer) -> None:
    """A link or an image cannot give one."""
    assert server.request("GET", "/command").status == 405


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/plotly.js", "/events", "/nothing"])
def test_every_answer_protects_the_page(server: PageServer, path: str) -> None:
    """No other site may frame or read it, and the page may load scripts from here alone."""
    headers = server.request("GET", path).headers

    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_the_page_names_no_other_server(server: PageServer) -> None:
    """No address in its files leads elsewhere."""
    files = ("/", "/page.css", "/page.js", "/parts.js", "/charts.js", "/commands.js")

    assert [name for name in files if b"//" in server.request("GET", name).body.replace(b"// ", b"")] == []


def test_plotly_is_loaded_once(server: PageServer) -> None:
    """A browser may keep the version that the page asks for, and gets it compressed."""
    page = server.request("GET", "/").body.decode()
    address = page.partition('content="/plotly.js')[2].partition('"')[0]

    answered = server.request("GET", f"/plotly.js{address}", Accept_Encoding="gzip")

    assert "immutable" in answered.headers["cache-control"]
    assert answered.headers["content-encoding"] == "gzip"
    assert len(answered.body) < 2_500_000
    assert len(server.request("GET", "/plotly.js").body) > 4_000_000


# --- messages ----------------------------------------------------------------------------------------------


def test_a_page_gets_what_there_is_of_a_run(server: PageServer) -> None:
    """State, figures and curves come with the first message."""
    (run,) = server.message()["runs"]

    assert (run["fixed"]["name"], run["head"]["state"], run["head"]["done"]) == ("finished", "ended", 1.0)
    assert run["head"]["figures"][0] == ["iteration", "100", "of 100"]
    (curve,) = run["curves"]["curves"]
    assert (curve["name"], curve["mode"], curve["last_step"], len(curve["steps"])) == (
        "loss",
        "train",
        100,
        100,
    )


def test_a_command_to_a_run_that_has_ended_is_refused(server: PageServer) -> None:
    """The reason comes with a message, to all pages."""
    with server.messages() as messages:
        next(messages)
        assert server.command(CHECKPOINT).status == 202
        sent = next(m["commands"][-1] for m in messages if m.get("commands", [{}])[-1].get("answer"))

    assert (sent["text"], sent["outcome"]) == ("checkpoint", "refused")
    assert "has no run under way" in sent["answer"]


def test_new_records_come_alone(tmp_path: Path) -> None:
    """Of a curve that grows only the points that are new, and the last one before, which may have changed."""
    run = tmp_path / "run"
    run.mkdir()
    add_rows(run, *(row(step, loss=1.0) for step in range(1, 51)))
    with page_server(run) as server, server.messages() as messages:
        next(messages)
        add_rows(run, row(51, loss=0.5))
        (part,) = next(message["runs"] for message in messages if "curves" in message["runs"][0])

    assert part["curves"]["all"] is False
    (change,) = part["curves"]["curves"]
    assert (change["start"], change["steps"], change["mean"]) == (49, [50, 51], [1.0, 0.5])


def test_a_button_is_answered_by_the_run(tmp_path: Path) -> None:
    """The command goes through the run's inbox, and is applied after an iteration."""
    run = tmp_path / "run"
    with training(run, iters=10**6) as one:
        one.next_line()
        one.go()
        while not (run / FILE).exists():
            assert one.process.poll() is None
        with page_server(run) as server, server.messages() as messages:
            next(messages)
            assert server.command({"run": 0, "command": "stop", "words": ["seen enough"]}).status == 202
            sent = next(m["commands"][-1] for m in messages if m.get("commands", [{}])[-1].get("answer"))
            trained = one.run()["trained"]

    assert (sent["text"], sent["outcome"]) == ("stop seen enough", "applied")
    assert sent["answer"] == f"after iteration {trained:,}"


def test_a_directory_that_goes_away_is_named(tmp_path: Path) -> None:
    """The server lives, and shows the run again when it is back."""
    run, aside = tmp_path / "run", tmp_path / "aside"
    run.mkdir()
    write_status(run, status(state="ended", reason="completed"))
    with page_server(run) as server, server.messages() as messages:
        assert next(messages)["runs"][0]["head"]["state"] == "ended"
        os.rename(run, aside)
        gone = next(m["runs"][0]["head"] for m in messages if "head" in m["runs"][0])
        shutil.move(aside, run)
        back = next(m["runs"][0]["head"] for m in messages if "head" in m["runs"][0])

    assert (gone["state"], gone["sentence"]) == ("unknown", f"{run} is gone")
    assert back["state"] == "ended"


# --- the command -------------------------------------------------------------------------------------------


def test_ctrl_c_ends_it_with_pages_open(finished: Path) -> None:
    """At once and quietly, with the exit code of the terminal's view."""
    with page_server(finished) as server, server.messages() as first, server.messages() as second:
        next(first), next(second)
        code, errors = server.interrupt()

    assert (code, errors) == (130, "eventloop: ended by Ctrl-C\n")


def test_a_port_that_is_taken_is_refused(
    server: PageServer, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the port and what to do."""
    assert main(["watch", str(finished), "--web", str(server.port)]) == 2
    assert (
        f"port {server.port} of 127.0.0.1 cannot be used (Address already in use): give another one"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("other", ["--json", "--once"])
def test_a_page_is_the_only_output(finished: Path, capsys: pytest.CaptureFixture[str], other: str) -> None:
    """Two outputs at once are an error."""
    assert main(["watch", str(finished), other, "--web"]) == 2
    assert f"--web expects no other output, got {other} as well" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["runs/digits", "65536", "-1", "٣"])
def test_a_port_is_a_number(capsys: pytest.CaptureFixture[str], port: str) -> None:
    """A run after `--web` would be taken for its port."""
    with pytest.raises(SystemExit) as ended:
        main(["watch", "run", f"--web={port}"])

    assert ended.value.code == 2
    assert f"must be a port from 0 to 65535, got {port!r}: give runs before --web" in capsys.readouterr().err


def test_a_directory_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the terminal, before anything is served."""
    assert main(["watch", str(tmp_path), "--web"]) == 2
    assert "is no run to watch" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_a_missing_package_is_named(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    """With what to install."""
    for module in [
        name for name in sys.modules if name.partition(".")[0] == package or ".watching.web" in name
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)

    assert main(["watch", str(finished), "--web"]) == 2
    error = capsys.readouterr().err
    assert "the page needs starlette, uvicorn and plotly" in error
    assert "pip install 'torch-eventloop[watch]'" in error


def test_hostile_names_stay_texts(tmp_path: Path) -> None:
    """A message is JSON on one line, whatever a run is called and logs."""
    run = tmp_path / "<img src=x onerror=alert(1)>\n\ndata: {}"
    run.mkdir()
    add_rows(run, scalar(1, "</script><b>", 1.0), scalar(1, "a\n\nb", 2.0))
    with page_server(run) as server:
        (part,) = server.message()["runs"]

    assert json.dumps(part["fixed"]["name"]) == json.dumps(run.name)
    assert {curve["name"] for curve in part["curves"]["curves"]} == {"</script><b>", "a\n\nb"}
