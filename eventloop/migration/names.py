"""List names of other systems with their replacements in eventloop, for error messages.

The registry, the trainer and hooks use these tables. Each replacement is a noun phrase that follows "use".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import NoReturn

_MMENGINE = {
    "train_dataloader": "train_loader=..., a loader",
    "val_dataloader": "val_loader=..., a loader",
    "test_dataloader": "test_loader=..., a loader",
    "train_cfg": "max_epochs or max_iters, val_interval, val_begin and dynamic_intervals, each an argument",
    "val_cfg": "val_loader=..., and val_interval",
    "test_cfg": "test_loader=...",
    "optim_wrapper": (
        "optimizer=..., an object, and OptimizerHook or its subclasses for clipping, accumulation and "
        "precision"
    ),
    "param_scheduler": "schedulers=..., with the same configs",
    "val_evaluator": "evaluator=..., a function or an object",
    "test_evaluator": "evaluator=..., a function or an object",
    "visualizer": "writers=[...]",
    "vis_backends": "writers=[...]",
    "resume": 'trainer.resume("auto")',
    "load_from": "trainer.load_checkpoint(path)",
    "launcher": "torchrun to run the script, and torch.distributed.init_process_group in it",
    "model_wrapper_cfg": "DistributedDataParallel(model) as the model",
    "randomness": "torch.manual_seed(seed) in the script, before the model is built",
    "log_processor": "default_hooks=dict(logger=dict(interval=..., custom_cfg=[...]))",
    "auto_scale_lr": "a scaled rate where the script builds the optimizer",
    "experiment_name": "work_dir=..., the directory of the run",
}

_DATA = "a loader of torch.utils.data.Subset(data, range(n))"
_TORCHRUN = "torchrun to run the script, and DistributedDataParallel(model) as the model"
_LIGHTNING = {
    "accumulate_grad_batches": "hooks=[GradientCumulativeOptimizerHook(cumulative_iters=...)]",
    "gradient_clip_val": "default_hooks=dict(optimizer=dict(grad_clip=dict(max_norm=...)))",
    "gradient_clip_algorithm": (
        'default_hooks=dict(optimizer=dict(grad_clip=dict(type="value", clip_value=...)))'
    ),
    "precision": 'hooks=[AmpOptimizerHook(dtype="bfloat16")]',
    "callbacks": "hooks=[...]",
    "logger": "writers=[...]",
    "enable_progress_bar": (
        "writers=[ConsoleWriter()], the default on a terminal, or writers=[] for no output"
    ),
    "enable_checkpointing": "hooks=[CheckpointHook(interval=...)]",
    "default_root_dir": "work_dir=...",
    "max_steps": "max_iters=...",
    "check_val_every_n_epoch": "val_interval=...",
    "val_check_interval": "val_interval=..., in epochs, or in iterations of a run of max_iters",
    "log_every_n_steps": "default_hooks=dict(logger=dict(interval=...))",
    "num_sanity_val_steps": "sanity_val=..., in batches",
    "limit_train_batches": _DATA,
    "limit_val_batches": _DATA,
    "limit_test_batches": _DATA,
    "overfit_batches": _DATA,
    "fast_dev_run": "max_iters=..., with a work_dir of its own",
    "accelerator": "device=...",
    "devices": _TORCHRUN,
    "num_nodes": _TORCHRUN,
    "strategy": _TORCHRUN,
    "deterministic": "torch.use_deterministic_algorithms(True) in the script",
    "profiler": "hooks=[ProfilerHook(...)], or `eventloop report` for the costs of a run",
    "ckpt_path": 'trainer.resume("auto") or trainer.resume(path), before trainer.train()',
}

_MMCV = {
    "optimizer_config": (
        "default_hooks=dict(optimizer=dict(grad_clip=dict(max_norm=...))), or with the type of another hook, "
        "such as GradientCumulativeOptimizerHook"
    ),
    "lr_config": (
        "hooks=[StepLrUpdaterHook(...)] or the hook of another policy, "
        'or schedulers=[dict(type="MultiStepLR", ...)]'
    ),
    "momentum_config": "hooks=[StepMomentumUpdaterHook(...)], or the hook of another policy",
    "checkpoint_config": "default_hooks=dict(checkpoint=dict(interval=...))",
    "log_config": "default_hooks=dict(logger=dict(interval=...)), and writers=[...]",
    "evaluation": "val_loader=..., val_interval=..., and CheckpointHook(save_best=...) to save the best",
    "workflow": 'trainer.run([("train", 2), ("val", 1)])',
    "batch_processor": "train_step=..., a function of the trainer and a batch",
}

ARGUMENTS = {"MMEngine": _MMENGINE, "mmcv": _MMCV, "Lightning": _LIGHTNING}
"""Arguments of MMEngine's and mmcv's Runners and of Lightning's Trainer."""

