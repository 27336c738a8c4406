"""Worker processes at the edges of a program: its main script, its exit, its death, its forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.process_support import until

ROOT = str(Path(__file__).parents[2])

HANDLERS = """
import os, time
def note(event):
    with open("log.txt", "a") as file:
        print(os.getpid(), event.iter, file=file)
def hang(event):
    note(event)
    time.sleep(3600)
def closed():
    with open("log.txt", "a") as file:
        print("closed", file=file)
"""

SETUP = """
import os, sys, time, warnings
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter
import my_handlers
print("main is run", flush=True)
def emit(bus, n):
    for i in range(n):
        bus.emit(AfterTrainIter(iter=i))
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a script with a module of handlers beside it, in its folder."""
    (tmp_path / "my_handlers.py").write_text(HANDLERS, encoding="utf-8")

    def start(program: str) -> subprocess.Popen[str]:
        path = tmp_path / "main.py"
        path.write_text(SETUP + program, encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, str(path)],
            env={"PATH": "", "PYTHONPATH": ROOT},
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


Script = Callable[..., "subprocess.Popen[str]"]


def logged(tmp_path: Path) -> list[str]:
    path = tmp_path / "log.txt"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def gone(pid: int) -> bool:
    """True when there is no such process, or only its remains."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_main_script_without_a_guard_is_run_once(script: Script, tmp_path: Path) -> None:
    """A worker does not import it again, and finds what lies beside it; the exit delivers, and leaves no worker."""
    ran = script(
        """
bus = Bus(drain_timeout=20)
bus.subscribe(my_handlers.note, "after_train_iter", offload="process", on_close=my_handlers.closed)
emit(bus, 100)
"""
    )
    out, err = ran.communicate(timeout=60)
    lines = [line.split() for line in logged(tmp_path)]

    assert (out, err, ran.returncode) == ("main is run\n", "", 0)
    assert [line[-1] for line in lines] == [*map(str, range(100)), "closed"]
    assert gone(int(lines[0][0]))


@pytest.mark.slow
def test_exit_does_not_wait_for_a_worker_that_hangs(script: Script, tmp_path: Path) -> None:
    """It is killed."""
    ran = script(
        """
bus = Bus(drain_timeout=2)
bus.subscribe(my_handlers.hang, "after_train_iter", offload="process", name="hung")
emit(bus, 2)
"""
    )
    _, err = ran.communicate(timeout=60)

    assert "events left undelivered: hung (2)" in err
    until(lambda: gone(int(logged(tmp_path)[0].split()[0])))


@pytest.mark.slow
def test_killed_program_leaves_no_worker(script: Script, tmp_path: Path) -> None:
    """Its worker delivers what it was sent, and ends, although a forked child of the program holds the pipes."""
    ran = script(
        """
bus = Bus()
sub = bus.subscribe(my_handlers.note, "after_train_iter", offload="process", on_close=my_handlers.closed)
assert sub.subscriber.runner.ready.wait(20)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
emit(bus, 50)
bus.flush()
os.kill(os.getpid(), 9)
"""
    )
    assert ran.stdout is not None
    assert ran.stderr is not None
    ran.stdout.readline()
    child = int(ran.stdout.readline())
    try:
        ran.wait(60)
        until(lambda: logged(tmp_path)[-1:] == ["closed"])
        worker = int(logged(tmp_path)[0].split()[0])
        until(lambda: gone(worker))
    finally:
        os.kill(child, signal.SIGKILL)
        ran.stdout.close()
        ran.stderr.close()


@pytest.mark.slow
def test_fork_leaves_the_parents_worker_alone(script: Script, tmp_path: Path) -> None:
    """A forked child's bus is inert; the parent's goes on, and its worker ends while the child lives."""
    ran = script(
        """
bus = Bus()
sub = bus.subscribe(my_handlers.note, "after_train_iter", offload="process")
assert sub.subscriber.runner.ready.wait(20)
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)  # Python 3.12's, of any fork
child = os.fork()
if child == 0:
    emit(bus, 5)
    bus.close()
    time.sleep(60)
    os._exit(0)
emit(bus, 3)
assert bus.close(20)
assert sub.subscriber.closed.is_set()
os.kill(child, 9)
os.waitpid(child, 0)
"""
    )
    _, err = ran.communicate(timeout=60)

    assert (err, ran.returncode) == ("", 0)
    assert [line.split()[-1] for line in logged(tmp_path)] == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "ignored"),
    [("SIGINT SIGTERM", True), ("SIGUSR1 SIGUSR2 SIGHUP SIGQUIT SIGXCPU SIGTERM", False)],
)
def test_what_reaches_the_whole_group_ends_no_worker(
    script: Script, tmp_path: Path, signals: str, ignored: bool
) -> None:
    """Ctrl-C, or what a scheduler sends to all processes of a job, is for the program: a worker is deaf to it from its
    first moment on, whatever the program itself does with it."""
    ran = script(
        f"""
import signal
told = [getattr(signal, name) for name in {signals!r}.split()]
for signum in told if {ignored} else ():
    signal.signal(signum, signal.SIG_IGN)
bus = Bus()
sub = bus.subscribe(my_handlers.note, "after_train_iter", offload="process", on_close=my_handlers.closed)
while sub.subscriber.runner.worker is None:
    time.sleep(0.001)
for signum in told:
    os.kill(sub.subscriber.runner.worker.pid, signum)
assert sub.subscriber.runner.ready.wait(20)
for signum in told:
    os.kill(sub.subscriber.runner.worker.pid, signum)
emit(bus, 3)
assert bus.close(20)
assert sub.subscriber.runner.restarts.deaths == 0
"""
    )
    _, err = ran.communicate(timeout=60)

    assert (err, ran.returncode) == ("", 0)
    assert logged(tmp_path)[-1] == "closed"


@pytest.mark.slow
def test_worker_is_where_it_was_subscribed(script: Script, tmp_path: Path) -> None:
    """Also one that is started after a change of directory: it finds modules by a relative path, and files."""
    ran = script(
        """
sys.path[0] = "."
bus = Bus()
sub = bus.subscribe(my_handlers.note, "after_train_iter", offload="process")
os.chdir("/")
emit(bus, 1)
assert bus.flush(20)
os.kill(sub.subscriber.runner.worker.pid, 9)
emit(bus, 3)
assert bus.close(20)
"""
    )
    _, err = ran.communicate(timeout=60)
    lines = [line.split() for line in logged(tmp_path)]

    assert ("is started again" in err, ran.returncode) == (True, 0)
    assert [iteration for _, iteration in lines] == ["0", "0", "1", "2"]
    assert len({pid for pid, _ in lines}) == 2


@pytest.mark.slow
def test_folder_of_handlers_may_have_any_name(script: Script, tmp_path: Path) -> None:
    """A file system has bytes, which need not be UTF-8."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    Path(folder, "odd_handlers.py").write_text(HANDLERS, encoding="utf-8")
    ran = script(
        """
sys.path.append(os.fsdecode(os.getcwdb() + b"/caf\\xe9"))
import odd_handlers
bus = Bus()
sub = bus.subscribe(odd_handlers.note, "after_train_iter", offload="process")
emit(bus, 1)
assert bus.close(20)
"""
    )
    _, err = ran.communicate(timeout=60)

    assert (err, ran.returncode) == ("", 0)
    assert len(logged(tmp_path)) == 1
