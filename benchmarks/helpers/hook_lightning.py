"""Lightning's callbacks for `hook_cost`, and its plugin for 16 bits: called as its loop calls them, with its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as torch_lr
from torch.optim import swa_utils

from benchmarks.helpers.hook_bench import FOREVER, INTERVAL, Bench, Layers, Peer, quiet
from benchmarks.helpers.hook_steps import steps_in
from benchmarks.helpers.timing import Case

LIGHTNING = "lightning"


def lightning_trainer(bench: Bench, **options: Any) -> tuple[Any, Any]:
    """Return a Trainer in the state of fitting, and a module for it."""
    lightning = import_module("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    with quiet():
        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(bench.own_directory()),
            **options,
        )
    trainer.state.fn = import_module("lightning.pytorch.trainer.states").TrainerFn.FITTING
    trainer.training = True
    return trainer, Module(Layers())


LIGHTNING_ITER = "callback.on_train_batch_end(trainer, module, None, None, 7)"


def lightning_ema(bench: Bench, label: str, callback: str, **arguments: Any) -> Case:
    """One of its averaging callbacks; the count of steps, which its loop advances, is advanced here."""
    trainer, module = lightning_trainer(bench)
    own = getattr(import_module("lightning.pytorch.callbacks"), callback)(**arguments)
    own.setup(trainer, module, "fit")
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    steps = loop.optim_progress.optimizer.step.total
    names = {"callback": own, "trainer": trainer, "module": module, "steps": steps}
    return bench.iterations(label, f"steps.completed += 1; {LIGHTNING_ITER}", names, part=100)


def lightning_early_stopping(bench: Bench, label: str) -> Case:
    """EarlyStopping with the same score, as the tensor that it is there."""
    trainer, module = lightning_trainer(bench)
    callback = import_module("lightning.pytorch.callbacks").EarlyStopping(
        "loss", patience=FOREVER, check_on_train_epoch_end=False
    )
    trainer._logger_connector._callback_metrics["loss"] = torch.tensor(0.5)
    names = {"callback": callback, "trainer": trainer, "module": module}
    return bench.iterations(label, "callback.on_validation_end(trainer, module)", names, part=5)


def lightning_checkpoint(bench: Bench, label: str) -> Case:
    """ModelCheckpoint by steps."""
    trainer, module = lightning_trainer(bench)
    callback = import_module("lightning.pytorch.callbacks").ModelCheckpoint(every_n_train_steps=1000)
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 7
    names = {"callback": callback, "trainer": trainer, "module": module}
    return bench.iterations(label, LIGHTNING_ITER, names)


def lightning_memory(bench: Bench, label: str) -> Case:
    """DeviceStatsMonitor, which says the machine's memory and load (of psutil) every 10 steps, into a logger that
    does nothing."""
    trainer, module = lightning_trainer(bench, log_every_n_steps=INTERVAL)
    trainer.loggers = [import_module("lightning.pytorch.loggers.logger").DummyLogger()]
    callback = import_module("lightning.pytorch.callbacks").DeviceStatsMonitor()
    callback.setup(trainer, module, "fit")
    names = {"callback": callback, "trainer": trainer, "module": module, "loop": trainer.fit_loop.epoch_loop}
    body = f"loop._batches_that_stepped += 1; callback.on_train_batch_start(trainer, module, None, 7); {LIGHTNING_ITER}"
    return bench.iterations(label, body, names, part=2)


def lightning_precision(bench: Bench, label: str, precision: str) -> Case:
    """What its strategy does with a loss: MixedPrecision's autocast, backward and step. float16 is its plugin's own,
    which its Trainer would not choose on a CPU; its scale is always dynamic, and is not logged."""
    plugin = import_module("lightning.pytorch.plugins").MixedPrecision(precision, "cpu")
    trainer, module = lightning_trainer(bench, plugins=[plugin])
    count = steps_in(bench)
    job, strategy = bench.losses(count), trainer.strategy
    strategy.connect(module)
    module.trainer, trainer.accumulate_grad_batches = trainer, 1

    def step(loss: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            with plugin.train_step_context():
                pass
            job.optimizer.zero_grad()
            result: torch.Tensor = strategy.backward(loss, job.optimizer)
            return result

        strategy.optimizer_step(job.optimizer, closure)

    names = {"step": step, "losses": job.losses}
    return bench.over(label, "for loss in losses", "step(loss)", count, names, lambda: job.make(count))


def lightning_rate(bench: Bench, label: str) -> Case:
    """LearningRateMonitor in each step, with a logger that does nothing, and its loop's step of the scheduler."""
    trainer, module = lightning_trainer(bench, log_every_n_steps=1)
    trainer.loggers = [import_module("lightning.pytorch.loggers.logger").DummyLogger()]
    job, loop = bench.losses(1), trainer.fit_loop.epoch_loop
    job.optimizer.step()
    job.optimizer._opt_called = True  # type: ignore[attr-defined]
    scheduler = torch_lr.LinearLR(job.optimizer, 0.1, total_iters=FOREVER)
    scheduler.state_dict()  # as every run that saves has asked it; its attributes are slower from then on
    config = import_module("lightning.pytorch.utilities.types").LRSchedulerConfig
    trainer.strategy.connect(module)
    trainer.strategy.optimizers = [job.optimizer]
    trainer.strategy.lr_scheduler_configs = [config(scheduler, interval="step")]
    callback = import_module("lightning.pytorch.callbacks").LearningRateMonitor()
    callback.on_train_start(trainer)
    loop.batch_progress.current.ready = 1
    names = {"callback": callback, "trainer": trainer, "module": module, "loop": loop}
    body = (
        "callback.on_train_batch_start(trainer, module, None, 7); "
        "loop.update_lr_schedulers('step', update_plateau_schedulers=False)"
    )
    return bench.iterations(label, body, names, part=10)


