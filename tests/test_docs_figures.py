"""The figures in README and docs are those of the committed results.

Each function returns the texts that a page must have, made of the records. After a new measurement the failure shows what
the page has to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, PERFORMANCE, MEASURING = "README.md", "docs/performance.md", "docs/measuring.md"
TRACKERS = "docs/howto/trackers.md"
WHOLE, SYNC = "eventloop", "torch.save + fsync"
PEERS = {
    "ignite": "pytorch-ignite",
    "MMEngine": "MMEngine",
    "Transformers": "transformers.Trainer",
    "Lightning": "Lightning",
}
SIZES = {"1 ms": 2, "20 ms": 3}
"""Lengths of a step in `peers.json`, and the digits after the point with which the whole run is quoted."""


def result(name: str) -> Any:
    """The record of a benchmark."""
    return msgspec.json.decode((RESULTS / f"{name}.json").read_bytes())


def cell(name: str, row: str, column: str) -> str:
    """A cell of the first table in the page of a benchmark that has this row and this column."""
    header: list[str] = []
    for line in (RESULTS / f"{name}.md").read_text("utf-8").splitlines():
        cells = [text.strip() for text in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if not cells:
            header = header if line.startswith("|-") else []
        elif not header:
            header = cells
        elif cells[0] == row and column in header:
            return cells[header.index(column)]
    raise LookupError(f"{name}.md has no table with the row {row!r} and the column {column!r}")


def met(is_met: bool) -> str:
    """How a page says whether a goal is met."""
    return "met" if is_met else "**not met**"


def goal(name: str, what: str) -> Any:
    """A goal of a record, by how its text begins."""
    return next(each for each in result(name)["goals"] if each["goal"].startswith(what))


def whole_run(size: str, engine: str, digits: int) -> str:
    """The median of an engine's whole run, to that of the bare loop."""
    return f"{result('peers')['sizes'][size]['compared'][engine]['wall'][1]:.{digits}f}×"


def step(size: str) -> str:
    """The length of a bare step."""
    return f"{result('peers')['sizes'][size]['bare_step'] * 1e3:.2g} ms"


def is_met(size: str) -> str:
    part = result("peers")["sizes"][size]
    return f"{part['goal']}×, {met(part['compared'][WHOLE]['wall'][1] <= part['goal'])}"


# --- README ------------------------------------------------------------------------------------------------------


def the_first_page() -> list[str]:
    """The table "What it costs"."""
    event, frequent = goal("hook_overhead", "build+emit / plain, 10"), result("digits_overhead")
    one, two = (result(name)["ways"] for name in ("checkpoint_stall", "checkpoint_stall_two_threads"))
    paid = [one[WHOLE][measure] for measure in ("cost / sync", "halves / sync")]
    by_hand, ours = (frequent["compared"][name]["wall"] for name in ("by hand", WHOLE))
    rows = [
        f"to a plain loop over them | {float(event['measured']):.1f}× | 1.5×, {met(event['met'] == 'yes')} |",
        *(
            f"at a step of {step(size)} (by hand {whole_run(size, 'by hand', 2)}, {others(size)}) | "
            f"{whole_run(size, WHOLE, digits)} | {is_met(size)} |"
            for size, digits in SIZES.items()
        ),
        (
            f"the same at {frequent['bare_step'] * 1e3:.1f} ms, with a durable checkpoint every "
            f"{23 * frequent['bare_step'] * 1e3:.0f} ms (by hand {by_hand:.2f}×, not durable) | {ours:.2f}× | "
            f"{frequent['goal']}×, {met(ours <= frequent['goal'])} |"
        ),
        (
            f"blocks the training thread, to `torch.save` and fsync | {one[WHOLE]['blocked'] * 1e3:.0f} ms, "
            f"{one[WHOLE]['blocked / sync'] * 100:.1f} % | 2 %, {met(one[WHOLE]['blocked / sync'] <= 0.02)} |"
        ),
        (
            f"one torch thread; two on two CPUs | {min(paid) * 100:.0f} to {max(paid) * 100:.0f} %; {two[WHOLE]['cost / sync']:.1f} times |"
        ),
    ]
    rows += [sharded(), in_company()]
    p50, p99, _ = result("slow_writers")["slow"]["ratios"]["eventloop, slow writer"]
    return [*rows, f"leaves the median step at {p50:.2f}× and the 99th percentile at {p99:.2f}×."]


def sharded() -> str:
    """For how long a save of a sharded model blocks, to PyTorch's own, and its goal."""
    shares = [ways[WHOLE] / ways["dcp.save"] for ways in result("sharded_saves")["blocked"].values()]
    alone, busy = (f"{share * 100:.1f} %" for share in shares)
    return f"to `dcp.save`: alone; in company | {alone}; {busy} | 2 %, {met(max(shares) <= 0.02)} |"


