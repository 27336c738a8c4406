"""Rows of `hook_cost`: each of the usual hooks alone, and the same work by hand."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_lr

from benchmarks.helpers.hook_bench import (
    AFTER_ITER,
    BY_HAND,
    EVENTS,
    FOREVER,
    HISTORY,
    INTERVAL,
    OURS,
    Bench,
    Collected,
    Layers,
    remember,
)
from benchmarks.helpers.timing import Case
from eventloop import Trainer
from eventloop.events import AfterTrainIter, AfterValEpoch, BeforeTrain, BeforeTrainEpoch
from eventloop.hooks.check_invalid_loss import CheckInvalidLossHook
from eventloop.hooks.checkpoint import CheckpointHook
from eventloop.hooks.early_stopping import EarlyStoppingHook
from eventloop.hooks.ema import EMAHook
from eventloop.hooks.empty_cache import EmptyCacheHook
from eventloop.hooks.logger import LoggerHook
from eventloop.hooks.lr_scheduler import LRScheduler
from eventloop.hooks.memory import MIB, STATM, MemoryHook
from eventloop.hooks.param_scheduler import ParamSchedulerHook
from eventloop.hooks.periodic_writer import PeriodicWriter
from eventloop.hooks.runtime_info import RuntimeInfoHook
from eventloop.hooks.sampler_seed import DistSamplerSeedHook
from eventloop.optim import schedulers as param_schedulers
from eventloop.writers import ConsoleWriter, JSONLWriter

NUMBERS = ("loss", "time", "data_time", "step_time", "hook_time")
"""What the default hooks put in each iteration."""


def runtime_info(bench: Bench) -> list[Case]:
    """The numbers of `trainer.outputs`, put: a loss."""
    trainer, hook = bench.trainer(), RuntimeInfoHook()
    loss = bench.losses(1).losses[0]
    trainer.outputs = {"loss": loss}
    remember(trainer.metrics, ["loss"], HISTORY)
    names = {"hook": hook, "trainer": trainer}
    kept: list[Any] = []
    return [
        bench.hook_and_collect(names, trainer.metrics),
        bench.iterations(
            BY_HAND,
            "keep((loss.detach(), 7))",
            {"loss": loss, "keep": kept.append},
            part=2,
            after=kept.clear,
        ),
        bench.background(lambda: hook.after_train_iter(trainer, EVENTS[7]), trainer.metrics),
    ]


def logger(bench: Bench) -> list[Case]:
    """Five numbers put in each iteration; every 10 the rate is put too and all is sent to a console and a JSONL
    writer. By hand: a line printed and one written, of one value each."""
    hook = LoggerHook(INTERVAL)
    return _logged(bench, hook, "for event in events", default_hooks={"logger": hook}, writers=_writers())


def periodic_writer(bench: Bench) -> list[Case]:
    """The same, where the hook has the writers."""
    hook = PeriodicWriter(_writers(), period=INTERVAL)
    return _logged(bench, hook, "for trainer.iter in ten", hooks=[hook])


def _writers() -> list[Any]:
    return [ConsoleWriter(stream=io.StringIO()), JSONLWriter()]


def _logged(bench: Bench, hook: LoggerHook, head: str, **options: Any) -> list[Case]:
    job = bench.losses(1)
    trainer = bench.trainer(job.model, optimizer=job.optimizer, **options)
    numbers = dict.fromkeys(NUMBERS, 0.01) | {"loss": job.losses[0]}
    remember(trainer.metrics, NUMBERS, HISTORY)
    put = trainer.metrics.put_scalars
    ours = {"hook": hook, "trainer": trainer, "put": put, "numbers": numbers, "event": EVENTS[7]}
    console, lines = io.StringIO(), open(bench.own_directory() / "lines.jsonl", "w")  # noqa: SIM115
    bench.stack.callback(lines.close)

    def log(loss: torch.Tensor) -> None:
        value = {"step": 8, "loss": loss.item(), "lr": 0.01, "time": 0.01}
        print(value, file=console)
        lines.write(json.dumps(value) + "\n")

    by_hand = {"log": log, "loss": job.losses[0]}
    return [
        bench.iterations(
            OURS, f"put(numbers); {AFTER_ITER}", ours, part=2, head=head, after=trainer.bus.flush
        ),
        bench.iterations(BY_HAND, "pass", by_hand, part=2, end="log(loss)"),
        bench.background(lambda: put(numbers), trainer.metrics),
    ]


def scheduler_of_torch(bench: Bench) -> list[Case]:
    """One of PyTorch's schedulers, LinearLR, stepped each iteration."""
    return _schedulers(bench, lambda optimizer: torch_lr.LinearLR(optimizer, 0.1, total_iters=FOREVER))


