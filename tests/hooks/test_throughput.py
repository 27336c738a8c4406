"""ThroughputHook: samples, tokens and FLOPs a second. Rates times seconds are the counts of an own tally."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from eventloop import SkipIteration, Trainer
from eventloop.hooks import CallbackHook, LoggerHook, ThroughputHook
from eventloop.model.flops import FlopCounter, known_peak
from eventloop.writers import JSONLWriter, read_jsonl
from tests.hooks.conftest import Clock, Make, SlowLoader
from tests.support.cuda import set_cuda
from tests.support.reading import Reads, watch_reads

WARM_UP = 2  # iterations that are not measured
SECONDS = 0.5
"""How long each iteration takes on the clock."""
SIZES = (4, 3, 8, 2, 5, 1, 7)


def loader_of(clock: Clock, sizes: tuple[int, ...]) -> SlowLoader:
    """Batches of so many samples of two features; some features are 0."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(size, 2, generator=generator).clamp_min(0) for size in sizes]
    return SlowLoader(clock, SECONDS, [(x, x.sum(1, keepdim=True)) for x in inputs])


@pytest.fixture
def timed(clock: Clock, make_trainer: Make) -> Make:
    """Build trainers whose iterations take `SECONDS` each, with one hook and batches of several sizes."""

    def make(hook: ThroughputHook, *, sizes: tuple[int, ...] = SIZES, **options: Any) -> Trainer:
        options.setdefault("hooks", [hook])
        return make_trainer(train_loader=loader_of(clock, sizes), **options)

    return make


def put(trainer: Trainer, name: str) -> dict[int, float]:
    """The values of a metric, by the number of completed iterations."""
    history = trainer.metrics.history(f"throughput/{name}").values()
    return {iteration + 1: value for value, iteration in history}


def test_samples_a_second_times_seconds_are_the_samples(timed: Make) -> None:
    """Of each window, after the warm-up, every `interval` iterations and in the last one, batches of every size."""
    trainer = timed(ThroughputHook(interval=2))

    trainer.train()

    assert {step: rate * SECONDS for step, rate in put(trainer, "samples_per_sec").items()} == {
        4: sum(SIZES[2:4]) / 2,
        6: sum(SIZES[4:6]) / 2,
        7: SIZES[6],
    }


def test_a_unit_of_the_user_s_own_is_counted(timed: Make) -> None:
    """Numbers and tensors, of any type that a sum of tokens may have; `samples` may be counted in another way."""
    counts: dict[str, Callable[[Any], Any]] = {
        "tokens": lambda batch: (batch[0] > 0).sum(),
        "int32": lambda batch: (batch[0] > 0).sum().to(torch.int32),
        "half": lambda batch: (batch[0] > 0).sum(dtype=torch.float16).reshape(1),
        "numpy": lambda batch: (batch[0].numpy() > 0).sum(),
        "samples": lambda batch: 2 * len(batch[0]),
    }
    trainer = timed(ThroughputHook(interval=7, count=counts))

    trainer.train()

    loader: Any = trainer.train_loader
    tokens = sum(int((x > 0).sum()) for x, _ in loader.batches[WARM_UP:])
    seconds = SECONDS * (len(SIZES) - WARM_UP)
    for unit in ("tokens", "int32", "half", "numpy"):
        assert put(trainer, f"{unit}_per_sec")[7] * seconds == pytest.approx(tokens)
    assert put(trainer, "samples_per_sec")[7] * seconds == pytest.approx(2 * sum(SIZES[WARM_UP:]))


def test_counts_of_half_precision_and_small_ints_do_not_overflow(timed: Make) -> None:
    """Their sum is kept in a type that holds it."""
    counts: dict[str, Callable[[Any], Any]] = {
        "half": lambda batch: torch.tensor(60_000.0, dtype=torch.float16),
        "byte": lambda batch: torch.tensor(200, dtype=torch.uint8),
    }
    trainer = timed(ThroughputHook(interval=7, count=counts))

    trainer.train()

    assert put(trainer, "half_per_sec")[7] * SECONDS == pytest.approx(60_000, rel=1e-3)
    assert put(trainer, "byte_per_sec")[7] * SECONDS == 200