def lightning_function(bench: Bench, label: str) -> Case:
    """LambdaCallback."""
    trainer, module = lightning_trainer(bench)

    def function(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    callback = import_module("lightning.pytorch.callbacks").LambdaCallback(on_train_batch_end=function)
    return bench.iterations(
        label, LIGHTNING_ITER, {"callback": callback, "trainer": trainer, "module": module}
    )


def lightning_signals(bench: Bench, label: str) -> Case:
    """Its connector, which takes SIGTERM."""
    trainer, _ = lightning_trainer(bench)
    connector = trainer._signal_connector
    names = {"begin": connector.register_signal_handlers, "end": connector.teardown}
    return bench.iterations(label, "begin(); end()", names, part=10)


def peers() -> list[Peer]:
    """Row, label, and what makes the case."""
    foreach = swa_utils.get_ema_multi_avg_fn(0.9998)
    equal = swa_utils.get_swa_multi_avg_fn()
    decayed, weights = "EMAWeightAveraging", "WeightAveraging"
    made: list[tuple[str, str, Callable[[Bench, str], Case]]] = [
        ("EMAHook", decayed, partial(lightning_ema, callback=decayed, decay=0.9998)),
        (
            "EMAHook",
            f"{weights}, multi_avg_fn",
            partial(lightning_ema, callback=weights, multi_avg_fn=foreach),
        ),
        (
            "EMAHook, StochasticWeightAverage",
            f"{weights}, multi_avg_fn",
            partial(lightning_ema, callback=weights, multi_avg_fn=equal),
        ),
        ("EarlyStoppingHook, a validation", "EarlyStopping", lightning_early_stopping),
        ("CheckpointHook, not due", "ModelCheckpoint", lightning_checkpoint),
        ("MemoryHook", "DeviceStatsMonitor", lightning_memory),
        (
            "AmpOptimizerHook, bfloat16",
            "MixedPrecision",
            partial(lightning_precision, precision="bf16-mixed"),
        ),
        ("AmpOptimizerHook, float16", "MixedPrecision", partial(lightning_precision, precision="16-mixed")),
        ("LRScheduler, PyTorch's LinearLR", "LearningRateMonitor and its step", lightning_rate),
        ("CallbackHook, a function of both", "LambdaCallback", lightning_function),
        ("PreemptionHook, a run", "its signal connector", lightning_signals),
    ]
    return [Peer(row, f"Lightning {what}", LIGHTNING, make) for row, what, make in made]


PEERS = peers()
