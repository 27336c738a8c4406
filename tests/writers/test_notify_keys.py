"""NotifyWriter: wrong arguments, and keys of addresses, which are in no message, log, file or output."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventloop.events import CheckpointFailed
from eventloop.registry import WRITERS
from tests import forked
from tests.support.trainers import MakeTrainer
from tests.writers.conftest import Attach, write
from tests.writers.notify_target import KEY, PASSWORD, Target
from tests.writers.otlp_collector import is_missing

if is_missing("apprise"):
    pytest.skip(
        "apprise is not installed, so NotifyWriter is NOT tested: pip install 'torch-eventloop[notify]'",
        allow_module_level=True,
    )

from eventloop.writers import NotifyWriter


@pytest.fixture
def target() -> Iterator[Target]:
    """A server that receives messages."""
    target = Target()
    yield target
    target.close()


def assert_no_key(text: str) -> None:
    """Check that a text has no secret of an address."""
    assert KEY not in text
    assert PASSWORD not in text


def files_with_a_key(folder: Path) -> list[Path]:
    """The files below a folder that have a secret of an address."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [
        path for path in files if KEY.encode() in (data := path.read_bytes()) or PASSWORD.encode() in data
    ]


SCRIPT = """
import logging, sys
logging.basicConfig(level=1, stream=sys.stdout)
import requests, torch
from pathlib import Path
from eventloop.hooks import CheckpointHook, CostsHook, LoggerHook, TraceHook
from eventloop.writers import ConsoleWriter, CSVWriter, EventLogWriter, JSONLWriter, NotifyWriter
from tests.support.trainers import batches, build_trainer

writer = NotifyWriter(*sys.argv[1:], timeout=30)
trainer = build_trainer(
    Path("run"), val_loader=batches(1), evaluator={"accuracy": lambda *_: 0.5},
    hooks=[LoggerHook(1), CheckpointHook(1), CostsHook()],
    writers=[ConsoleWriter(), CSVWriter(), JSONLWriter(events="*"), EventLogWriter(), writer],
)
print(repr(writer), trainer.bus, trainer.bus.stats(), trainer.writers)
trainer.train()
trainer.close()
requests.post(sys.argv[1].replace("json://", "http://").partition("@")[0].partition("//")[0] + "//" +
              sys.argv[1].partition("@")[2].partition("/")[0] + "/open-record", json={"title": ""})
"""


def test_a_run_has_no_key(target: Target, tmp_path: Path) -> None:
    """No file of a run and no output with all loggers at debug level has a key, of addresses that take messages or not."""
    refused = Target(500)
    ran = forked.run(["-c", SCRIPT, target.url, refused.url, f"json://127.0.0.1:9/{KEY}"], cwd=tmp_path)
    refused.close()

    assert ran.returncode == 0, ran.stderr
    assert target.paths[0] == f"/{KEY}/"
    assert [len(target.messages), len(refused.messages)] == [2, 1]  # the last one is of the script itself
    assert "/open-record" in ran.stdout  # so that a path of the writer would be there, too
    assert "address 2 of 3 (json://) did not take" in ran.stdout
    assert_no_key(ran.stdout + ran.stderr)
    assert files_with_a_key(tmp_path) == []


