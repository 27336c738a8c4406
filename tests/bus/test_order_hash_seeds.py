"""The order of handlers does not depend on the hash seed."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable

import pytest

from eventloop.bus import Bus
from eventloop.events import AfterTrainIter

SEEDS = range(20)

PROGRAM = """
import json, random, sys
from eventloop.bus import Bus
from eventloop.events import AfterTrainIter

def ran(bus, order):
    rng = random.Random(7)
    for i in range(40):
        name = f"h{i}"
        if rng.random() < 0.2:
            def receiver(sender, event, name=name): order.append(name)
            receiver.__qualname__ = name
            bus.signal("after_train_iter").connect(receiver)
        else:
            bus.subscribe(lambda event, name=name: order.append(name), "after_train_iter", name=name,
                          priority=rng.choice([0, 10, 30, 50, 50, 50, 70, 100]))
    bus.emit(AfterTrainIter())
    return order

bus, order = Bus(), []
ran(bus, order)
print(json.dumps({"order": order, "plan": [row.name for row in bus.plan("after_train_iter")],
                  "hash": hash("eventloop")}))
"""


@pytest.mark.slow
def test_order_is_the_same_with_every_hash_seed(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Forty handlers, a fifth of them foreign, run in the order of `bus.plan` under each of 20 seeds."""
    outcomes = [json.loads(python(PROGRAM, PYTHONHASHSEED=str(seed)).stdout) for seed in SEEDS]

    assert len({outcome["hash"] for outcome in outcomes}) == len(SEEDS)
    assert all(outcome["order"] == outcome["plan"] == outcomes[0]["plan"] for outcome in outcomes)
    assert len(outcomes[0]["order"]) == 40


def test_order_is_by_priority_then_registration(bus: Bus) -> None:
    """The order is the stable sort of the registrations by priority."""
    rng, order = random.Random(3), list[int]()
    priorities = [rng.randrange(0, 101, 10) for _ in range(60)]
    for i, priority in enumerate(priorities):
        bus.subscribe(lambda event, i=i: order.append(i), "after_train_iter", priority=priority)

    bus.emit(AfterTrainIter())

    assert order == sorted(range(60), key=priorities.__getitem__)
