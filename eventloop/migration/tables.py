"""List names of other systems with their replacements in eventloop, for error messages.

The systems are Lightning, MMEngine, mmcv, ignite, detectron2 and Transformers. A row has one or several
names, separated by spaces, and one replacement: a noun phrase that follows "use" in the message.
`eventloop.migration.names` reads the tables.
"""

from __future__ import annotations


def table(*rows: tuple[str, str]) -> dict[str, str]:
    """Return a dict from each name to its replacement, given rows of several names and one replacement."""
    return {name: replacement for names, replacement in rows for name in names.split()}


_TORCHRUN = "torchrun to run the script, and DistributedDataParallel(model) as the model"
_LIMIT = "limit_batches=dict(train=..., val=..., test=...), each a number (int) or a share (float)"
_OVERFIT = "limit_batches=..., with shuffle=False, and val_loader=... the same loader as train_loader"
_ACCUMULATE = "hooks=[GradientCumulativeOptimizerHook(cumulative_iters=...)] of the Trainer"
_AMP = 'hooks=[AmpOptimizerHook(dtype="bfloat16")] of the Trainer'
_NORM = "grad_clip=dict(max_norm=..., norm_type=2)"
_VALUE = 'grad_clip=dict(type="value", clip_value=...)'
_RULE = 'rule="less" for "min", "greater" for "max"; the default depends on the metric\'s name'
_FILENAME = 'filename_tmpl="step_{}", with only the number; `eventloop checkpoints` lists the scores'
_DIRECTORY = "work_dir=... of the Trainer; or out_dir=..., which gets a folder with the name of work_dir"
_SCORE = 'save_best="...", a metric of the validation'
_VERBOSE = "writers=[ConsoleWriter()] of the Trainer, which prints it"
_LENGTH = "max_epochs or max_iters of the Trainer, which counts the iterations"
_FVCORE = "schedulers=[...] of the Trainer, with PyTorch's schedulers or MMEngine's, such as"
_ANNEALED = 'ema_type="MomentumAnnealingEMA", gamma=...'

_SUBSCRIBE = table(
    ("interval every_n", "every=..."),
    ("begin", "start=..."),
    ("condition event_filter filter", "when=..., a function of the event"),
    ("background thread", 'offload="thread"'),
    ("process", 'offload="process"'),
)

