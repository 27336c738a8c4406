"""MMEngine's hooks for `hook_cost`: its own classes, with its own Runner, called as its loop calls them. Its
AmpOptimWrapper refuses a machine without an accelerator, and has no row."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.helpers.hook_bench import FOREVER, HISTORY, INTERVAL, Bench, Layers, Peer, loader, quiet
from benchmarks.helpers.hook_numbers import FOUR, ITERATIONS, LENGTHS, PUT
from benchmarks.helpers.hook_ranks import MMENGINE as SYNCED_BY_MMENGINE
from benchmarks.helpers.hook_rows import NUMBERS
from benchmarks.helpers.hook_steps import MAX_NORM, steps_in
from benchmarks.helpers.hook_timers import PROFILED, PROFILES
from benchmarks.helpers.timing import Case

MMENGINE = "mmengine"

MM_ITER = "hook.after_train_iter(runner, i, None, outputs)"


def runner(bench: Bench, model: torch.nn.Module | None = None, **options: Any) -> Any:
    """MMEngine's Runner with its console, its log file and its JSON lines, in iteration 7."""
    directory, job = bench.own_directory(), bench.losses(1)
    with quiet():
        made = import_module("mmengine.runner").Runner(
            job.model if model is None else model,
            str(directory),
            train_dataloader=loader(),
            optim_wrapper=import_module("mmengine.optim").OptimWrapper(job.optimizer),
            train_cfg={"by_epoch": True, "max_epochs": 100},
            visualizer={"type": "Visualizer", "vis_backends": [{"type": "LocalVisBackend"}]},
            default_scope="mmengine",
            experiment_name=directory.name,  # loggers, hubs and visualizers are shared under this name
            **options,
        )
        made.train_loop._iter = 7
    bench.stack.callback(made.visualizer.close)
    return made


def refill(hub: Any, names: Iterable[str], length: int) -> Callable[[], None]:
    """Set histories of MMEngine's MessageHub to `length` values; return the function that does it again."""
    buffer = import_module("mmengine.logging").HistoryBuffer
    values, kept = [0.5] * length, tuple(names)

    def put_back() -> None:
        for name in kept:
            if length:
                hub.log_scalars[name] = buffer(values, values)
            else:
                hub.log_scalars.pop(name, None)

    put_back()
    return put_back


def mm_hook(name: str, **arguments: Any) -> Any:
    """One of MMEngine's hooks."""
    return getattr(import_module("mmengine.hooks"), name)(**arguments)


def mm_runtime_info(bench: Bench, label: str) -> Case:
    """RuntimeInfoHook: its methods before and after an iteration; it also puts the rate each time."""
    own, hook = runner(bench), mm_hook("RuntimeInfoHook")
    names = {"hook": hook, "runner": own, "outputs": {"loss": bench.losses(1).losses[0]}}
    body = f"hook.before_train_iter(runner, i, None); {MM_ITER}"
    after = refill(own.message_hub, ["train/loss", "train/lr"], HISTORY)
    return bench.iterations(label, body, names, part=10, head="for i in ten", after=after)


def mm_iter_timer(bench: Bench, label: str) -> Case:
    """IterTimerHook: its methods before and after an iteration."""
    own, hook = runner(bench), mm_hook("IterTimerHook")
    hook.before_train(own)
    hook.before_train_epoch(own)
    body = f"hook.before_train_iter(runner, i, None); {MM_ITER}"
    after = refill(own.message_hub, ["train/time", "train/data_time"], HISTORY)
    names = {"hook": hook, "runner": own, "outputs": None}
    return bench.iterations(label, body, names, part=10, head="for i in ten", after=after)


def mm_pet_timer(bench: Bench, label: str) -> Case:
    """Its timer in a test, and its logger's line every 10 batches."""
    own = runner(bench, test_dataloader=loader(), test_cfg={}, test_evaluator=[])
    with quiet():
        own.build_test_loop(own._test_loop)
    timer, log = mm_hook("IterTimerHook"), mm_hook("LoggerHook", interval=INTERVAL)
    timer.before_test_epoch(own)
    log.before_run(own)
    after = refill(own.message_hub, ["test/time", "test/data_time"], HISTORY)
    body = (
        "timer.before_test_iter(runner, i, None); timer.after_test_iter(runner, i, None, None); "
        "log.after_test_iter(runner, i, None, None)"
    )
    names = {"timer": timer, "log": log, "runner": own}
    return bench.iterations(label, body, names, part=10, head="for i in ten", after=after)