_RULE = 'rule="less" for "min", "greater" for "max"; the default depends on the metric\'s name'
_NAMES = 'filename_tmpl="step_{}", with only the number; `eventloop checkpoints` lists the scores'
_STORE = "no argument: out_dir is on a mounted file system, and a handler of checkpoint_saved may upload"
_DIRECTORY = "work_dir=... of the Trainer; or out_dir=..., which gets a folder with the name of work_dir"
_CHECKPOINTS = {
    "Lightning": {
        "monitor": 'save_best="...", the metric',
        "mode": _RULE,
        "save_top_k": "keep_best=... for the metric of save_best, or max_keep_ckpts=... for the newest",
        "every_n_epochs": "interval=...",
        "every_n_train_steps": "interval=..., by_epoch=False",
        "train_time_interval": "interval=..., in epochs or, with by_epoch=False, in iterations",
        "dirpath": _DIRECTORY,
        "filename": _NAMES,
        "auto_insert_metric_name": _NAMES,
        "save_weights_only": (
            'published_keys="state_dict" for the end, or save_optimizer=False for each checkpoint'
        ),
        "save_on_train_epoch_end": (
            "interval=..., which saves before the validation of the epoch; the best is saved after it"
        ),
        "save_on_exception": (
            "no argument: after an error nothing is saved, and the error names the newest checkpoint"
        ),
        "verbose": "writers=[ConsoleWriter()] of the Trainer, which prints each save",
    },
    "MMEngine": {"file_client_args": _STORE, "backend_args": _STORE},
    "mmcv": {
        "create_symlink": 'no argument: trainer.resume("auto") finds the newest checkpoint',
        "sync_buffer": "hooks=[SyncBuffersHook()] of the Trainer",
    },
    "ignite": {
        "n_saved": "keep_best=... for the metric of save_best; or max_keep_ckpts=... for the newest",
        "score_name": 'save_best="...", a metric of the validation',
        "score_function": 'save_best="...", a metric of the validation',
        "greater_or_equal": "no argument: an equal score is not better",
        "dirname": _DIRECTORY,
        "filename_prefix": _NAMES,
        "filename_pattern": _NAMES,
        "to_save": "no argument: the whole state is saved, with the state_dict of each hook",
    },
    "detectron2": {
        "period": "interval=...",
        "max_to_keep": "max_keep_ckpts=...",
        "file_prefix": _NAMES,
        "val_metric": 'save_best="..."',
        "eval_period": "val_interval=... of the Trainer",
    },
    "Keras": {
        "filepath": "work_dir=... of the Trainer, and filename_tmpl",
        "save_best_only": 'save_best="...", without an interval',
        "save_freq": "interval=...; by_epoch=False for iterations",
    },
}
_EARLY_STOPPING = {
    "Lightning": {
        "mode": _RULE,
        "verbose": "writers=[ConsoleWriter()] of the Trainer, which prints a stop and its reason",
        "divergence_threshold": (
            "check_finite=True, for NaN and infinity; or a handler that calls trainer.stop(reason)"
        ),
        "check_on_train_epoch_end": "no argument: the score is checked after each validation",
        "log_rank_zero_only": "no argument: rank 0 decides, and logs it",
    },
    "ignite": {
        "score_function": 'monitor="...", a metric of the validation',
        "trainer": "no argument: the hook goes to hooks=[EarlyStoppingHook(...)] of the Trainer",
        "cumulative_delta": (
            "no argument: min_delta is relative to the best score, as with cumulative_delta=True there"
        ),
        "min_delta_mode": "delta_mode=...",
    },
    "Keras": {
        "restore_best_weights": (
            'hooks=[CheckpointHook(save_best="...")] of the Trainer, then trainer.load_checkpoint(path)'
        ),
        "start_from_epoch": "val_begin=... of the Trainer, the first validated epoch",
    },
    "transformers": {
        "early_stopping_patience": "patience=...",
        "early_stopping_threshold": "min_delta=...",
    },
}
_ACCUMULATING = "another hook: hooks=[GradientCumulativeOptimizerHook(cumulative_iters=...)]"
_PRECISION = 'another hook: hooks=[AmpOptimizerHook(dtype="bfloat16")]'
_NORM = "grad_clip=dict(max_norm=..., norm_type=2)"
_VALUE = 'grad_clip=dict(type="value", clip_value=...)'
_OPTIMIZER = {
    "MMEngine": {
        "clip_grad": "grad_clip=..., the same dict",
        "accumulative_counts": _ACCUMULATING,
        "loss_scale": _PRECISION,
        "dtype": _PRECISION,
    },
    "mmcv": {"cumulative_iters": _ACCUMULATING},
    "Lightning": {
        "gradient_clip_val": _NORM,
        "gradient_clip_algorithm": _VALUE,
        "accumulate_grad_batches": _ACCUMULATING,
        "precision": _PRECISION,
    },
    "PyTorch": {"max_norm": _NORM, "norm_type": _NORM, "clip_value": _VALUE},
}
_LOGGER = {
    "MMEngine": {
        "window_size": (
            'custom_cfg=[dict(data_src="loss", window_size=...)]; interval=... for all other values'
        ),
        "interval_exp_name": "no argument: work_dir names the run",
        "keep_local": "no argument: the files stay in work_dir when they are copied",
        "log_metric_by_epoch": "no argument: each log has both epoch and step",
        "file_client_args": _STORE,
        "backend_args": _STORE,
    },
    "mmcv": {
        "by_epoch": "max_epochs or max_iters of the Trainer",
        "reset_flag": "no argument: values are never kept for the next interval",
    },
    "Lightning": {"log_every_n_steps": "interval=..."},
    "detectron2": {"period": "interval=..."},
}
_LENGTH = "no argument: the Trainer knows the length of the run and of an epoch"
_TIMER = {
    "Pet": {"max_iter": _LENGTH, "start_iter": "no argument: a resumed run counts only its own iterations"}
}
_PERIODIC = {
    "Pet": {
        "max_iter": _LENGTH,
        "display_iter": "period=..., and by_epoch=True to count within each epoch",
    }
}
_PRECISE_BN = {
    "detectron2": {"period": "interval=...", "model": "no argument: the model of the Trainer is used"},
    "Pet": {
        "max_iter": _LENGTH,
        "precise_bn_args": "data_loader=...; the model and the device are the Trainer's",
    },
}
_ANNEALED = 'ema_type="MomentumAnnealingEMA", gamma=...'
_EMA = {
    "Lightning": {
        "decay": "momentum=..., the share of the newest weights, which is 1 - decay",
        "use_buffers": "update_buffers=...",
        "avg_fn": "ema_type=..., a class derived from BaseAveragedModel",
        "multi_avg_fn": "ema_type=..., a class derived from BaseAveragedModel",
        "update_every_n_steps": "interval=...",
        "update_starting_at_step": "begin_iter=...",
        "update_starting_at_epoch": "begin_epoch=...",
        "swa_epoch_start": 'begin_epoch=..., ema_type="StochasticWeightAverage"',
        "swa_lrs": "schedulers=[torch.optim.swa_utils.SWALR(...)] of the Trainer",
    },
    "timm": {
        "update_after_step": "begin_iter=...",
        "use_warmup": _ANNEALED,
        "exclude_buffers": "update_buffers=False, the default",
    },
    "mmcv": {"warm_up": _ANNEALED, "resume_from": "trainer.resume(path)"},
    "ignite": {
        "momentum_warmup": _ANNEALED,
        "warmup_iters": _ANNEALED,
        "handle_buffers": "update_buffers=...",
    },
}