def in_company() -> str:
    """The range of whole runs in company, to by hand, and its goal."""
    found = [
        row["engines"][WHOLE]["whole"] / row["engines"]["by hand"]["whole"]
        for training in result("company")["cells"].values()
        for company, row in training.items()
        if company != "alone"
    ]
    told = goal("company", "whole run in company")
    return f"{min(found):.2f} to {max(found):.2f}× | 1.3×, {met(told['met'] == 'yes')} |"


def others(size: str) -> str:
    return ", ".join(
        f"{name} {whole_run(size, key, 2)}" for name, key in PEERS.items() if key != "transformers.Trainer"
    )


# --- performance -------------------------------------------------------------------------------------------------


def one_event() -> list[str]:
    """The table of systems, and the sentences below it."""
    systems = {
        "torchtnt": "torchtnt CallbackHandler",
        "MMEngine": "mmengine call_hook",
        "pluggy": "pluggy hook",
        "ignite": "ignite fire_event",
        "blinker": "blinker send",
        "Transformers": "transformers CallbackHandler",
        "Lightning": "lightning _call_callback_hooks",
    }
    rows = []
    for handlers in (1, 10):
        column = f"{handlers} handlers"
        ours = cell("hook_overhead", "eventloop bus.emit, event built too", column)
        ratios = [cell("hook_overhead", row, column) for row in systems.values()]
        rows.append(f"| {handlers} | **{ours}×** | {' | '.join(f'{short(ratio)}×' for ratio in ratios)} |")
    same = cell("hook_overhead", "torchtnt, callbacks all of one class", "10 handlers")
    figures, one = result("hook_overhead")["figures"], goal("hook_overhead", "build+emit / plain, 1 ")
    hand = figures["handoff"]["bus.emit"]["median_ns"]
    rate = result("throughput")["figures"]["rate"]
    return [
        f"| handlers | eventloop | {' | '.join(systems)} |",
        *rows,
        f"The goal for one handler is 2.5×, {met(one['met'] == 'yes')}.",
        f"ten callbacks of one class cost it {same}×.",
        f"without a subscriber costs {figures['inline']['bus.wants']['median_ns']:.0f} ns and is not built.",
        f"costs the emitting thread {hand / 1e3:.2f} µs; the goal is 0.5 µs, {met(hand <= 500)}.",
        f"get {rate / 1e3:.0f},000 events a second (goal 300,000)",
    ]


def short(number: str) -> str:
    """Two digits."""
    return f"{float(number):.0f}" if float(number) >= 9.95 else number


def whole_trainings() -> list[str]:
    """The bullets on `peers`."""
    texts = []
    for size, digits in SIZES.items():
        ours = result("peers")["sizes"][size]["compared"][WHOLE]
        beside = ", ".join(f"{name} {whole_run(size, key, digits)}" for name, key in PEERS.items())
        texts.append(
            f"At a step of {step(size)} the whole run takes {whole_run(size, WHOLE, digits)} (its mean step "
            f"{ours['mean'][1]:.{digits}f}×, its median step {ours['p50'][1]:.{digits}f}×). By hand it takes "
            f"{whole_run(size, 'by hand', digits)}, {beside}, and a second bare loop "
            f"{whole_run(size, 'bare, second process', digits)}. The goal is {is_met(size)}."
        )
    return texts


def the_fastest_peers() -> list[str]:
    """Which peer is nearest to eventloop, or faster."""
    pytest.importorskip("torch")
    from benchmarks.helpers.peers_report import beside_eventloop

    nearest, slower = [], True
    for size in SIZES:
        beside = beside_eventloop(result("peers")["sizes"][size])
        name = min(PEERS, key=lambda name: beside[PEERS[name]])
        slower &= beside[PEERS[name]] > 1
        nearest.append(f"{beside[PEERS[name]]:.2f} at {step(size)} ({name})")
    return [
        (
            f"Of eventloop's run the fastest peer takes {' and '.join(nearest)}. The goal is that every peer takes longer, "
            f"{met(slower)}."
        )
    ]


def a_short_run() -> list[str]:
    """The processor time of a process of 100 iterations."""
    ways = result("short_run")["ways"]
    port, hand = ways["port"], ways["original"]
    more = {part: (port[part] - hand[part]) * 1e3 for part in hand if part not in ("run", "ratio")}
    return [
        f"takes {port['ratio']:.3f} times the processor time of a plain PyTorch script, which takes {hand['run']:.1f} s",
        f"and {ways['port without writers']['ratio']:.3f} times without a writer",
        f"The goal of 1.05 is {met(port['ratio'] <= 1.05)}",
        f"The imports take {more['imports']:.0f} ms more, and the training {more['training']:.0f} ms",
    ]


