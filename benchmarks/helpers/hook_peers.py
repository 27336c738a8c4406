"""The peers' hooks for `hook_cost`, in files of their own those of MMEngine, Lightning and torchtnt: their own classes, called as their own loops call them, with their
own engine or trainer. Nothing is emulated, but a storage: fvcore has the buffer only.

A peer is here where it does the work of the row: keeps the same numbers, or moves the same tensors. Peers are imported
by name at run time, so that one which is not installed can be reported as such.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from importlib import import_module
from typing import Any

from torch.optim import lr_scheduler as torch_lr
from torch.optim import swa_utils

from benchmarks.helpers import hook_lightning, hook_mmengine, hook_torchtnt
from benchmarks.helpers.hook_bench import FOREVER, Bench, Layers, Peer, quiet
from benchmarks.helpers.hook_norms import PASS, Normed, batches
from benchmarks.helpers.hook_numbers import FOUR, ITERATIONS, LENGTHS, PUT, PUT_AND_LOG
from benchmarks.helpers.hook_steps import steps_in
from benchmarks.helpers.timing import Case

TORCH, IGNITE, FVCORE, TRANSFORMERS, ACCELERATE = (
    "torch",
    "pytorch-ignite",
    "fvcore",
    "transformers",
    "accelerate",
)


# --- PyTorch -----------------------------------------------------------------------------------------------


def averaged_model(bench: Bench, label: str, *, equal: bool = False) -> Case:
    """AveragedModel with its foreach function, for an exponential average or an equal one."""
    model = Layers()
    update = swa_utils.get_swa_multi_avg_fn() if equal else swa_utils.get_ema_multi_avg_fn(0.9998)
    average = swa_utils.AveragedModel(model, multi_avg_fn=update)
    names = {"update": average.update_parameters, "model": model}
    return bench.iterations(label, "update(model)", names, part=100)


# --- ignite ------------------------------------------------------------------------------------------------


def engine_with(output: object) -> Any:
    """An engine whose process function has returned `output`."""
    engine = import_module("ignite.engine").Engine(lambda engine, batch: None)
    engine.state.output, engine.state.metrics = output, {"loss": 0.5}
    return engine


def ignite_ema(bench: Bench, label: str) -> Case:
    """EMAHandler, the function it attaches."""
    handler = import_module("ignite.handlers").EMAHandler(Layers(), momentum=0.0002)
    engine = engine_with(None)
    handler.attach(engine)
    names = {"update": handler._update_ema_model, "engine": engine}
    return bench.iterations(label, "update(engine, 'ema_momentum')", names, part=100)


def ignite_nan(bench: Bench, label: str) -> Case:
    """TerminateOnNan, which reads each loss."""
    with quiet():
        handler = import_module("ignite.handlers").TerminateOnNan()
    names = {"handler": handler, "engine": engine_with(bench.losses(1).losses[0].detach())}
    return bench.iterations(label, "handler(engine)", names)


def ignite_early_stopping(bench: Bench, label: str) -> Case:
    """EarlyStopping with the same score."""
    engine = engine_with(None)
    with quiet():
        handler = import_module("ignite.handlers").EarlyStopping(
            FOREVER, lambda engine: engine.state.metrics["loss"], engine, mode="min"
        )
    return bench.iterations(label, "handler(engine)", {"handler": handler, "engine": engine})


def ignite_scheduler(bench: Bench, label: str, *, save_history: bool = False) -> Case:
    """Its wrapper of one of PyTorch's schedulers, which takes `get_lr()` and leaves `step()` out: PyTorch's checks are
    not made, and `get_last_lr()` stays behind. `save_history` keeps the rate of each iteration."""
    job = bench.losses(1)
    job.optimizer.step()
    job.optimizer._opt_called = True  # type: ignore[attr-defined]
    scheduler = torch_lr.LinearLR(job.optimizer, 0.1, total_iters=FOREVER)
    handler = import_module("ignite.handlers").LRScheduler(scheduler, save_history)
    handler.state_dict()  # as every run that saves has asked it; its attributes are slower from then on
    scheduler.state_dict()
    names = {"handler": handler, "engine": engine_with(None)}
    return bench.iterations(label, "handler(engine)", names, part=5)


def ignite_cosine(bench: Bench, label: str) -> Case:
    """Its own cosine."""
    handler = import_module("ignite.handlers").CosineAnnealingScheduler(
        bench.losses(1).optimizer, "lr", 0.01, 1e-4, FOREVER
    )
    names = {"handler": handler, "engine": engine_with(None)}
    return bench.iterations(label, "handler(engine)", names)


def ignite_cosine_momentum(bench: Bench, label: str) -> Case:
    """The same of the momentum."""
    handler = import_module("ignite.handlers").CosineAnnealingScheduler(
        bench.losses(1).optimizer, "momentum", 0.9, 0.5, FOREVER
    )
    return bench.iterations(label, "handler(engine)", {"handler": handler, "engine": engine_with(None)})


def ignite_linear_momentum(bench: Bench, label: str) -> Case:
    """Its line, of the momentum."""
    handler = import_module("ignite.handlers").LinearCyclicalScheduler(
        bench.losses(1).optimizer, "momentum", 0.9, 0.5, FOREVER
    )
    return bench.iterations(label, "handler(engine)", {"handler": handler, "engine": engine_with(None)})


def ignite_times(bench: Bench, label: str) -> Case:
    """BasicTimeProfiler: what it puts around the four events of an iteration, for the times of the loader, of the step
    and of the handlers."""
    profiler, engine = import_module("ignite.handlers").BasicTimeProfiler(), engine_with(None)
    profiler._reset(1, ITERATIONS)
    engine.state.iteration = 8
    events = ("get_batch_started", "get_batch_completed", "iter_started", "iter_completed")
    points = [getattr(profiler, f"_as_{at}_{event}") for event in events for at in ("first", "last")]
    names = {f"point_{index}": point for index, point in enumerate(points)}
    body = "; ".join(f"{name}(engine)" for name in names)
    return bench.iterations(label, body, {**names, "engine": engine}, part=10)


# --- transformers ------------------------------------------------------------------------------------------


def transformers_early_stopping(bench: Bench, label: str) -> Case:
    """EarlyStoppingCallback with the same score."""
    transformers = import_module("transformers")
    with quiet():
        args = transformers.TrainingArguments(
            str(bench.own_directory()),
            metric_for_best_model="loss",
            greater_is_better=False,
            use_cpu=True,
            report_to="none",
        )
    state, control = transformers.TrainerState(best_metric=0.5), transformers.TrainerControl()
    callback = transformers.EarlyStoppingCallback(FOREVER)
    names = {
        "callback": callback,
        "args": args,
        "state": state,
        "control": control,
        "scores": {"eval_loss": 0.5},
    }
    return bench.iterations(label, "callback.on_evaluate(args, state, control, metrics=scores)", names)


# --- accelerate --------------------------------------------------------------------------------------------


def accelerate_bfloat16(bench: Bench, label: str) -> Case:
    """What its loops call: autocast, backward and its optimizer's step. It scales float16 on accelerators only."""
    count, accelerate = steps_in(bench), import_module("accelerate")
    job = bench.losses(count)
    reset = import_module("accelerate.state").AcceleratorState._reset_state
    reset(reset_partial_state=True)
    bench.stack.callback(reset, reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    names = {
        "accelerator": accelerator,
        "optimizer": accelerator.prepare(job.optimizer),
        "losses": job.losses,
    }
    body = (
        "with accelerator.autocast(): pass"
        "\noptimizer.zero_grad(); accelerator.backward(loss); optimizer.step()"
    )
    return bench.over(label, "for loss in losses", body, count, names, lambda: job.make(count))


# --- fvcore ------------------------------------------------------------------------------------------------


class FvcoreStorage:
    """The least a storage over fvcore's buffers does, which are detectron2's: names with a prefix, one hint each,
    the latest values. It reads tensors at once."""

    def __init__(self, length: int) -> None:
        self._histories: dict[str, Any] = defaultdict(
            import_module("fvcore.common.history_buffer").HistoryBuffer
        )
        self._hints: dict[str, bool] = {}
        self._latest: dict[str, tuple[float, int]] = {}
        self._prefix, self._iter, self._length = "", 7, length

    def put_scalar(self, name: str, value: Any, smoothing_hint: bool = True) -> None:
        """Put one."""
        name = self._prefix + name
        if self._hints.setdefault(name, smoothing_hint) is not smoothing_hint:
            raise ValueError(name)
        number = float(value)
        self._histories[name].update(number, self._iter)
        self._latest[name] = (number, self._iter)

    def put_scalars(self, **values: Any) -> None:
        """Put several."""
        for name, value in values.items():
            self.put_scalar(name, value)

    def latest_with_smoothing_hint(self, window: int = 20) -> dict[str, tuple[float, int]]:
        """What detectron2's writers ask for at their period: medians of the smoothed, the last of the others."""
        return {
            name: (self._histories[name].median(window) if self._hints[name] else number, iteration)
            for name, (number, iteration) in self._latest.items()
        }

    def put_back(self, *names: str) -> None:
        """Give the histories the length they are timed at."""
        for name in names:
            history = self._histories[name]
            del history.values()[self._length :]
            while len(history.values()) < self._length:
                history.update(0.5, 7)


def fv_storage(bench: Bench, label: str, length: int, tensor: bool = False, log: bool = False) -> Case:
    """One value; with `log` what a writer asks for every 10 iterations too. A loss is detached by whoever puts it, as
    detectron2's trainer does."""
    storage = FvcoreStorage(length)
    storage.put_back("loss")
    value = bench.losses(1).losses[0] if tensor else 0.5
    put = "put('loss', value.detach())" if tensor else "put('loss', value)"
    names = {"put": storage.put_scalar, "value": value, "latest": storage.latest_with_smoothing_hint}
    end = "latest()" if log else None
    return bench.iterations(label, put, names, part=2, end=end, after=lambda: storage.put_back("loss"))


def fv_storage_four(bench: Bench, label: str, length: int) -> Case:
    """Four values."""
    storage = FvcoreStorage(length)
    storage.put_back(*FOUR)
    names = {"put": storage.put_scalars, "values": dict.fromkeys(FOUR, 0.5)}
    return bench.iterations(label, "put(**values)", names, part=2, after=lambda: storage.put_back(*FOUR))


def fv_history(bench: Bench, label: str, length: int) -> Case:
    """HistoryBuffer.update."""
    history = import_module("fvcore.common.history_buffer").HistoryBuffer()
    for index in range(length):
        history.update(0.5, index)
    return bench.iterations(label, "update(0.5, 7)", {"update": history.update}, part=2)


def fv_schedule(bench: Bench, label: str, name: str, *arguments: Any) -> Case:
    """A schedule of fvcore's is a function of the part of the run that is done; LambdaLR makes a rate of it, as
    detectron2's LRMultiplier does."""
    schedule = getattr(import_module("fvcore.common.param_scheduler"), name)(*arguments)
    job = bench.losses(1)
    job.optimizer.step()
    scheduler = torch_lr.LambdaLR(job.optimizer, lambda step: schedule(min(step / FOREVER, 0.999)))
    job.optimizer._opt_called = True  # type: ignore[attr-defined]
    return bench.iterations(label, "scheduler.step()", {"scheduler": scheduler}, part=5)


def fv_precise_bn(bench: Bench, label: str) -> Case:
    """A pass; it leaves the loader's place, random states and other buffers to whoever calls it."""
    update = import_module("fvcore.nn.precise_bn").update_bn_stats
    names = {"update": update, "model": Normed().train(), "given": batches(), "once": range(1)}
    body = f"update(model, given, {PASS})"
    return bench.over(label, "for _ in once", body, PASS, names, lambda: None)


def fv_policies() -> list[Peer]:
    """fvcore's schedule for each policy that it has."""
    arguments: dict[str, tuple[Any, ...]] = {
        "Fixed": ("ConstantParamScheduler", 1.0),
        "Step": ("MultiStepParamScheduler", [1.0, 0.1, 0.01], None, [30_000, 60_000, 100_000]),
        "Exp": ("ExponentialParamScheduler", 1.0, 0.02),
        "Poly": ("PolynomialDecayParamScheduler", 1.0, 0.9),
        "CosineAnnealing": ("CosineParamScheduler", 1.0, 0.01),
        "LinearAnnealing": ("LinearParamScheduler", 1.0, 0.01),
    }

    def make(bench: Bench, label: str, given: tuple[Any, ...]) -> Case:
        return fv_schedule(bench, label, *given)

    return [
        Peer(f"{policy} policy", f"fvcore {given[0]} in LambdaLR", FVCORE, partial(make, given=given))
        for policy, given in arguments.items()
    ]


EARLY, TORCHS = "EarlyStoppingHook, a validation", "ParamSchedulerHook, PyTorch's LinearLR"
EQUAL, ITERATION_TIMER = "EMAHook, StochasticWeightAverage", "IterationTimer"
OTHERS: list[Peer] = [
    Peer("EMAHook", "torch AveragedModel, multi_avg_fn", TORCH, averaged_model),
    Peer(EQUAL, "torch AveragedModel, multi_avg_fn", TORCH, partial(averaged_model, equal=True)),
    Peer("EMAHook", "ignite EMAHandler", IGNITE, ignite_ema),
    Peer(TORCHS, "ignite LRScheduler", IGNITE, ignite_scheduler),
    Peer(
        "LRScheduler, PyTorch's LinearLR",
        "ignite LRScheduler, save_history",
        IGNITE,
        partial(ignite_scheduler, save_history=True),
    ),
    Peer("CosineAnnealing policy", "ignite CosineAnnealingScheduler", IGNITE, ignite_cosine),
    Peer(
        "CosineAnnealingMomentumUpdaterHook",
        "ignite CosineAnnealingScheduler",
        IGNITE,
        ignite_cosine_momentum,
    ),
    Peer(
        "LinearAnnealingMomentumUpdaterHook", "ignite LinearCyclicalScheduler", IGNITE, ignite_linear_momentum
    ),
    Peer(ITERATION_TIMER, "ignite BasicTimeProfiler", IGNITE, ignite_times),
    Peer("CheckInvalidLossHook", "ignite TerminateOnNan", IGNITE, ignite_nan),
    Peer(EARLY, "ignite EarlyStopping", IGNITE, ignite_early_stopping),
    Peer(EARLY, "transformers EarlyStoppingCallback", TRANSFORMERS, transformers_early_stopping),
    Peer("AmpOptimizerHook, bfloat16", "accelerate Accelerator.backward", ACCELERATE, accelerate_bfloat16),
    Peer(f"PreciseBN, each of a pass of {PASS}", "fvcore update_bn_stats", FVCORE, fv_precise_bn),
]


def fv_numbers() -> list[Peer]:
    """What is put into histories of each length."""
    storage, peers = "a storage over fvcore's HistoryBuffer", []
    for length in LENGTHS:
        rows = {
            f"{PUT}a float": (storage, partial(fv_storage, length=length)),
            f"{PUT}a tensor": (storage, partial(fv_storage, length=length, tensor=True)),
            f"{PUT_AND_LOG}a float": (storage, partial(fv_storage, length=length, log=True)),
            f"{PUT_AND_LOG}a tensor": (storage, partial(fv_storage, length=length, tensor=True, log=True)),
            "EventStorage.put_scalars, 4 floats": (storage, partial(fv_storage_four, length=length)),
            "HistoryBuffer.update": ("fvcore HistoryBuffer.update", partial(fv_history, length=length)),
        }
        peers += [
            Peer(f"{row}, history {length:,}", label, FVCORE, make) for row, (label, make) in rows.items()
        ]
    return peers


PEERS = [
    *hook_mmengine.PEERS,
    *OTHERS,
    *hook_lightning.PEERS,
    *hook_torchtnt.PEERS,
    *fv_policies(),
    *fv_numbers(),
]
"""All of them."""
