"""Test that ranks take decisions alike and raise errors together; real processes exchange them over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventloop.state.exchange import decided_by_rank_0, raised_together
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]

BEGIN = """
import errno, json, logging, os, socket, sys
import torch.distributed as dist

rank = int(sys.argv[1])
socket.gethostname = lambda: "ab"[rank]
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

from eventloop.state.exchange import decided_by_rank_0, raised_together
from eventloop.util.errors import CheckpointError

lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("eventloop").addHandler(Keep())

def told(call):
    try:
        return ["returned", call()]
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "__notes__", [])]

def raises(error):
    raise error
"""

TOGETHER = (
    BEGIN
    + """
class Odd(CheckpointError):  # takes other arguments than it is pickled with
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")

class Local(ValueError):
    def __reduce__(self):
        raise TypeError("no pickle of this")

decisions = {
    "value": lambda: {"path": f"of {rank}"},
    "missing": lambda: raises(FileNotFoundError(errno.ENOENT, "nothing there", "epoch_1")),
    "odd": lambda: raises(Odd(1, 2)),
    "local": lambda: raises(Local("as text")),
    "key": lambda: raises(KeyError("accuracy")),
    "no pickle": lambda: (lambda: None),
}
said = {name: told(lambda: decided_by_rank_0(decide)) for name, decide in decisions.items()}

def together(failing):
    with raised_together("the work"):
        if rank in failing:
            raises(failing[rank])
        return rank

blocks = {
    "none fails": {},
    "rank 1 fails": {1: CheckpointError("damaged")},
    "an odd one": {0: Odd(1, 2)},
    "five arguments": {0: UnicodeDecodeError("utf-8", b"x", 0, 1, "why")},
    "both fail": {0: ValueError("mine"), 1: OSError("other")},
}
said |= {name: told(lambda: together(failing)) for name, failing in blocks.items()}
print(json.dumps(said))
"""
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return what each rank got from each exchange."""
    return run_ranks(TOGETHER, tmp_path_factory.mktemp("together"))


def test_all_ranks_get_the_decision_of_rank_0(ranks: Ranks) -> None:
    """The function is called on rank 0 alone, and its result is returned on both."""
    assert [said["value"] for said in ranks] == [["returned", {"path": "of 0"}]] * 2


@pytest.mark.parametrize(
    ("decision", "own", "others", "text"),
    [
        ("missing", "FileNotFoundError", "FileNotFoundError", "[Errno 2] nothing there: 'epoch_1'"),
        ("key", "KeyError", "KeyError", "'accuracy'"),
        ("odd", "Odd", "CheckpointError", "1 and 2"),
        ("local", "Local", "ValueError", "as text"),
    ],
)
def test_an_error_of_rank_0_is_raised_on_all(
    ranks: Ranks, decision: str, own: str, others: str, text: str
) -> None:
    """Its class and text arrive, or the nearest class that can be sent, and a note says whose it is."""
    assert ranks[0][decision] == [own, text, []]
    assert ranks[1][decision] == [others, text, ["raised on rank 0 on host a, which decides for all ranks"]]


def test_a_decision_that_cannot_be_sent_is_an_error_on_all(ranks: Ranks) -> None:
    """No rank waits for a value that cannot be pickled."""
    assert all("returned" not in said["no pickle"] for said in ranks)
    assert ranks[0]["no pickle"][1] == ranks[1]["no pickle"][1]


def test_a_block_that_succeeds_everywhere_returns(ranks: Ranks) -> None:
    """Each rank goes on with what its own block returned."""
    assert [said["none fails"] for said in ranks] == [["returned", 0], ["returned", 1]]


NO_TEXT = "'utf-8' codec can't decode byte 0x78 in position 0: why"


@pytest.mark.parametrize(
    ("block", "failing", "own", "others"),
    [
        (
            "rank 1 fails",
            1,
            ["CheckpointError", "damaged"],
            [
                "CheckpointError",
                "the work failed on rank 1 on host b, so on all ranks: CheckpointError: damaged",
            ],
        ),
        (
            "an odd one",
            0,
            ["Odd", "1 and 2"],
            ["CheckpointError", "the work failed on rank 0 on host a, so on all ranks: Odd: 1 and 2"],
        ),
        (
            "five arguments",
            0,
            ["UnicodeDecodeError", NO_TEXT],
            [
                "UnicodeError",
                f"the work failed on rank 0 on host a, so on all ranks: UnicodeDecodeError: {NO_TEXT}",
            ],
        ),
    ],
)
def test_an_error_of_one_block_is_raised_on_all(
    ranks: Ranks, block: str, failing: int, own: list[str], others: list[str]
) -> None:
    """The rank that failed raises its own error, the other one an error that names rank, host and error."""
    assert ranks[failing][block][:2] == own
    assert ranks[1 - failing][block][:2] == others


def test_each_rank_that_fails_raises_its_own_error(ranks: Ranks) -> None:
    """Where all fail, no error hides another."""
    assert [said["both fail"][:2] for said in ranks] == [["ValueError", "mine"], ["OSError", "other"]]


GONE = (
    BEGIN
    + """
if sys.argv[1] == GONE:
    print("{}", flush=True)
    os._exit(0)

def together():
    with raised_together("the work"):
        if FAILS:
            raise ValueError("mine")

def decide():
    return decided_by_rank_0(lambda: "decided")

said = {"block": told(together), "decision": told(decide), "lines": lines}  # the first waits for the other's end
print(json.dumps(said), flush=True)
os._exit(0)
"""
)


def run_without(gone: int, folder: Path, *, fails: bool) -> dict[str, Any]:
    """Return what the rank that is left got."""
    return run_ranks(f"GONE, FAILS = {str(gone)!r}, {fails}\n{GONE}", folder)[1 - gone]


def test_without_rank_0_no_rank_decides(tmp_path: Path) -> None:
    """A rank that cannot reach rank 0 raises an error that says so; it does not decide for itself."""
    said = run_without(0, tmp_path, fails=False)

    kind, text, _ = said["decision"]
    assert (kind, "rank 1 on host b expected a decision of rank 0, which cannot be reached" in text) == (
        "RuntimeError",
        True,
    )
    assert said["block"][0] == "RuntimeError"
    assert "the work needs all ranks, and rank 1 on host b cannot reach another one" in said["block"][1]


def test_rank_0_keeps_its_decision_without_the_others(tmp_path: Path) -> None:
    """Rank 0 logs that nobody hears it, and its own error is not replaced by that of the exchange."""
    said = run_without(1, tmp_path, fails=True)

    assert said["decision"] == ["returned", "decided"]
    assert said["lines"][0].startswith("rank 0 cannot send its decision to the other ranks: ")
    kind, text, notes = said["block"]
    assert (kind, text) == ("ValueError", "mine")
    assert notes[0].startswith("the other ranks could not be told: ")


def test_one_rank_makes_no_exchange() -> None:
    """Without a process group both are plain calls."""
    assert decided_by_rank_0(lambda: 3) == 3
    error = ValueError("as it is")
    with pytest.raises(ValueError, match=r"^as it is$") as raised, raised_together("the work"):
        raise error
    assert raised.value is error