def mm_profiler(bench: Bench, label: str) -> Case:
    """ProfilerHook: the start of the profile, its steps and its end."""
    own, hook = runner(bench), mm_hook("ProfilerHook", by_epoch=False, profile_times=PROFILED)

    names = {
        "hook": hook,
        "runner": own,
        "loop": own.train_loop,
        "steps": range(PROFILED),
        "profiles": range(PROFILES),
    }
    body = (
        "hook.before_run(runner)\nhook._closed = False"
        "\nfor loop._iter in steps: hook.after_train_iter(runner, loop._iter, None, None)"
    )
    return bench.over(label, "for _ in profiles", body, PROFILED * PROFILES, names, gc.collect)


def mm_profiler_over(bench: Bench, label: str) -> Case:
    """ProfilerHook in an iteration after the profile has ended."""
    own, hook = runner(bench), mm_hook("ProfilerHook", by_epoch=False)
    hook._closed = True
    return bench.iterations(
        label, MM_ITER, {"hook": hook, "runner": own, "outputs": None}, head="for i in ten"
    )


def mm_sync_buffers(bench: Bench, label: str) -> Case:
    """The end of an epoch. The counts of batches become their mean too."""
    own, hook = runner(bench, bench.partner.model()), mm_hook("SyncBuffersHook")
    hook.distributed = True  # which it would have found in the group, made when all is there
    case: Case = bench.partner.case(label, partial(hook.after_train_epoch, own), SYNCED_BY_MMENGINE)
    return case


def mm_update_params(bench: Bench, label: str, accumulative_counts: int = 1, **options: Any) -> Case:
    """What its training step calls with the loss; the norm of clipped gradients goes into its hub."""
    count = steps_in(bench)
    job = bench.losses(count)
    with quiet():
        wrapper = import_module("mmengine.optim").OptimWrapper(
            job.optimizer, accumulative_counts=accumulative_counts, **options
        )
        wrapper.initialize_count_status(job.model, 0, ITERATIONS * 1000)
    names = {"outputs": job.outputs, "update_params": wrapper.update_params}
    put_back = refill(wrapper.message_hub, ["train/grad_norm"], HISTORY)

    def again() -> None:
        put_back()
        job.make(count)

    return bench.over(label, "for output in outputs", "update_params(output['loss'])", count, names, again)


def mm_logger(bench: Bench, label: str) -> Case:
    """The same five numbers into its hub, and its LoggerHook, which writes console, log file and JSON lines."""
    own, hook = runner(bench), mm_hook("LoggerHook", interval=INTERVAL)
    hook.before_run(own)
    names = [f"train/{name}" for name in NUMBERS]
    numbers = dict.fromkeys(names, 0.01) | {"train/loss": bench.losses(1).losses[0]}
    after = refill(own.message_hub, [*names, "train/lr"], HISTORY)
    own.message_hub.update_info("eta", 100.0)
    bound = {
        "hook": hook,
        "runner": own,
        "outputs": None,
        "put": own.message_hub.update_scalars,
        "numbers": numbers,
    }
    return bench.iterations(
        label, f"put(numbers); {MM_ITER}", bound, part=10, head="for i in ten", after=after
    )


def mm_scheduler(bench: Bench, label: str, name: str = "LinearLR", **arguments: Any) -> Case:
    """Its ParamSchedulerHook with one scheduler by iteration."""
    own, hook, job = runner(bench), mm_hook("ParamSchedulerHook"), bench.losses(1)
    job.optimizer.step()
    arguments = arguments or {"start_factor": 0.1, "end": FOREVER}
    scheduler = getattr(import_module("mmengine.optim.scheduler"), name)(
        job.optimizer, by_epoch=False, **arguments
    )
    own.param_schedulers = [scheduler]
    scheduler._global_step = 1  # what it would warn of before its first step is not the question
    scheduler.state_dict()  # as every run that saves has asked it; its attributes are slower from then on
    names = {"hook": hook, "runner": own, "outputs": None}
    return bench.iterations(label, MM_ITER, names, part=5, head="for i in ten")