OF_CLASSES = {
    "Trainer": ARGUMENTS,
    "CheckpointHook": _CHECKPOINTS,
    "EarlyStoppingHook": _EARLY_STOPPING,
    "OptimizerHook": _OPTIMIZER,
    "LoggerHook": _LOGGER,
    "PeriodicWriter": _PERIODIC,
    "IterationTimer": _TIMER,
    "PreciseBN": _PRECISE_BN,
    "BaseAveragedModel": _EMA,
}
"""Arguments of other systems with their replacements, by class of eventloop and by system."""


def argument_meant(classes: Iterable[str], name: str) -> str:
    """Return the replacement of an unknown argument, as the end of an error message.

    It is "" if no other system has an argument of that name.

    Args:
        classes: names of the class and its bases.
    """
    systems = (system for each in classes for system in OF_CLASSES.get(each, {}).items())
    found = (
        f": instead of {system}'s use {arguments[name]}" for system, arguments in systems if name in arguments
    )
    return next(found, "")


_VALIDATION = "val_loader=..., val_interval=... of the Trainer, which validates"
_CONSOLE = "ConsoleWriter, with the interval of LoggerHook"
_OWN = "a Writer of your own, about twenty lines: see `eventloop.writers.Writer`"
_BEST = 'CheckpointHook(save_best="...")'
_STOPPING = 'EarlyStoppingHook(monitor="...")'
_HOOK = "Hook from eventloop.hooks, whose methods take (self, trainer, event)"
_TRAINER = "Trainer from eventloop"
_AVERAGE = "EMAHook(momentum=...), whose momentum is 1 - decay"