ARGUMENTS = {
    "Trainer": table(
        # MMEngine's and mmcv's Runners
        ("train_dataloader loader dataloader", "train_loader=..., a loader"),
        ("val_dataloader", "val_loader=..., a loader"),
        ("test_dataloader", "test_loader=..., a loader"),
        ("train_cfg", "max_epochs or max_iters, val_interval, val_begin and dynamic_intervals"),
        ("val_cfg evaluation", "val_loader=..., and val_interval"),
        ("test_cfg", "test_loader=..."),
        ("optim_wrapper", "optimizer=..., an object, and OptimizerHook or its subclasses"),
        ("param_scheduler", "schedulers=..., with the same configs"),
        ("val_evaluator test_evaluator compute_metrics", "evaluator=..., a function or an object"),
        ("visualizer vis_backends logger report_to", "writers=[...]"),
        ("resume ckpt_path", 'trainer.resume("auto") or trainer.resume(path), before trainer.train()'),
        ("load_from", "trainer.load_checkpoint(path)"),
        ("launcher model_wrapper_cfg devices num_nodes strategy", _TORCHRUN),
        ("randomness seed", "eventloop.seed_everything(seed) in the script, before the model is built"),
        ("log_config log_every_n_steps logging_steps", "default_hooks=dict(logger=dict(interval=...))"),
        ("log_processor", "default_hooks=dict(logger=dict(interval=..., custom_cfg=[...]))"),
        ("checkpoint_config enable_checkpointing save_steps", "hooks=[CheckpointHook(interval=...)]"),
        ("optimizer_config", f"default_hooks=dict(optimizer=dict({_NORM}))"),
        ("lr_config", "hooks=[StepLrUpdaterHook(...)] or another policy, or schedulers=[...]"),
        ("momentum_config", "hooks=[StepMomentumUpdaterHook(...)], or the hook of another policy"),
        ("workflow", 'trainer.run([("train", 2), ("val", 1)])'),
        ("batch_processor", "train_step=..., a function of the trainer and a batch"),
        # Lightning's and Transformers' Trainers
        ("accumulate_grad_batches gradient_accumulation_steps", _ACCUMULATE),
        ("gradient_clip_val max_grad_norm", f"default_hooks=dict(optimizer=dict({_NORM}))"),
        ("gradient_clip_algorithm", f"default_hooks=dict(optimizer=dict({_VALUE}))"),
        ("precision bf16 fp16 amp use_amp", _AMP),
        ("callbacks", "hooks=[...]"),
        ("torch_compile", 'compile="model", or compile="step"'),
        ("enable_progress_bar", "writers=[ConsoleWriter()], the default on a terminal, or writers=[]"),
        ("default_root_dir output_dir experiment_name", "work_dir=..., the directory of the run"),
        ("max_steps", "max_iters=..."),
        ("num_train_epochs", "max_epochs=..."),
        ("check_val_every_n_epoch val_check_interval eval_steps", "val_interval=..., in the unit of the run"),
        ("num_sanity_val_steps", "sanity_val=..., in batches"),
        ("limit_train_batches limit_val_batches limit_test_batches", _LIMIT),
        ("overfit_batches", _OVERFIT),
        # Keras', Composer's and torchtnt's
        ("steps_per_epoch validation_steps train_subset_num_batches eval_subset_num_batches", _LIMIT),
        ("max_steps_per_epoch max_train_steps_per_epoch max_eval_steps_per_epoch epoch_length", _LIMIT),
        ("accelerator", "device=..."),
        ("deterministic", "torch.use_deterministic_algorithms(True) in the script"),
        ("auto_lr_find", "trainer.find_lr(), before trainer.train()"),
        (
            "enable_model_summary weights_summary",
            "default_hooks=dict(runtime_info=dict(model_summary=True)), or trainer.model_summary(batch)",
        ),
        ("profiler", "hooks=[ProfilerHook(...)], or `eventloop report` for the costs of a run"),
        ("args", "arguments of the Trainer in place of TrainingArguments"),
        ("train_dataset data_collator", "train_loader=DataLoader(data, collate_fn=...)"),
        ("eval_dataset", "val_loader=DataLoader(data, collate_fn=...), or a mapping of several by name"),
        # names of no system in particular
        ("dataset data train_data batch_size", "train_loader=DataLoader(data, batch_size=...)"),
        ("metrics metric", "evaluator=..., a function (preds, target) or an object"),
        ("clip_grad grad_clip", f"default_hooks=dict(optimizer=dict({_NORM}))"),
        ("criterion loss_function", "loss_fn=..., a function (model(inputs), target)"),
        ("lr learning_rate", "optimizer=torch.optim.SGD(model.parameters(), lr=...), or another optimizer"),
        ("ema", "hooks=[EMAHook(momentum=...)], whose momentum is 1 - decay"),
    ),
    "CheckpointHook": table(
        ("monitor val_metric score_name score_function", _SCORE),
        ("mode", _RULE),
        ("save_top_k n_saved", "keep_best=... with save_best, or max_keep_ckpts=... for the newest"),
        ("max_to_keep save_total_limit", "max_keep_ckpts=..."),
        ("every_n_epochs period", "interval=..."),
        ("every_n_train_steps save_steps", "interval=..., by_epoch=False"),
        ("train_time_interval", "interval=..., in epochs or, with by_epoch=False, in iterations"),
        ("eval_period", "val_interval=... of the Trainer"),
        ("dirpath dirname", _DIRECTORY),
        ("filename filename_prefix filename_pattern file_prefix auto_insert_metric_name", _FILENAME),
        ("save_weights_only", 'published_keys="state_dict" for the end, or save_optimizer=False'),
        ("save_on_train_epoch_end", "interval=..., which saves before the validation of the epoch"),
        ("file_client_args backend_args", "out_dir=..., on a mounted file system"),
        ("create_symlink", 'trainer.resume("auto"), which finds the newest checkpoint'),
        ("sync_buffer", "hooks=[SyncBuffersHook()] of the Trainer"),
        ("to_save", "the state_dict of a hook; the whole state of the trainer is saved"),
        ("verbose", _VERBOSE),
    ),
    "EarlyStoppingHook": table(
        ("mode", _RULE),
        ("score_function", 'monitor="...", a metric of the validation'),
        ("early_stopping_patience", "patience=..."),
        ("early_stopping_threshold", "min_delta=..."),
        ("min_delta_mode", "delta_mode=..."),
        ("cumulative_delta", "min_delta=..., which is relative to the best score"),
        ("divergence_threshold", "check_finite=True, or a handler that calls trainer.stop(reason)"),
        ("trainer", "hooks=[EarlyStoppingHook(...)] of the Trainer"),
        ("verbose", _VERBOSE),
    ),
    "OptimizerHook": table(
        ("clip_grad", "grad_clip=..., the same dict"),
        ("gradient_clip_val max_norm norm_type max_grad_norm", _NORM),
        ("gradient_clip_algorithm clip_value", _VALUE),
        ("accumulative_counts accumulate_grad_batches gradient_accumulation_steps", "cumulative_iters=..."),
        ("precision", 'dtype="bfloat16"'),
    ),
    "LoggerHook": table(
        ("log_every_n_steps logging_steps period", "interval=..."),
        ("window_size", 'custom_cfg=[dict(data_src="loss", window_size=...)], or interval=...'),
        ("by_epoch", "max_epochs or max_iters of the Trainer"),
        ("interval_exp_name exp_name", "work_dir=... of the Trainer, whose name the run has"),
        ("file_client_args backend_args", "out_dir=..., on a mounted file system"),
    ),
    "PreciseBN": table(
        ("period", "interval=..."),
        ("max_iter max_iters max_epochs", _LENGTH),
        ("precise_bn_args model", "data_loader=... and forward=...; the model is the trainer's"),
    ),
    "IterationTimer": table(("max_iter max_iters start_iter", _LENGTH)),
    "WandbWriter": table(
        ("api_key key", "the environment variable WANDB_API_KEY, or `wandb login`"),
        ("offline", 'mode="offline"'),
        ("dir save_dir", "work_dir=... of the Trainer"),
        ("id resume version", 'trainer.resume("auto"), which continues the run of the work dir'),
        ("log_model", "checkpoints=True"),
    ),
    "MLflowWriter": table(
        ("experiment_name exp_name", "experiment=..."),
        ("save_dir", "work_dir=... of the Trainer"),
        ("run_id", 'trainer.resume("auto"), which continues the run of the work dir'),
        ("log_model", "checkpoints=True"),
    ),
    # former arguments of eventloop's classes
    "CostsHook": table(
        ("interval", "interval_seconds=..., a number of seconds"),
        ("log_every", "log_seconds=..., a number of seconds"),
    ),
    "EventLogWriter": table(("fsync_interval", "fsync_seconds=..., a number of seconds")),
    "VisdomWriter": table(("retry_interval", "retry_seconds=..., a number of seconds")),
    "Bus.on": _SUBSCRIBE,
    "Bus.subscribe": _SUBSCRIBE,
    "BaseAveragedModel": table(
        ("decay", "momentum=..., the share of the newest weights, which is 1 - decay"),
        ("use_buffers handle_buffers", "update_buffers=..."),
        ("avg_fn multi_avg_fn", "ema_type=..., a class derived from BaseAveragedModel"),
        ("update_every_n_steps", "interval=..."),
        ("update_starting_at_step", "begin_iter=..."),
        ("update_starting_at_epoch", "begin_epoch=..."),
        ("swa_epoch_start", 'begin_epoch=..., ema_type="StochasticWeightAverage"'),
        ("momentum_warmup warmup_iters warm_up", _ANNEALED),
    ),
}
"""By class or method, arguments of other systems and former arguments of ours, with the replacements."""

