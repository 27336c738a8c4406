"""Test that several ranks apply the same commands after the same iteration, whichever rank they reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Return what the ranks have to say."""
    script = Path(__file__).with_name("steered_ranks.py").read_text(encoding="utf-8")
    script = script.replace("int(sys.argv[3])", str(request.param))
    return run_ranks(script, tmp_path_factory.mktemp(f"ranks{request.param}"), request.param)


def test_all_ranks_do_the_same(ranks: Ranks) -> None:
    """In each case the ranks apply and refuse the same commands at the same places, and end with equal weights."""
    for name, said in ranks[0].items():
        for other in ranks[1:]:
            for key in ("happened", "at", "weights", "code"):
                assert other[name][key] == said[key], (name, key)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("steered", "repeated"),
        ("steered", "resumed"),
        ("epochs of 1", "repeated, 1"),
        ("epochs of 2", "repeated, 2"),
        ("by iteration", "again by iteration"),
    ],
)
def test_a_repetition_is_the_same_to_the_bit(ranks: Ranks, one: str, other: str) -> None:
    """A run that is given the record, and one that resumes from before its last commands, end as the steered run."""
    assert ranks[0][one]["weights"] == ranks[0][other]["weights"]
    if other != "resumed":
        assert ranks[0][one]["happened"] == ranks[0][other]["happened"]


def test_when_commands_are_applied(ranks: Ranks) -> None:
    """A command is applied after the next iteration, or between the epochs if that is earlier, before the validation."""
    assert ranks[0]["steered"]["happened"] == [
        [3, 0, "scale"],
        [4, 1, "scale"],
        [4, 1, "checkpoint"],
        [8, 2, "validate"],
        [8, 2, "scale"],
    ]
    assert ranks[0]["stop"]["happened"] == [[6, 1, "stop"]]
    assert (ranks[0]["stop"]["at"], ranks[0]["stop"]["reason"]) == (6, "enough")


@pytest.mark.parametrize("name", ["epochs of 1", "epochs of 2", "each validated"])
def test_short_epochs_delay_no_command(ranks: Ranks, name: str) -> None:
    """Epochs of one or two batches, and a validation after each iteration, leave a place for commands."""
    ((at, _, command),) = ranks[0][name]["happened"]

    assert command == "scale"
    assert at in (4, 5)


def test_a_command_that_fails_on_one_rank(ranks: Ranks) -> None:
    """It is refused on all ranks, with the number of that rank; one that fails on all has one reason."""
    last, happened = len(ranks) - 1, ranks[0]["failures"]["happened"]

    assert (
        happened[0][3]
        == f"rank {last}: it raised ValueError: no luck; other ranks have applied it, and now differ"
    )
    assert happened[1] == [3, 0, "scale"]
    assert happened[2][3] == "it raised ValueError: no luck"
    assert happened[3][3].startswith("unknown command 'much'")


def test_a_handler_saves(ranks: Ranks) -> None:
    """A handler on all ranks saves once, at this boundary; one on one rank saves after the next iteration."""
    everybody = tuple(range(len(ranks)))

    assert ranks[0][f"save on {everybody} after_train_iter"]["saved"] == ["iter_2", "iter_9"]
    assert ranks[0][f"save on ({len(ranks) - 1},) after_train_iter"]["saved"] == ["iter_10", "iter_3"]
    assert ranks[0][f"save on {everybody} after_val_epoch"]["saved"] == ["epoch_2"]


def test_pauses(ranks: Ranks) -> None:
    """All ranks wait and go on together; SIGTERM to the last rank during a pause ends all, with a checkpoint."""
    assert ranks[0]["go"]["happened"] == [[4, 1, "pause"], [4, 1, "checkpoint"], [4, 1, "go"]]
    assert ranks[0]["go"]["at"] == 12
    ended = ranks[0]["signal in a pause"]
    assert (ended["at"], ended["code"], ended["saved"]) == (4, 143, ["iter_4"])
    assert ended["reason"] == f"rank {len(ranks) - 1} asked to stop: preempted by SIGTERM"


def test_signals_that_save(ranks: Ranks) -> None:
    """A signal to all ranks saves at the end of that iteration, one to a single rank after the next; all go on."""
    assert ranks[0]["signal to all"]["saved"] == ["iter_6"]
    assert ranks[0]["signal to one"]["saved"] == ["iter_7"]
    assert ranks[0]["signal to one"]["at"] == 12


def test_a_model_that_is_divided_over_the_ranks(ranks: Ranks) -> None:
    """A handler on all ranks saves at its boundary, and a command at the next; both can be resumed from."""
    said = ranks[0]["sharded"]

    assert said["saved"] == ["iter_2", "iter_6"]
    assert said["durable"] == ["iter_2", "iter_6"]
    assert [rank["sharded"]["equal"] for rank in ranks] == [[[2, True], [6, True]]] * len(ranks)