CLASSES = {
    "TrainHook": _HOOK,
    "HookBase": _HOOK,
    "Runner": _TRAINER,
    "EpochBasedRunner": _TRAINER,
    "IterBasedRunner": _TRAINER,
    "DefaultTrainer": _TRAINER,
    "SimpleTrainer": _TRAINER,
    "EventWriter": "Writer from eventloop.writers, whose write takes (self, event)",
    "MessageHub": "trainer.metrics for numbers, and trainer.bus.latest(event) for facts about the run",
    "get_hooks_info": "print(trainer.bus), which shows every handler in its order",
    "build_hooks": "hooks=[...] of the Trainer, where a hook may be a config",
    "build_writers": "writers=[...] of the Trainer, where a writer may be a config",
    "PrepareTTAHook": "val_step=... of the Trainer, a function that averages the outputs over augmentations",
    "EvalHook": _VALIDATION,
    "DistEvalHook": _VALIDATION,
    "PeriodicCheckpointer": "CheckpointHook(interval=...)",
    "BestCheckpointer": _BEST,
    "ModelCheckpoint": "CheckpointHook(interval=..., save_best=...)",
    "Checkpoint": "CheckpointHook(interval=..., save_best=...)",
    "EarlyStopping": _STOPPING,
    "EarlyStoppingCallback": _STOPPING,
    "TerminateOnNan": "CheckInvalidLossHook()",
    "GradientAccumulationScheduler": "GradientCumulativeOptimizerHook(cumulative_iters=...)",
    "WeightAveraging": _AVERAGE,
    "EMAWeightAveraging": _AVERAGE,
    "EMAHandler": _AVERAGE,
    "ModelEma": _AVERAGE,
    "ModelEmaV2": _AVERAGE,
    "ModelEmaV3": _AVERAGE,
    "TextLoggerHook": _CONSOLE,
    "CommonMetricPrinter": _CONSOLE,
    "TensorboardLoggerHook": "TensorBoardWriter",
    "TensorboardVisBackend": "TensorBoardWriter",
    "LocalVisBackend": "JSONLWriter for scalars, ImageFileWriter for images",
    "VisdomVisBackend": "VisdomWriter",
    "LearningRateMonitor": (
        "no hook: each log has the rates by default, and LRScheduler records them in every iteration"
    ),
    "AutogradProfiler": "ProfilerHook",
    "PyTorchProfiler": "ProfilerHook",
    "TorchMemoryStats": "MemoryHook",
    "DeviceStatsMonitor": "MemoryHook",
    "StochasticWeightAveraging": 'EMAHook(ema_type="StochasticWeightAverage", begin_epoch=...)',
    "Timer": "a handler that calls trainer.stop(reason)",
    "RichProgressBar": _CONSOLE,
    "TQDMProgressBar": _CONSOLE,
    "ProgressBar": _CONSOLE,
    "SummaryWriter": "TensorBoardWriter",
    "TensorBoardLogger": "TensorBoardWriter",
    "TensorboardLogger": "TensorBoardWriter",
    "TensorboardXWriter": "TensorBoardWriter",
    "JSONWriter": "JSONLWriter",
    "VisdomLogger": "VisdomWriter",
    "CSVLogger": "CSVWriter",
    **dict.fromkeys(
        [f"{name}LoggerHook" for name in ("Wandb", "Mlflow", "Neptune", "Dvclive", "ClearML", "Pavi")], _OWN
    ),
    "WandbLogger": _OWN,
    "WandBLogger": _OWN,
    "CometLogger": _OWN,
    "NeptuneLogger": _OWN,
    "ClearMLLogger": _OWN,
    "WandbVisBackend": _OWN,
    "MLFlowLogger": _OWN,
    "MLflowVisBackend": _OWN,
}
"""Classes and functions of Pet, mmcv, MMEngine, detectron2, Lightning, ignite and timm, with replacements."""


