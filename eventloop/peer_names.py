"""Names that users of other systems type, and what does that here: for the errors that say so."""

from __future__ import annotations

import re

_MMENGINE = {
    "train_dataloader": "train_loader=..., a loader",
    "val_dataloader": "val_loader=..., a loader",
    "test_dataloader": "test_loader=..., a loader",
    "train_cfg": "max_epochs or max_iters, val_interval, val_begin and dynamic_intervals, each an argument",
    "val_cfg": "val_loader=..., and val_interval",
    "test_cfg": "test_loader=...",
    "optim_wrapper": "optimizer=..., an object; clipping, accumulation and precision are a hook's, see OptimizerHook",
    "param_scheduler": "schedulers=..., with the same configs",
    "val_evaluator": "evaluator=..., a function or an object",
    "test_evaluator": "evaluator=..., a function or an object",
    "visualizer": "writers=[...]",
    "vis_backends": "writers=[...]",
    "resume": 'trainer.resume("auto")',
    "load_from": "trainer.load_checkpoint(path)",
    "launcher": "the script's: run it with torchrun, and call torch.distributed.init_process_group",
    "model_wrapper_cfg": "the script's: DistributedDataParallel(model) is given as the model",
    "randomness": "the script's: torch.manual_seed(seed) before the model is built",
    "log_processor": "default_hooks=dict(logger=dict(interval=..., custom_cfg=[...]))",
    "auto_scale_lr": "the script's, in the rate that the optimizer is built with",
    "experiment_name": "work_dir=..., the directory of the run",
}

_DATA = "the loader's: one of torch.utils.data.Subset(data, range(n))"
_TORCHRUN = "the script's: run it with torchrun, and give DistributedDataParallel(model) as the model"
_LIGHTNING = {
    "accumulate_grad_batches": "hooks=[GradientCumulativeOptimizerHook(cumulative_iters=...)]",
    "gradient_clip_val": "default_hooks=dict(optimizer=dict(grad_clip=dict(max_norm=...)))",
    "gradient_clip_algorithm": 'default_hooks=dict(optimizer=dict(grad_clip=dict(type="value", clip_value=...)))',
    "precision": 'hooks=[AmpOptimizerHook(dtype="bfloat16")]',
    "callbacks": "hooks=[...]",
    "logger": "writers=[...]",
    "enable_progress_bar": "writers=[ConsoleWriter()]",
    "enable_checkpointing": "hooks=[CheckpointHook(interval=...)]",
    "default_root_dir": "work_dir=...",
    "max_steps": "max_iters=...",
    "check_val_every_n_epoch": "val_interval=...",
    "val_check_interval": "val_interval=..., in epochs, or in iterations of a run of max_iters",
    "log_every_n_steps": "default_hooks=dict(logger=dict(interval=...))",
    "num_sanity_val_steps": "trainer.val() before trainer.train()",
    "limit_train_batches": _DATA,
    "limit_val_batches": _DATA,
    "limit_test_batches": _DATA,
    "overfit_batches": _DATA,
    "fast_dev_run": "max_iters=..., with a work_dir of its own",
    "accelerator": "device=...",
    "devices": _TORCHRUN,
    "num_nodes": _TORCHRUN,
    "strategy": _TORCHRUN,
    "deterministic": "the script's: torch.use_deterministic_algorithms(True)",
    "profiler": "hooks=[ProfilerHook(...)]; what a run cost is told by `eventloop report`",
    "ckpt_path": 'trainer.resume("auto"), or of a path, before trainer.train()',
}

ARGUMENTS = {"MMEngine": _MMENGINE, "Lightning": _LIGHTNING}
"""Arguments of MMEngine's Runner and of Lightning's Trainer."""

_VALIDATION = "the Trainer validates: val_loader=..., val_interval=..."
_CONSOLE = "ConsoleWriter, which LoggerHook's interval feeds"
_OWN = "a Writer of your own, of some twenty lines: see `eventloop.writers.Writer`"
_BEST = 'CheckpointHook(save_best="...")'

CLASSES = {
    "EvalHook": _VALIDATION,
    "DistEvalHook": _VALIDATION,
    "PeriodicCheckpointer": "CheckpointHook(interval=...)",
    "BestCheckpointer": _BEST,
    "ModelCheckpoint": "CheckpointHook(interval=..., save_best=...)",
    "TextLoggerHook": _CONSOLE,
    "CommonMetricPrinter": _CONSOLE,
    "TensorboardLoggerHook": "TensorBoardWriter",
    "TensorboardVisBackend": "TensorBoardWriter",
    "LocalVisBackend": "JSONLWriter for scalars, ImageFileWriter for images",
    "VisdomVisBackend": "VisdomWriter",
    "LearningRateMonitor": "done by default, with each log; LRScheduler puts the rates in every iteration",
    "AutogradProfiler": "ProfilerHook",
    "PyTorchProfiler": "ProfilerHook",
    "TorchMemoryStats": "MemoryHook",
    "DeviceStatsMonitor": "MemoryHook",
    "StochasticWeightAveraging": 'EMAHook(ema_type="StochasticWeightAverage", begin_epoch=...)',
    "Timer": "a handler that calls trainer.stop(reason)",
    "RichProgressBar": _CONSOLE,
    "TQDMProgressBar": _CONSOLE,
    "SummaryWriter": "TensorBoardWriter",
    "CSVLogger": "CSVWriter",
    "WandbLogger": _OWN,
    "WandbVisBackend": _OWN,
    "MLFlowLogger": _OWN,
    "MLflowVisBackend": _OWN,
}
"""Hooks and writers of mmcv, MMEngine, detectron2 and Lightning that are something else here, or have a name that is not
near."""

_POINTS = {"on_save_checkpoint": "before_save_checkpoint", "on_load_checkpoint": "after_load_checkpoint"}
_WHEN = {"start": "before", "begin": "before", "end": "after"}
_WHAT = {"batch": "iter", "step": "iter", "validation": "val", "fit": "run"}


def point_meant(method: str) -> str:
    """What a callback's method of Lightning, torchtnt, Keras or Transformers would be called here, whether or not there is
    such a point: `on_train_batch_end` -> `after_train_iter`; "" for any other name."""
    if method in _POINTS:
        return _POINTS[method]
    if found := re.fullmatch(r"on_((?:before|after)_\w+)", method):
        return found[1]
    if found := re.fullmatch(r"on_(\w+)_(start|begin|end)", method):
        return "_".join([_WHEN[found[2]], *(_WHAT.get(word, word) for word in found[1].split("_"))])
    return ""