def frequent_checkpoints() -> list[str]:
    """The table of `digits_overhead`."""
    record = result("digits_overhead")
    ratio = {name: f"{each['wall']:.2f}×" for name, each in record["compared"].items()}
    names = ["by hand", "pytorch-ignite", "MMEngine", "transformers.Trainer", "Lightning"]
    parts = [f"eventloop, {part}" for part in ("hooks only", "no checkpoint")]
    first, second = (ratio[part] for part in parts)
    return [
        f"an MLP of {record['bare_step'] * 1e3:.1f} ms a step",
        f"| {first} | **{second}** | {ratio[WHOLE]} | {' | '.join(ratio[name] for name in names)} |",
        f"each of these, every {23 * record['bare_step'] * 1e3:.0f} ms, is synced",
        f"bytes synced at the same time is at {ratio['bare, bytes synced beside it']}.",
    ]


def checkpoints_of_400_mb() -> list[str]:
    """The table of `checkpoint_stall`, and the bullets below it."""
    record, two = result("checkpoint_stall"), result("checkpoint_stall_two_threads")["ways"]
    ways, rows = record["ways"], []
    for label, name in (
        ("`torch.save` and fsync on the training thread", SYNC),
        ("clone, written by a thread", "clone + thread"),
        ("`torch.distributed.checkpoint.async_save`", "dcp.async_save"),
    ):
        way = ways[name]
        slowest = f"{way['slowest / step']:.1f}×"
        rows.append(
            f"| {label} | {way['blocked'] * 1e3:.0f} ms, {way['blocked / sync'] * 100:.0f} % | {slowest} |"
        )
    ours, rest = ways[WHOLE], [ways[name] for name in ("clone + thread", "dcp.async_save")]
    shares = [way[key] * 100 for way in rest for key in ("cost / sync", "halves / sync")]
    times = [two[name]["cost / sync"] for name in (WHOLE, "clone + thread", "dcp.async_save")]
    return [
        *rows,
        (
            f"| eventloop, durable and hashed | **{ours['blocked'] * 1e3:.0f} ms, {ours['blocked / sync'] * 100:.1f} %** "
            f"| **{ours['slowest / step']:.2f}×** |"
        ),
        f"pays {ours['cost / sync'] * 100:.0f} % of the synchronous save for it, or {ours['halves / sync'] * 100:.0f} %",
        f"the other two pay {min(shares):.0f} to {max(shares):.0f} %.",
        f"it has {record['bandwidth']['ratio']:.2f} of the bandwidth of `dd conv=fsync`",
        f"costs {times[0]:.1f} times a synchronous save, and the other two {times[1]:.1f} and {times[2]:.1f} times",
    ]


def small_checkpoints() -> list[str]:
    ways = result("small_checkpoints")["ways"]
    ours, sync = ways[WHOLE], ways[SYNC]
    return [
        f"takes {ours['cpu_ms']:.1f} ms of processor time in all processes",
        f"take {sync['cpu_ms']:.1f} ms; the goal of 1.5 ms is {met(ours['cpu_ms'] <= 1.5)}",
        f"takes {ours['cost']:.3f} times as long, and with `torch.save` and fsync {sync['cost']:.3f} times",
    ]


def slow_writers() -> list[str]:
    """The table of writers."""
    record = result("slow_writers")
    slow, burning, all_four = (record[key]["ratios"] for key in ("slow", "burning", "everything"))
    ours, hand, bare = slow.values()
    process, thread, inline, bare_thread = (each[2] for each in burning.values())
    four, three, threaded = all_four.values()
    image = record["media"]["added_ms"]
    assert image["eventloop, image"] < 1
    return [
        (
            f"median step {ours[0]:.2f}×, p99 {ours[1]:.2f}× | `SummaryWriter`: {hand[0]:.2f}× and {hand[1]:.0f}×; on a "
            f"bare thread {bare[0]:.2f}× and {bare[1]:.2f}× |"
        ),
        f"adds under 1 ms to its step and the next 20 | `SummaryWriter`: {image['SummaryWriter, image']:.0f} ms |",
        (
            f"median {four[0]:.2f}×, p99 {four[1]:.2f}× | {three[0]:.1f}× and {three[1]:.1f}×; on a bare thread "
            f"{threaded[0]:.1f}× and {threaded[1]:.1f}× |"
        ),
        (
            f"in a process {process:.2f}×, on a thread {thread:.1f}× | {inline:.1f}× inline, {bare_thread:.1f}× on a bare "
            "thread |"
        ),
    ]