def test_a_message_leaves_no_log_record(
    target: Target, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """No handler receives a record of the libraries that send, whatever their loggers' levels."""
    caplog.set_level(1)
    bus = attach(NotifyWriter(target.url))

    write(bus, CheckpointFailed())

    assert len(target.messages) == 1
    assert {record.name for record in caplog.records} <= {"eventloop"}


def test_other_threads_keep_their_log_records(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    """Records of the program itself reach their handlers, also with a record factory of its own."""
    NotifyWriter(target.url)

    logging.getLogger("apprise").error("of the program")

    assert [record.getMessage() for record in caplog.records] == ["of the program"]


def test_undelivered_events_are_stored_without_a_key(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """What the end of a run leaves is kept without addresses, and `eventloop replay` sends it to those of the environment."""
    silent, target = Target(None), Target()
    trainer = make_trainer(writers=[NotifyWriter(silent.url, timeout=3600, limit=7)])
    trainer.bus.drain_timeout = 0.2

    trainer.train()
    trainer.close()

    recipe = tmp_path / "run" / "undelivered" / "NotifyWriter.json"
    assert '"limit": 7' in recipe.read_text()
    assert files_with_a_key(tmp_path) == []
    environment = {**os.environ, "EVENTLOOP_NOTIFY": target.url}
    ran = forked.run(["-m", "eventloop", "replay", "run"], cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert target.titles[-1].endswith(" completed")
    assert_no_key(ran.stdout + ran.stderr)
    silent.close()
    target.close()


@pytest.mark.parametrize("parts", ["repr", "vars of the bus"])
def test_no_key_is_in_a_repr(parts: str, target: Target, attach: Attach) -> None:
    """Neither the writer nor its bus shows a key."""
    writer = NotifyWriter(target.url)
    bus = attach(writer)

    assert_no_key(repr(writer) if parts == "repr" else f"{bus} {bus!r} {bus.stats()}")


# --- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("urls", "options", "error", "text"),
    [
        ([], {}, ValueError, "NotifyWriter needs an address, got none: pass it, .* or set EVENTLOOP_NOTIFY"),
        (
            [3],
            {},
            TypeError,
            "address 1 of NotifyWriter must be a str, got int: pass the addresses one by one",
        ),
        ([[f"json://h/{KEY}"]], {}, TypeError, "address 1 of NotifyWriter must be a str, got list: pass"),
        (
            ["json://h", f"slak://{KEY}"],
            {},
            ValueError,
            r"^address 2 of 2 \(slak://\) of NotifyWriter is no address that apprise takes: did you mean 'slack'",
        ),
        (
            [f"qqqqqqqq://{KEY}"],
            {},
            ValueError,
            r"address 1 of 1 \(qqqqqqqq://\) .* takes: no service has this scheme; `apprise --details` lists",
        ),
        (
            [f"slack://{KEY}"],
            {},
            ValueError,
            r"address 1 of 1 \(slack://\) .*: a part of it is missing or wrong, or the .* `apprise -vv -b test sl",
        ),
        (
            [KEY],
            {},
            ValueError,
            r"address 1 of 1 \(without a scheme\) of NotifyWriter is no .*: expected one such as slack://",
        ),
        (
            ["json://h"],
            {"events": "afterrun"},
            ValueError,
            "unknown event 'afterrun': did you mean 'after_run'",
        ),
        (["json://h"], {"events": "*"}, ValueError, r"unknown event '\*'"),
        (["json://h"], {"limit": 0}, ValueError, "limit must be .*, got 0"),
        (["json://h"], {"period": 0}, ValueError, "period must be above 0 seconds, got 0"),
        (["json://h"], {"timeout": float("inf")}, ValueError, "timeout must be a finite number, got inf"),
        (["json://h"], {"hang_after": -1}, ValueError, "hang_after must be above 0, got -1"),
        (["json://h"], {"name": 3}, TypeError, "name must be a str or None, got int"),
        (
            ["json://h"],
            {"event": "after_run"},
            TypeError,
            "NotifyWriter has no argument 'event': did you mean",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    urls: list[Any],
    options: dict[str, Any],
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong argument is an error where the writer is made, without the key of an address, also in the log."""
    monkeypatch.delenv("EVENTLOOP_NOTIFY", raising=False)
    caplog.set_level(1)

    with pytest.raises(error, match=text) as caught:
        NotifyWriter(*urls, **options)

    assert_no_key(f"{caught.value} {caught.value.__cause__!r} {caught.value.__context__!r} {caplog.text}")


def test_addresses_come_from_the_environment(
    target: Target, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address the writer takes those of EVENTLOOP_NOTIFY, separated by spaces."""
    other = Target()
    monkeypatch.setenv("EVENTLOOP_NOTIFY", f" {target.url}\n{other.url} ")

    write(attach(WRITERS.build({"type": "NotifyWriter"})), CheckpointFailed())

    assert [len(target.messages), len(other.messages)] == [1, 1]
    other.close()


def test_a_config_has_the_addresses_as_a_list(target: Target, attach: Attach) -> None:
    """A config gives the addresses, or one, under the name `urls`."""
    write(attach(WRITERS.build({"type": "NotifyWriter", "urls": [target.url]})), CheckpointFailed())

    write(attach(WRITERS.build({"type": "NotifyWriter", "urls": target.url})), CheckpointFailed())

    assert len(target.messages) == 2


def test_apprise_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without apprise the error names the extra that installs it."""
    monkeypatch.setitem(sys.modules, "apprise", None)

    with pytest.raises(
        ImportError, match=r"NotifyWriter needs apprise: pip install 'torch-eventloop\[notify\]'"
    ):
        NotifyWriter("json://h")