def mm_rate(bench: Bench, label: str) -> Case:
    """Its RuntimeInfoHook, which puts the rate before an iteration, and its ParamSchedulerHook."""
    own, info, hook, job = (
        runner(bench),
        mm_hook("RuntimeInfoHook"),
        mm_hook("ParamSchedulerHook"),
        bench.losses(1),
    )
    job.optimizer.step()
    scheduler = import_module("mmengine.optim.scheduler").LinearLR(
        job.optimizer, start_factor=0.1, end=FOREVER, by_epoch=False
    )
    own.param_schedulers = [scheduler]
    scheduler._global_step = 1  # what it would warn of before its first step is not the question
    scheduler.state_dict()  # as every run that saves has asked it; its attributes are slower from then on
    names = {"info": info, "hook": hook, "runner": own, "outputs": None}
    body = f"info.before_train_iter(runner, i, None); {MM_ITER}"
    after = refill(own.message_hub, ["train/lr"], HISTORY)
    return bench.iterations(label, body, names, part=10, head="for i in ten", after=after)


def mm_ema(bench: Bench, label: str, ema_type: str = "ExponentialMovingAverage") -> Case:
    """Its EMAHook with the same momentum."""
    own, hook = runner(bench, Layers()), mm_hook("EMAHook", ema_type=ema_type)
    hook.before_run(own)
    names = {"hook": hook, "runner": own, "outputs": None}
    return bench.iterations(label, MM_ITER, names, part=100, head="for i in ten")


def mm_plain(bench: Bench, label: str, hook_name: str, body: str = MM_ITER, **arguments: Any) -> Case:
    """A hook that keeps nothing."""
    own, hook = runner(bench), mm_hook(hook_name, **arguments)
    own.train_loop.stop_training = False
    names = {"hook": hook, "runner": own, "outputs": None, "metrics": {"loss": 0.5, "accuracy": 0.9}}
    return bench.iterations(label, body, names, head="for i in ten")


def mm_hub(bench: Bench, label: str, length: int, tensor: bool = False) -> Case:
    """MessageHub.update_scalar."""
    hub = import_module("mmengine.logging").MessageHub(bench.own_directory().name)
    value = bench.losses(1).losses[0] if tensor else 0.5
    names = {"put": hub.update_scalar, "value": value}
    after = refill(hub, ["train/loss"], length)
    return bench.iterations(label, "put('train/loss', value)", names, part=10, after=after)


def mm_hub_four(bench: Bench, label: str, length: int) -> Case:
    """MessageHub.update_scalars."""
    hub = import_module("mmengine.logging").MessageHub(bench.own_directory().name)
    names = {"put": hub.update_scalars, "values": dict.fromkeys(FOUR, 0.5)}
    return bench.iterations(label, "put(values)", names, part=10, after=refill(hub, FOUR, length))


def mm_history(bench: Bench, label: str, length: int) -> Case:
    """HistoryBuffer.update; the buffer is made anew for each block."""
    buffer = import_module("mmengine.logging").HistoryBuffer
    values = [0.5] * length
    holder = [buffer(values, values)]

    def anew() -> None:
        holder[0] = buffer(values, values)

    return bench.iterations(label, "holder[0].update(0.5)", {"holder": holder}, part=10, after=anew)


def hooks() -> Iterator[tuple[str, str, Callable[[Bench, str], Case]]]:
    """Row, label, and what makes the case."""
    update_params = "OptimWrapper.update_params"
    yield "RuntimeInfoHook", "RuntimeInfoHook", mm_runtime_info
    yield "IterTimerHook", "IterTimerHook", mm_iter_timer
    yield "IterationTimer", "IterTimerHook", mm_iter_timer
    yield "TestHook, a batch of a test", "IterTimerHook and LoggerHook", mm_pet_timer
    yield f"ProfilerHook, each of {PROFILED} profiled", "ProfilerHook", mm_profiler
    yield "ProfilerHook, after its profile", "ProfilerHook", mm_profiler_over
    yield "SyncBuffersHook, an epoch of two ranks", "SyncBuffersHook", mm_sync_buffers
    yield "OptimizerHook", update_params, mm_update_params
    yield (
        "OptimizerHook, grad_clip",
        update_params,
        partial(mm_update_params, clip_grad={"max_norm": MAX_NORM}),
    )
    yield "GradientCumulativeOptimizerHook", update_params, partial(mm_update_params, accumulative_counts=4)
    yield "LoggerHook and the puts", "LoggerHook, update_scalars", mm_logger
    yield "PeriodicWriter and the puts", "LoggerHook, update_scalars", mm_logger
    yield "LRScheduler, PyTorch's LinearLR", "RuntimeInfoHook and ParamSchedulerHook", mm_rate
    yield "ParamSchedulerHook, PyTorch's LinearLR", "ParamSchedulerHook, LinearLR", mm_scheduler
    yield "ParamSchedulerHook, LinearLR by name", "ParamSchedulerHook, LinearLR", mm_scheduler
    yield "EMAHook", "EMAHook", mm_ema
    for ema_type in ("StochasticWeightAverage", "MomentumAnnealingEMA"):
        yield f"EMAHook, {ema_type}", "EMAHook", partial(mm_ema, ema_type=ema_type)