def scheduler_by_name(bench: Bench) -> list[Case]:
    """MMEngine's LinearLR by its name, a window of PyTorch's; by hand PyTorch's alone."""

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return param_schedulers.LinearLR(optimizer, 0.1, end=FOREVER, by_epoch=False)

    return _schedulers(bench, make)


def _schedulers(bench: Bench, make: Callable[[torch.optim.Optimizer], Any]) -> list[Case]:
    hook = ParamSchedulerHook()
    trainer, alone = _scheduled(bench, hook, make)
    return [
        bench.iterations(
            OURS, AFTER_ITER, {"hook": hook, "trainer": trainer}, part=5, head="for event in events"
        ),
        bench.iterations(BY_HAND, "scheduler.step()", {"scheduler": alone}, part=5),
    ]


def lr_scheduler(bench: Bench) -> list[Case]:
    """The rate put in each iteration, and the same scheduler stepped."""
    hook = LRScheduler()
    trainer, alone = _scheduled(
        bench, hook, lambda optimizer: torch_lr.LinearLR(optimizer, 0.1, total_iters=FOREVER)
    )
    remember(trainer.metrics, ["lr"], HISTORY, smoothing_hint=False)
    own, kept = Collected(trainer.metrics), list[Any]()
    by_hand = {"scheduler": alone, "groups": alone.optimizer.param_groups, "keep": kept.append}
    return [
        bench.iterations(
            OURS,
            f"put_lr(trainer, event); {AFTER_ITER}",
            {"hook": hook, "trainer": trainer, "put_lr": hook._put_lr, **own.names},
            part=5,
            head="for event in events",
            end=Collected.SOURCE,
            after=own.settle,
        ),
        bench.iterations(
            BY_HAND, "keep((groups[0]['lr'], 7)); scheduler.step()", by_hand, part=5, after=kept.clear
        ),
        bench.background(lambda: hook._put_lr(trainer, EVENTS[7]), trainer.metrics),
    ]


def _scheduled(
    bench: Bench, hook: ParamSchedulerHook, make: Callable[[torch.optim.Optimizer], Any]
) -> tuple[Trainer, torch_lr.LinearLR]:
    """A trainer whose hook steps the scheduler that `make` makes, and a scheduler that nobody steps."""
    jobs = [bench.losses(1), bench.losses(1)]
    for job in jobs:
        job.optimizer.step()
    scheduler = make(jobs[0].optimizer)
    trainer = bench.trainer(
        jobs[0].model,
        max_epochs=FOREVER // 1000,
        optimizer=jobs[0].optimizer,
        schedulers=[scheduler],
        default_hooks={"param_scheduler": hook},
    )
    hook.before_train(trainer, BeforeTrain())
    alone = torch_lr.LinearLR(jobs[1].optimizer, 0.1, total_iters=FOREVER)
    for job in jobs:
        job.optimizer._opt_called = True  # type: ignore[attr-defined]
    for own in (scheduler, alone):
        own.state_dict()  # as every run that saves has asked it; its attributes are slower from then on
    return trainer, alone


def ema(bench: Bench, ema_type: str = "ExponentialMovingAverage", weight: str = "0.0002") -> list[Case]:
    """An average of 100 tensors, 1,044,000 parameters, after a step of the optimizer. By hand:
    `torch._foreach_lerp_` of lists made before."""
    hook, model = EMAHook(ema_type), Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = bench.trainer(model, optimizer=optimizer, hooks=[hook])
    hook.before_train(trainer, BeforeTrain())
    hand = Layers()
    sources = [parameter.data for parameter in hand.parameters()]
    averages = [source.clone() for source in sources]
    names = {"hook": hook, "trainer": trainer, "optimizer": optimizer}
    by_hand = {"lerp": torch._foreach_lerp_, "averages": averages, "sources": sources, "steps": 1}
    body = f"hook._optimizer_stepped(optimizer, (), {{}}); {AFTER_ITER}"  # as the optimizer calls it
    return [
        bench.iterations(OURS, body, names, part=100, head="for event in events"),
        bench.iterations(BY_HAND, f"lerp(averages, sources, {weight}); steps += 1", by_hand, part=100),
    ]


def check_invalid_loss(bench: Bench) -> list[Case]:
    """Every loss looked at, 50 together."""
    trainer, hook = bench.trainer(), CheckInvalidLossHook(interval=50)
    loss = bench.losses(1).losses[0]
    trainer.outputs = {"loss": loss}
    body = "if not isfinite(loss.item()): raise FloatingPointError"
    return [
        bench.iterations(OURS, AFTER_ITER, {"hook": hook, "trainer": trainer}, head="for event in events"),
        bench.iterations(BY_HAND, body, {"isfinite": math.isfinite, "loss": loss}),
    ]