_TRAINS = "trainer.train(), or a loop of your own over trainer.epochs() and trainer.batches(loader)"
_SAVES = "hooks=[CheckpointHook(interval=..., save_best=...)] of the Trainer, which saves"
_NUMBERS = "trainer.metrics, with latest() for the newest values"

SWITCHES = {
    "should_stop",
    "terminate",
    "stop_training",
    "max_epoch",
    "max_steps",
    "max_iter",
    "global_step",
    "current_epoch",
    "lr",
    "learning_rate",
}
"""The names of `ATTRIBUTES` that control a run when they are set in another system.

To set them raises an error, too. Other names may be set on our trainer, as attributes of the program.
"""
ATTRIBUTES = table(
    ("runner lightning_trainer", "the trainer itself"),
    ("fit train_loop fit_loop", _TRAINS),
    ("val_loop validate evaluate", "trainer.val()"),
    ("test_loop", "trainer.test()"),
    ("lr_find tune tuner", "trainer.find_lr()"),
    ("train_dataloader", "trainer.train_loader"),
    ("val_dataloader val_dataloaders", "trainer.val_loader"),
    ("test_dataloader test_dataloaders", "trainer.test_loader"),
    ("data_loader", "trainer.loader"),
    ("data_batch", "trainer.batch"),
    ("lightning_module", "trainer.model"),
    ("optim_wrapper optimizers", "trainer.optimizer, one or a mapping of several"),
    ("param_schedulers lr_scheduler", "trainer.schedulers"),
    ("message_hub log_buffer callback_metrics logged_metrics storage", _NUMBERS),
    ("log", "trainer.metrics.put_scalar(name, value)"),
    ("log_dict", "trainer.metrics.put_scalars(values)"),
    ("visualizer", "trainer.metrics.put_image(name, image), which goes to all of trainer.writers"),
    ("logger", 'trainer.writers for metrics, or logging.getLogger("eventloop") for messages'),
    ("loggers", "trainer.writers"),
    ("global_step", "trainer.iter"),
    ("max_epoch", "trainer.max_epochs"),
    ("lr learning_rate", "the param_groups of trainer.optimizer"),
    ("current_epoch", "trainer.epoch"),
    ("inner_iter", "trainer.batch_idx"),
    ("max_steps max_iter estimated_stepping_batches", "trainer.max_iters"),
    ("num_training_batches", 'trainer.limits.length("train", trainer.train_loader)'),
    ("limit_train_batches limit_val_batches limit_test_batches overfit_batches", "trainer.limits"),
    ("callbacks", "trainer.hooks"),
    ("register_hook register_hooks build_hooks add_callback", "hooks=[...] of the Trainer"),
    ("build_writers", "writers=[...] of the Trainer"),
    ("get_hooks_info", "print(trainer.bus), which shows every handler in its order"),
    ("add_event_handler on", "trainer.bus.on(event)"),
    ("call_hook fire_event", "trainer.bus.emit(event)"),
    ("from_cfg", "Trainer(...), where hooks, writers and schedulers may be configs"),
    ("load_or_resume resume_or_load", 'trainer.resume("auto"), or trainer.load_checkpoint(path)'),
    ("ckpt_path", 'trainer.resume("auto") or trainer.resume(path)'),
    ("save_model save_state checkpointer checkpoint_callback", _SAVES),
    (
        "should_stop terminate stop_training",
        "trainer.stop(reason), which sets trainer.asked_to_stop",
    ),
    ("global_rank", "trainer.rank"),
    ("is_global_zero", "trainer.rank == 0"),
    ("log_dir default_root_dir experiment_name", "trainer.work_dir"),
)
"""Attributes and methods of other systems' trainers, with the replacements."""