def hooks_and_metrics() -> list[str]:
    rows = result("hook_cost")["rows"]
    every = [
        max(r for label, r in row["ours_over"].items() if label != "by hand")
        for row in rows.values()
        if set(row["ours_over"]) - {"by hand"}
    ]
    assert round(max(every), 2) <= 1.0
    ema, schedule = rows["EMAHook"]["ours_over"], rows["ParamSchedulerHook, PyTorch's LinearLR"]["ours_over"]
    return [
        f"(MMEngine's costs {1 / ema['MMEngine EMAHook']:.1f} times ours)",
        f"An EMA update costs {ema['by hand']:.1f}× a bare",
        f"one of PyTorch's schedulers {schedule['by hand']:.1f}× its own `step()`",
    ]


def memory_and_scaling() -> list[str]:
    pytest.importorskip("numpy")
    from benchmarks.helpers.straight_lines import Series

    sweeps = result("scaling")["sweeps"]
    emit = Series.of("emit", sweeps["handlers"]["bus.emit, event built too"])
    thread = Series.of("thread", sweeps["writers"]["the training thread"])
    run = Series.of("run", sweeps["iterations"]["since the beginning"])
    memory = Series.of("memory", sweeps["iterations"]["resident memory"])
    own = sweeps["parameters"]["default hooks and the loop"]["median"]
    assert [each.shape for each in (emit, thread, run, memory)] == ["straight", "level", "straight", "level"]
    return [
        f"{emit.fit().slope:.0f} ns a handler (R² {emit.fit().r2:.3f})",
        f"level within {thread.spread * 100:.0f} % from 0 to {thread.xs[-1]:.0f} writers",
        f"The time of a run is straight up to a million iterations (R² {run.fit().r2:.3f})",
        f"memory is level within {memory.spread * 100:.0f} %",
        f"the hooks' own {min(own):.0f} to {max(own):.0f} µs",
        f"a thousand times too slow: +{result('memory_training')['growth_mib']:.1f} MiB",
    ]


# --- measuring ---------------------------------------------------------------------------------------------------


def the_account() -> list[str]:
    goals, figures = result("accounting")["goals"], result("accounting")["figures"]
    one, ten, short_step, step = ((float(each["measured"].removesuffix("x")), each) for each in goals)
    milliseconds = [figures[f"{each['goal']}, off"]["median_ns"] / 1e6 for _, each in (short_step, step)]
    is_met = met(all(each["met"] == "yes" for _, each in (short_step, step)))
    report = result("report")["figures"]
    most = max(run["megabytes"] for runs in report.values() for run in runs)
    return [
        (
            f"An iteration of {milliseconds[0]:.1f} ms takes {short_step[0]:.2f} of its time without the account, and one "
            f"of {milliseconds[1]:.1f} ms {step[0]:.2f} (goals 1.02 and 1.01, {is_met})."
        ),
        f"to ten handlers that do nothing takes {ten[0]:.2f} of its time, to one handler {one[0]:.2f}",
        f"and {most:.0f} MB",
    ]


def the_trackers() -> list[str]:
    steps = result("trackers")["steps"]
    process, thread = (
        median(of / alone for of, alone in zip(steps[way]["p99"], steps["none"]["p99"], strict=True))
        for way in ("in processes", "on threads")
    )
    return [
        f"take {process:.2f} times as long with all four at once in processes, the default, and {thread:.2f} times on threads"
    ]


@pytest.mark.parametrize(
    ("page", "texts"),
    [
        (README, the_first_page),
        *(
            (PERFORMANCE, each)
            for each in (
                one_event,
                whole_trainings,
                the_fastest_peers,
                a_short_run,
                frequent_checkpoints,
                checkpoints_of_400_mb,
                small_checkpoints,
                slow_writers,
                hooks_and_metrics,
                memory_and_scaling,
            )
        ),
        (MEASURING, the_account),
        (TRACKERS, the_trackers),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_page_has_the_figures_of_the_results(page: str, texts: Callable[[], list[str]]) -> None:
    """Each text, made of the records, stands in the page, whatever the breaks of its lines and what it has in bold."""
    there = plain((ROOT / page).read_text(encoding="utf-8"))

    missing = [text for text in texts() if plain(text) not in there]
    assert not missing, f"{page} should say, by benchmarks/results:\n" + "\n".join(missing)


def plain(text: str) -> str:
    """A text on one line, without bold and the markers of a list."""
    return re.sub(r"\s+", " ", text.replace("**", "").replace("\n- ", " "))