def empty_cache(bench: Bench) -> list[Case]:
    """`after_iter=True`, on a machine whose device was not used."""
    trainer, hook = bench.trainer(), EmptyCacheHook(after_iter=True)
    names = {"hook": hook, "trainer": trainer}
    return [
        bench.iterations(OURS, "hook.after_iter(trainer, event)", names, head="for event in events"),
        bench.iterations(BY_HAND, "empty()", {"empty": torch.cuda.empty_cache}),
    ]


def early_stopping(bench: Bench) -> list[Case]:
    """A validation whose score is no better than the best."""
    hook = EarlyStoppingHook("loss", patience=FOREVER)
    trainer = bench.trainer(hooks=[hook], val_loader=[0], val_step=lambda trainer, batch: {"loss": 0.5})
    hook.before_train(trainer, BeforeTrain())
    event = AfterValEpoch(metrics={"loss": 0.5, "accuracy": 0.9})
    names = {"hook": hook, "trainer": trainer, "event": event}
    body = (
        "best, wait = (score['loss'], 0) if score['loss'] < best else (best, wait + 1)"
        "\nif wait >= patience: raise StopIteration"
    )
    by_hand = {"score": event.metrics, "best": 0.5, "wait": 0, "patience": FOREVER}
    return [
        bench.iterations(OURS, "hook.after_val_epoch(trainer, event)", names),
        bench.iterations(BY_HAND, body, by_hand),
    ]


def memory(bench: Bench) -> list[Case]:
    """The resident memory, put every 10 iterations."""
    trainer, hook = bench.trainer(), MemoryHook(INTERVAL)
    hook.before_train(trainer, BeforeTrain())
    own = Collected(trainer.metrics)
    names = {"hook": hook, "trainer": trainer, "event": AfterTrainIter(), **own.names}
    kept: list[float] = []
    by_hand = {"keep": kept.append, "read": Path(STATM).read_bytes, "mib": MIB}
    return [
        bench.iterations(
            OURS,
            AFTER_ITER,
            names,
            head="for trainer.iter in ten",
            end=Collected.SOURCE,
            part=2,
            after=own.settle,
        ),
        bench.iterations(
            BY_HAND,
            "pass",
            by_hand,
            part=2,
            end="keep(int(read().split()[1]) * 4096 / mib)",
            after=kept.clear,
        ),
    ]


def checkpoint(bench: Bench) -> list[Case]:
    """An iteration in which none is due."""
    hook = CheckpointHook(interval=1000, by_epoch=False)
    trainer = bench.trainer(default_hooks={"checkpoint": hook})
    body = "if (trainer.iter + 1) % 1000 == 0: raise RuntimeError"
    return [
        bench.iterations(OURS, AFTER_ITER, {"hook": hook, "trainer": trainer}, head="for event in events"),
        bench.iterations(BY_HAND, body, {"trainer": trainer}),
    ]


def sampler_seed(bench: Bench) -> list[Case]:
    """The beginning of an epoch."""
    trainer, hook = bench.trainer(), DistSamplerSeedHook()
    names = {"hook": hook, "trainer": trainer, "event": BeforeTrainEpoch()}
    by_hand = {"sampler": trainer.train_loader.sampler, "trainer": trainer}  # type: ignore[union-attr]
    return [
        bench.iterations(OURS, "hook.before_train_epoch(trainer, event)", names),
        bench.iterations(BY_HAND, "sampler.set_epoch(trainer.epoch)", by_hand),
    ]


ROWS: dict[str, Callable[[Bench], list[Case]]] = {
    "RuntimeInfoHook": runtime_info,
    "LoggerHook and the puts": logger,
    "PeriodicWriter and the puts": periodic_writer,
    "ParamSchedulerHook, PyTorch's LinearLR": scheduler_of_torch,
    "ParamSchedulerHook, LinearLR by name": scheduler_by_name,
    "LRScheduler, PyTorch's LinearLR": lr_scheduler,
    "EMAHook": ema,
    "EMAHook, StochasticWeightAverage": partial(
        ema, ema_type="StochasticWeightAverage", weight="1 / (steps + 1)"
    ),
    "EMAHook, MomentumAnnealingEMA": partial(
        ema, ema_type="MomentumAnnealingEMA", weight="max(0.0002, 100 / (100 + steps))"
    ),
    "CheckInvalidLossHook": check_invalid_loss,
    "EmptyCacheHook": empty_cache,
    "EarlyStoppingHook, a validation": early_stopping,
    "MemoryHook": memory,
    "CheckpointHook, not due": checkpoint,
    "DistSamplerSeedHook, an epoch": sampler_seed,
}
"""Name, and the cases: ours, by hand where there is something to compare with, and the background's part."""