def explain_absent(package: str, name: str) -> NoReturn:
    """Raise an error for a name that a package lacks, with its replacement if another system has the name.

    `__getattr__` of a package calls this.

    `from package import name` calls `hasattr` first, and replaces the text of an AttributeError. An import
    statement is therefore recognized by its frame and gets an ImportError, whose text Python keeps.

    Raises:
        ImportError: in an import statement.
        AttributeError: in any other code.
    """
    if name not in CLASSES:
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
    meant = f"{name!r}: use {CLASSES[name]}"
    if sys._getframe(2).f_code.co_name == "_handle_fromlist":
        raise ImportError(f"cannot import name {meant}", name=package)
    raise AttributeError(f"module {package!r} has no attribute {meant}", name=name)


_POINTS = {
    "on_save_checkpoint": "before_save_checkpoint",
    "on_load_checkpoint": "after_load_checkpoint",
    "on_step_begin": "before_train_iter",  # Transformers'
    "on_step_end": "after_train_iter",
    "before_train_batch": "before_train_iter",
    "after_train_batch": "after_train_iter",
}
_WHEN = {"start": "before", "begin": "before", "end": "after"}
_WHAT = {"batch": "iter", "step": "iter", "validation": "val", "fit": "run"}


def point_meant(method: str) -> str:
    """Translate a callback method of Lightning, torchtnt, Keras or Transformers to the name of an event.

    `on_train_batch_end` becomes `after_train_iter`. The event need not exist. The result is "" for a name of
    another form.
    """
    if method in _POINTS:
        return _POINTS[method]
    if found := re.fullmatch(r"on_((?:before|after)_\w+)", method):
        return found[1]
    if found := re.fullmatch(r"on_(\w+)_(start|begin|end)", method):
        return "_".join([_WHEN[found[2]], *(_WHAT.get(word, word) for word in found[1].split("_"))])
    return ""