CALLS = table(
    ("ckpt_path resume_from_checkpoint", 'trainer.resume("auto") or trainer.resume(path) before it'),
    (
        "epoch_length steps_per_epoch validation_steps",
        "limit_batches=dict(train=..., val=...) of the Trainer",
    ),
    (
        "dataloaders train_dataloaders val_dataloaders datamodule data_loaders",
        "an argument of the Trainer: train_loader, val_loader or test_loader; or predict(loader)",
    ),
    ("strict weights_only", "trainer.load_checkpoint(path, strict=...), which loads the weights alone"),
    ("return_predictions", "to=..., which receives the outputs of each batch in place of a result"),
    ("test_dataset", "a loader: test_loader=... of the Trainer, or predict(loader)"),
)
"""Arguments of train, val, test, run and resume in other systems, with the replacements."""

PLACES = {
    "save_checkpoint": (
        "CheckpointHook(out_dir=..., filename_tmpl=...) says where checkpoints are saved, and the call when; "
        "torch.save(trainer.model.state_dict(), path) writes the weights alone to a file"
    )
}
"""By the name of a method, a hint for arguments that only the same method of other trainers takes."""

_OWN = "a Writer of your own, about twenty lines: see `eventloop.writers.Writer`"
CLASSES = table(
    ("HookBase TrainerCallback TrainHook", "Hook from eventloop.hooks, with methods (self, trainer, event)"),
    ("Runner EpochBasedRunner IterBasedRunner DefaultTrainer SimpleTrainer Engine", "Trainer from eventloop"),
    ("EventWriter", "Writer from eventloop.writers, whose write takes (self, event)"),
    ("MessageHub", "trainer.metrics for numbers, and trainer.bus.latest(event) for facts about the run"),
    ("get_hooks_info", "print(trainer.bus), which shows every handler in its order"),
    ("build_hooks", "hooks=[...] of the Trainer, where a hook may be a config"),
    ("build_writers", "writers=[...] of the Trainer, where a writer may be a config"),
    ("PrepareTTAHook", "val_step=... of the Trainer, which averages the outputs over augmentations"),
    (
        "SidecarEvaluator",
        'AsyncValidationHook(build="module:function"), or `eventloop evaluate RUN --follow`',
    ),
    ("EvalHook DistEvalHook", "val_loader=..., val_interval=... of the Trainer, which validates"),
    ("ModelCheckpoint Checkpoint PeriodicCheckpointer", "CheckpointHook(interval=..., save_best=...)"),
    ("BestCheckpointer", 'CheckpointHook(save_best="...")'),
    ("EarlyStopping EarlyStoppingCallback", 'EarlyStoppingHook(monitor="...")'),
    ("TerminateOnNan TerminateOnNaN", "CheckInvalidLossHook()"),
    ("SpikeDetection", "RollbackHook(), which goes back within the run"),
    (
        "VisualizerHook NaiveVisualizationHook DetVisualizationHook SegVisualizationHook",
        "VisualizationHook(draw=...)",
    ),
    ("StepParamScheduler MultiStepParamScheduler", f"{_FVCORE} MultiStepLR"),
    ("CosineParamScheduler", f"{_FVCORE} CosineAnnealingLR"),
    ("LinearParamScheduler WarmupParamScheduler", f"{_FVCORE} LinearLR"),
    ("ExponentialParamScheduler StepWithFixedGammaParamScheduler", f"{_FVCORE} ExponentialLR or StepLR"),
    ("PolynomialDecayParamScheduler", f"{_FVCORE} PolyLR"),
    ("ConstantParamScheduler", f"{_FVCORE} ConstantLR"),
    ("CompositeParamScheduler", f"{_FVCORE} several configs, each with its begin and end"),
    ("GradientAccumulationScheduler", "GradientCumulativeOptimizerHook(cumulative_iters=...)"),
    ("WeightAveraging EMAWeightAveraging EMAHandler", "EMAHook(momentum=...), whose momentum is 1 - decay"),
    ("StochasticWeightAveraging", 'EMAHook(ema_type="StochasticWeightAverage", begin_epoch=...)'),
    ("FastaiLRFinder LearningRateFinder Tuner", "find_lr of the Trainer"),
    ("ModelSummary RichModelSummary", "RuntimeInfoHook(model_summary=True), or model_summary of the Trainer"),
    ("LearningRateMonitor", "LRScheduler, for the rates of every iteration; each log has the newest"),
    ("AutogradProfiler PyTorchProfiler TorchProfiler", "ProfilerHook"),
    ("TorchMemoryStats DeviceStatsMonitor", "MemoryHook"),
    ("ThroughputMonitor SpeedMonitor", "ThroughputHook(count=..., flops=...)"),
    ("Timer", "a handler that calls trainer.stop(reason)"),
    (
        "TextLoggerHook CommonMetricPrinter RichProgressBar TQDMProgressBar ProgressBar",
        "ConsoleWriter, with the interval of LoggerHook",
    ),
    (
        "SummaryWriter TensorBoardLogger TensorboardLogger TensorboardLoggerHook TensorboardVisBackend",
        "TensorBoardWriter",
    ),
    ("LocalVisBackend", "JSONLWriter for scalars, ImageFileWriter for images"),
    ("JSONWriter", "JSONLWriter"),
    ("CSVLogger", "CSVWriter"),
    ("VisdomLogger VisdomVisBackend", "VisdomWriter"),
    ("WandbLogger WandBLogger WandbLoggerHook WandbVisBackend", "WandbWriter"),
    ("MLFlowLogger MlflowLoggerHook MLflowVisBackend", "MLflowWriter"),
    ("CometLogger NeptuneLogger ClearMLLogger ClearMLLoggerHook", _OWN),
)
"""Classes and functions of other systems, with the replacements."""

