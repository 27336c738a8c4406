"""A directory is taken by one run at a time, and given back by that one."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from eventloop.ownership import Owner, WorkDirInUseError, read_owner
from eventloop.ownership.acquiring import acquire, owning
from eventloop.ownership.holding import Heartbeat, Held
from eventloop.ownership.owner import owners_in, records_in
from tests.ownership.conftest import Forge
from tests.ownership.trainings import alive, contents
from tests.support.forking import forked
from tests.support.internals import substitute
from tests.support.process_support import until


def state_of(run: Path) -> str:
    owner = read_owner(run)
    return "" if owner is None else owner.state


def test_a_directory_is_given_back(run: Path) -> None:
    """Nothing stays in it."""
    for _ in range(3):
        held = acquire(run, "training")
        assert len(records_in(run)) == 1
        held.release()
        assert [*run.iterdir()] == []


def test_an_owner_of_this_process_is_refused(run: Path) -> None:
    """Also with another path to the same directory; nothing is changed."""
    held = acquire(run, "training")
    (run.parent / "link").symlink_to(run)
    before = contents(run)
    for path in (run, run.parent / "link"):
        with pytest.raises(
            WorkDirInUseError, match=rf"{path.name} is in use: another run of this process \({os.getpid()}"
        ):
            acquire(path, "training")
    assert contents(run) == before
    held.release()
    acquire(run, "training").release()


def test_one_of_many_threads_takes_it(run: Path) -> None:
    """Of threads that try at one moment exactly one is the owner."""
    barrier, owners, refused = threading.Barrier(8), list[Held](), list[object]()

    def begin() -> None:
        barrier.wait()
        try:
            owners.append(acquire(run, "training"))
        except WorkDirInUseError as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(owners), len(refused)) == (1, 7)
    owners[0].release()


def test_a_dead_owner_elsewhere_is_followed_at_once(run: Path, forge: Forge) -> None:
    """Its heartbeat has been silent for long enough, so nobody waits."""
    forge(31.0)
    held = acquire(run, "training", waits=False)
    assert len(records_in(run)) == 1
    held.release()
    assert [*run.iterdir()] == []


def test_an_owner_elsewhere_that_may_have_died(
    run: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is waited for, with one line, until its silence is long enough."""
    forge(29.0)
    substitute(monkeypatch, "acquiring.POLL_SECONDS", 0.01)

    acquire(run, "training").release()

    (line,) = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert "process 12 on elsewhere owns it since 2026-01-01T00:00:00+00:00" in line