def test_a_tensor_is_not_read_by_the_training_thread(timed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum stays on its device until the background reads it with the other metrics."""
    reads: Reads = watch_reads(monkeypatch)
    during: list[Reads] = []
    trainer = timed(
        ThroughputHook(1, {"tokens": lambda batch: (batch[0] > 0).sum()}),
        hooks=[LoggerHook(2), ThroughputHook(1, {"tokens": lambda batch: (batch[0] > 0).sum()})],
    )
    trainer.bus.subscribe(lambda event: reads.clear(), "before_train_epoch", priority="LOWEST")
    trainer.bus.subscribe(lambda event: during.append(reads.copy()), "after_train_epoch", priority=0)

    trainer.train()

    main = threading.main_thread().name
    assert [name for thread, name in during[0] if thread == main] == []
    assert len(put(trainer, "tokens_per_sec")) == len(SIZES) - WARM_UP


def test_an_evaluation_is_no_part_of_the_time(timed: Make, clock: Clock) -> None:
    """A validation between or within iterations does not lower the rates."""
    around = CallbackHook(before_val=lambda event: clock.advance(64.0))
    trainer = timed(
        ThroughputHook(),
        hooks=[around, ThroughputHook(interval=1)],
        val_loader=[torch.zeros(1)],
        val_step=lambda trainer, batch: {"acc": 0.5},
        max_iters=7,
        val_interval=1,
    )

    trainer.train()

    assert [rate * SECONDS for rate in put(trainer, "samples_per_sec").values()] == [*SIZES[WARM_UP:]]


@pytest.mark.parametrize("data_ranks", [4, 2])
def test_several_ranks_have_a_rate_together(timed: Make, data_ranks: int) -> None:
    """A rank puts its own rate times the number of ranks with other data: the mean over ranks is the sum.

    The utilization is that of one device, and devices that share their data share the operations, too.
    """
    trainer = timed(ThroughputHook(interval=7, flops=True, peak_flops=1.0))
    trainer.world_size, trainer.data_ranks = 4, data_ranks

    trainer.train()

    own = sum(SIZES[WARM_UP:]) / SECONDS / (len(SIZES) - WARM_UP)
    assert put(trainer, "samples_per_sec")[7] == pytest.approx(data_ranks * own)
    assert put(trainer, "flops_per_sec")[7] == pytest.approx(4 * put(trainer, "mfu")[7])


def test_a_second_training_warms_up_again(timed: Make) -> None:
    """What was counted before a stop is in no window after it."""
    trainer = timed(ThroughputHook(interval=4), max_epochs=2)
    trainer.bus.subscribe(
        lambda trainer, event: trainer.stop("enough"), "after_train_iter", start=5, once=True
    )
    trainer.train()
    trainer.train()

    rates = put(trainer, "samples_per_sec")
    assert [*rates] == [4, 12, 14]  # it is stopped after 6 iterations; the next two warm up
    assert rates[12] * SECONDS == sum(SIZES[1:5]) / 4


def test_writers_have_the_rates_with_the_losses(timed: Make) -> None:
    """In the line of the same step, where the logger has the interval of the hook."""
    trainer = timed(
        ThroughputHook(), hooks=[ThroughputHook(interval=4), LoggerHook(4)], writers=[JSONLWriter()]
    )

    trainer.train()

    (row,) = [row for row in read_jsonl(trainer.work_dir / "metrics.jsonl") if row.get("step") == 4]
    assert row["throughput/samples_per_sec"] * SECONDS == sum(SIZES[2:4]) / 2
    assert "loss" in row


# --- FLOPs -------------------------------------------------------------------------------------------------

IN, MIDDLE, OUT, BATCH = 2, 32, 1, 8
FLOPS = 2 * BATCH * (2 * IN * MIDDLE + 3 * MIDDLE * OUT)
"""2·m·n·k for each product: forward and the gradient of the weights in both layers, and the gradient of its inputs in
the second layer, as the first one's inputs are data."""


def two_layers() -> torch.nn.Module:
    torch.default_generator.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(IN, MIDDLE), torch.nn.ReLU(), torch.nn.Linear(MIDDLE, OUT))


def counting(timed: Make, **options: Any) -> Trainer:
    """A trainer of two layers that counts FLOPs."""
    model = options.pop("model", None) or two_layers()
    peak, sizes = options.pop("peak_flops", None), options.pop("sizes", (BATCH,) * 4)
    hook = ThroughputHook(interval=options.pop("interval", 4), flops=True, peak_flops=peak)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return timed(hook, sizes=sizes, model=model, optimizer=optimizer, **options)


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    """Whatever a run does, no operation is counted after it."""
    yield
    assert _get_current_dispatch_mode() is None


def test_flops_are_those_of_the_closed_form(timed: Make) -> None:
    """Forward and backward of one iteration, at each iteration's time; MFU is their part of the peak."""
    trainer = counting(timed, peak_flops=1e6)

    trainer.train()

    assert put(trainer, "flops_per_sec") == {4: FLOPS / SECONDS}
    assert put(trainer, "mfu") == {4: FLOPS / SECONDS / 1e6}