METHODS = table(
    ("on_save_checkpoint", "before_save_checkpoint"),
    ("on_load_checkpoint", "after_load_checkpoint"),
    ("on_step_begin before_train_batch", "before_train_iter"),
    ("on_step_end after_train_batch", "after_train_iter"),
    ("STARTED", "before_train"),
    ("EPOCH_STARTED", "before_train_epoch"),
    ("ITERATION_STARTED", "before_train_iter"),
    ("ITERATION_COMPLETED", "after_train_iter"),
    ("EPOCH_COMPLETED", "after_train_epoch"),
    ("COMPLETED", "after_train"),
)
"""The event for each method of other systems' callbacks, and event of ignite, to which no rule applies."""

STORAGE = table(
    ("vis_data clear_images", "put_image(name, image), which the writers receive as image_logged"),
    ("histograms clear_histograms", "put_histogram(name, values), which they receive as histogram_logged"),
    ("update_scalar update_info", "put_scalar(name, value)"),
    ("update_scalars", "put_scalars(values)"),
    ("get_scalar log_scalars", "history(name), or latest() for the newest values"),
    ("smoothing_hints", "smoothing_hint=... of put_scalar"),
)
"""Attributes and methods of other systems' metric storages, with the replacements."""

RENAMED = {
    "Bus": table(("keep_left", "on_undelivered(store)")),
    "DrivenTrainer": table(("note_rates", "record_rates(optimizer)")),
    "EventStorage": table(
        ("settle", "read_collected()"),
        ("look_for_lost_loss", "check_losses()"),
        ("relieve", "post_pending"),
    ),
    "Subscription": table(("lane", "subscriber")),
}
"""By class, former names of attributes and methods of eventloop, with the present ones."""
