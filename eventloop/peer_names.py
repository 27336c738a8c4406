"""Names that users of other systems type, and what does that here: for the errors that say so."""

from __future__ import annotations

import re

ARGUMENTS = {
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
}
"""Arguments of MMEngine's Runner."""

_VALIDATION = "the Trainer validates: val_loader=..., val_interval=..."
_CONSOLE = "ConsoleWriter, which LoggerHook's interval feeds"
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
    "LearningRateMonitor": "the rates are logged by default; LRScheduler puts them in every iteration",
    "AutogradProfiler": "ProfilerHook",
    "PyTorchProfiler": "ProfilerHook",
    "TorchMemoryStats": "MemoryHook",
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