def test_counting_changes_no_weight(timed: Make) -> None:
    """A training with the hook ends bitwise as one without."""
    counted = counting(timed)
    counted.train()
    plain = timed(
        ThroughputHook(),
        sizes=(BATCH,) * 4,
        hooks=[],
        model=(model := two_layers()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        work_dir=counted.work_dir / "plain",
    )
    plain.train()

    pairs = zip(counted.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_only_the_first_iteration_is_counted(timed: Make) -> None:
    """PyTorch's mode is slow: all later iterations run without it."""
    modes: list[bool] = []

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        modes.append(_get_current_dispatch_mode() is not None)
        loss: torch.Tensor = (trainer.model(batch[0]) - batch[1]).square().mean()
        return loss

    counting(timed, train_step=step).train()

    assert modes == [True, False, False, False]


def test_a_compiled_model_is_counted_and_compiled_afterwards(timed: Make) -> None:
    """The counted iteration runs uncompiled, without a warning; PyTorch compiles the model in the next one."""
    completed: list[int] = []
    graphs: list[int] = []  # the completed iterations at each compilation

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(completed))
        return graph.forward

    model = torch.compile(two_layers(), backend=backend)
    trainer = counting(timed, model=model, peak_flops=1e6)
    trainer.bus.subscribe(lambda event: completed.append(event.iter), "after_train_iter")

    trainer.train()
    torch.compiler.reset()

    assert put(trainer, "flops_per_sec") == {4: FLOPS / SECONDS}
    assert graphs == [1]


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100 80GB PCIe", torch.float16, 312e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H200 NVL", torch.bfloat16, None),
        ("NVIDIA GH200 480GB", torch.bfloat16, None),
        ("NVIDIA RTX A1000", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-80GB", torch.float32, None),
        ("NVIDIA A100-SXM4-80GB", None, None),
    ],
)
def test_peaks_of_well_known_cards(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype | None, peak: float | None
) -> None:
    """By the name that CUDA reports, for half precision; a slice of a card and other cards are not known."""
    set_cuda(monkeypatch, get_device_name=lambda device: name)

    assert known_peak(torch.device("cuda", 0), dtype) == peak
    assert known_peak(torch.device("cpu"), dtype) is None


def test_the_type_of_the_products_is_known() -> None:
    """Under autocast it is the type that PyTorch chose, not the parameters'."""
    model, inputs = two_layers(), torch.randn(BATCH, IN)

    with FlopCounter() as counter, torch.autocast("cpu", dtype=torch.bfloat16):
        model(inputs).float().sum().backward()

    assert (counter.dtype, counter.flops) == (torch.bfloat16, FLOPS)


def test_an_error_leaves_no_count_under_way(timed: Make) -> None:
    """A forward pass that fails in the counted iteration ends the count with the run."""

    def step(trainer: Trainer, batch: Any) -> torch.Tensor:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        counting(timed, train_step=step).train()


def test_a_loop_that_is_left_leaves_no_count_under_way(timed: Make) -> None:
    """Nor does a hand-written loop that breaks off in the body of the counted iteration."""
    trainer = counting(timed)

    for _ in trainer.epochs():
        for _ in trainer.batches(trainer.train_loader or []):
            break
        break

    assert trainer.iter == 0


def test_a_skipped_batch_is_not_the_counted_one(timed: Make) -> None:
    """The FLOPs are those of the first batch that is trained on."""

    def skip_first(event: Any) -> None:
        if event.batch_idx == 0:
            raise SkipIteration

    trainer = counting(timed, interval=3, sizes=(2 * BATCH, BATCH, BATCH, BATCH))
    trainer.bus.subscribe(skip_first, "before_train_iter", priority="LOWEST")

    trainer.train()

    assert put(trainer, "flops_per_sec") == {3: FLOPS / SECONDS}


def test_a_device_of_unknown_peak_has_no_mfu(timed: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The FLOP/s are there; a warning says once how to get the rest."""
    trainer = counting(timed)

    trainer.train()

    assert put(trainer, "flops_per_sec") == {4: FLOPS / SECONDS}
    assert "throughput/mfu" not in trainer.metrics.histories()
    assert "knows no peak of cpu for products in torch.float32; pass peak_flops=" in caplog.text


def test_a_step_without_counted_operations_is_said(timed: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Neither rate is put, as nothing is known."""
    trainer = counting(
        timed, train_step=lambda trainer, batch: sum(p.sum() for p in trainer.model.parameters())
    )

    trainer.train()

    assert "counted no operation" in caplog.text
    assert "throughput/flops_per_sec" not in trainer.metrics.histories()


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        (
            {"count": len},
            TypeError,
            r"count must map names of units to functions, .*got <built-in function len>",
        ),
        ({"count": {3: len}}, TypeError, "count must have names of units as keys, got 3"),
        ({"count": {"tokens": 3}}, TypeError, r"count\['tokens'\] must be a function .*got 3"),
        (
            {"flops": True, "peak_flops": "1e12"},
            TypeError,
            "peak_flops must be a number of FLOP/s, got '1e12'",
        ),
        ({"flops": True, "peak_flops": 0}, ValueError, "peak_flops must be above 0 FLOP/s, got 0"),
        ({"peak_flops": 1e12}, ValueError, "peak_flops=1000000000000.0 needs flops=True"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The option, what was expected and what came."""
    with pytest.raises(error, match=message):
        ThroughputHook(**options)


@pytest.mark.parametrize(
    ("result", "got"), [(torch.ones(3), r"a tensor of shape \(3,\)"), (None, "None"), ("7", "'7'")]
)
def test_a_count_that_is_no_number(timed: Make, result: Any, got: str) -> None:
    """The unit, what was expected and what came."""
    trainer = timed(ThroughputHook(count={"tokens": lambda batch: result}))

    with pytest.raises(
        TypeError, match=rf"count\['tokens'\] must return a number or a tensor of one element, got {got}"
    ):
        trainer.train()