def plain_hooks() -> Iterator[tuple[str, str, Callable[[Bench, str], Case]]]:
    """The same for hooks that keep nothing."""
    plain: dict[str, dict[str, Any]] = {
        "EmptyCacheHook": {"hook_name": "EmptyCacheHook", "after_iter": True},
        "EarlyStoppingHook, a validation": {
            "hook_name": "EarlyStoppingHook",
            "monitor": "loss",
            "rule": "less",
            "patience": FOREVER,
            "body": "hook.after_val_epoch(runner, metrics)",
        },
        "CheckpointHook, not due": {"hook_name": "CheckpointHook", "interval": 1000, "by_epoch": False},
        "DistSamplerSeedHook, an epoch": {
            "hook_name": "DistSamplerSeedHook",
            "body": "hook.before_train_epoch(runner)",
        },
    }
    for row, arguments in plain.items():
        yield row, arguments["hook_name"], partial(mm_plain, **arguments)


def policies() -> Iterator[tuple[str, str, Callable[[Bench, str], Case]]]:
    """The same for the policies: the scheduler of each that it has."""
    end = {"end": FOREVER}
    arguments: dict[str, tuple[str, dict[str, Any]]] = {
        "Step": ("MultiStepLR", {"milestones": [30_000, 60_000], **end}),
        "Exp": ("ExponentialLR", {"gamma": 0.999999, **end}),
        "Poly": ("PolyLR", {"power": 0.9, "eta_min": 1e-4, **end}),
        "CosineAnnealing": ("CosineAnnealingLR", {"T_max": FOREVER, "eta_min": 1e-4}),
        "LinearAnnealing": ("LinearLR", {"start_factor": 1.0, "end_factor": 0.01, **end}),
        "CosineRestart": (
            "CosineRestartLR",
            {"periods": [FOREVER, FOREVER], "restart_weights": [1.0, 1.0], "eta_min": 1e-4},
        ),
        "OneCycle": ("OneCycleLR", {"eta_max": 0.1, "total_steps": FOREVER}),
    }
    for policy, (name, given) in arguments.items():
        yield f"{policy} policy", name, partial(mm_scheduler, name=name, **given)
    momenta: dict[str, tuple[str, dict[str, Any]]] = {
        "Step": ("MultiStepMomentum", {"milestones": [30_000, 60_000], **end}),
        "CosineAnnealing": ("CosineAnnealingMomentum", {"T_max": FOREVER, "eta_min": 0.5}),
        "LinearAnnealing": ("LinearMomentum", {"start_factor": 1.0, "end_factor": 0.5, **end}),
    }
    for policy, (name, given) in momenta.items():
        yield f"{policy}MomentumUpdaterHook", name, partial(mm_scheduler, name=name, **given)


def numbers() -> Iterator[tuple[str, str, Callable[[Bench, str], Case]]]:
    """The same for what is put into histories."""
    for length in LENGTHS:
        hub, four = "MessageHub.update_scalar", f"EventStorage.put_scalars, 4 floats, history {length:,}"
        yield f"{PUT}a float, history {length:,}", hub, partial(mm_hub, length=length)
        yield f"{PUT}a tensor, history {length:,}", hub, partial(mm_hub, length=length, tensor=True)
        yield four, f"{hub}s", partial(mm_hub_four, length=length)
        yield (
            f"HistoryBuffer.update, history {length:,}",
            "HistoryBuffer.update",
            partial(mm_history, length=length),
        )


PEERS = [
    Peer(row, f"MMEngine {what}", MMENGINE, make)
    for row, what, make in (*hooks(), *plain_hooks(), *policies(), *numbers())
]