def test_an_owner_elsewhere_that_beats(run: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused at its next sign of life."""
    path = forge(20.0)
    substitute(monkeypatch, "acquiring.sleep", lambda seconds: os.utime(path))

    with pytest.raises(WorkDirInUseError, match="process 12 on elsewhere owns it since 2026"):
        acquire(run, "training")
    assert records_in(run) == [path]


def test_an_owner_that_ends_for_too_long(run: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for it is bounded, and says so."""
    path = forge(state="ending")
    substitute(monkeypatch, "acquiring.ENDING_SECONDS", 0.5)
    substitute(monkeypatch, "acquiring.sleep", lambda seconds: os.utime(path))

    with pytest.raises(
        WorkDirInUseError, match=r"is ending, and has not ended in 0.5 s: wait until it has ended"
    ):
        acquire(run, "training")


def test_a_run_that_claims_the_directory_too(
    run: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for: it is the owner afterwards, or gives up its claim."""
    path = forge(state="claiming")
    substitute(monkeypatch, "acquiring.sleep", lambda seconds: path.unlink())

    acquire(run, "training").release()


def test_a_claim_that_another_run_has_seen(run: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that claim at one moment, both give way at first, and each looks again."""
    claims: list[Path] = []
    waits: list[float] = []

    def owners(directory: Path) -> list[Owner]:
        if not claims:
            claims.append(forge(state="claiming"))
        return owners_in(directory)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        assert [path for path in records_in(run) if path not in claims] == []
        claims[0].unlink(missing_ok=True)

    substitute(monkeypatch, "acquiring.owners_in", owners)
    substitute(monkeypatch, "acquiring.sleep", wait)
    held = acquire(run, "training")

    assert (len(claims), len(waits), state_of(run)) == (1, 1, "training")
    held.release()


def test_a_heartbeat_shows_that_its_owner_lives(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets the time of the file, and writes the state that it is given."""
    substitute(monkeypatch, "holding.BEAT_SECONDS", 0.01)
    heartbeat = Heartbeat([acquire(run, "training")], lost=print)
    heartbeat.start()
    (path,) = records_in(run)
    os.utime(path, (1.0, 1.0))
    until(lambda: path.stat().st_mtime > 1.0)

    heartbeat.ending()
    until(lambda: state_of(run) == "ending")
    heartbeat.end()

    assert state_of(run) == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "eventloop heartbeat"]


def test_an_owner_that_was_followed(run: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    """It notices that, once, and touches no file of the other one at its end."""
    substitute(monkeypatch, "holding.BEAT_SECONDS", 0.01)
    lost: list[Path] = []
    heartbeat = Heartbeat([acquire(run, "training")], lost=lost.append)
    heartbeat.start()
    (path,) = records_in(run)
    forge()
    path.unlink()
    until(lambda: lost)
    before = contents(run)

    heartbeat.end()

    assert lost == [run]
    assert contents(run) == before


@pytest.mark.parametrize("again", [False, True])
def test_a_directory_that_is_renamed_under_its_owner(
    run: Path, caplog: pytest.LogCaptureFixture, again: bool
) -> None:
    """One line says so; a directory that is made again under the old name has the same owner."""
    held = acquire(run, "training")
    run.rename(run.parent / "renamed")
    if again:
        run.mkdir()
    held.beat()
    held.beat()

    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{run} was renamed or removed while a run writes there")
    assert len(records_in(run)) == again
    held.release()
    shutil.rmtree(run.parent / "renamed")


def test_a_file_that_somebody_removed_is_written_again(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The directory is the same, so its owner is."""
    held = acquire(run, "training")
    (path,) = records_in(run)
    path.unlink()
    held.beat()
    assert (records_in(run), caplog.records) == ([path], [])
    held.release()


def test_a_forked_child_gives_nothing_back(run: Path) -> None:
    """It neither owns the directory of its parent, nor may it take it."""
    heartbeat = Heartbeat([held := acquire(run, "training")], lost=print)
    heartbeat.start()
    reading, writing = os.pipe()

    def give_back_and_take() -> None:
        heartbeat.ending()
        heartbeat.end()
        held.release()
        try:
            acquire(run, "training")
        except WorkDirInUseError as error:
            os.write(writing, str(error).encode())

    os.waitpid(forked(give_back_and_take), 0)
    said = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)

    assert f"process {os.getpid()} on " in said
    assert state_of(run) == "training"
    heartbeat.end()
    assert state_of(run) == ""


@pytest.mark.slow
def test_a_command_owns_a_directory_for_a_while(run: Path) -> None:
    """It waits for nobody, says what to do, and gives the directory back after an error too."""

    def command() -> None:
        with owning(run, "pruning", "nothing"):
            assert state_of(run) == "pruning"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()
    assert state_of(run) == ""

    with alive(run) as training, pytest.raises(WorkDirInUseError) as refused, owning(run, "pruning", "do X"):
        pass
    assert f"process {training.process.pid} on " in str(refused.value)
    assert str(refused.value).endswith(", and is training: do X")


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """It has no owner, and the error of the system says so."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match="file"):
        acquire(file, "training")


def test_a_change_that_cannot_be_written_is_logged(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk may be full; the owner stays the owner."""
    held = acquire(run, "training")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    substitute(monkeypatch, "holding.write_record", full)
    held.change("ending")
    assert f"{run} does not say that its run is ending: " in caplog.text
    assert state_of(run) == "training"
    held.release()
