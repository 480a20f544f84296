"""Settings of other trainers: for each argument the name it has here, or how to get the same effect.

Errors about unknown arguments quote these answers, and the pages of ``docs/coming-from`` list them. An answer that
is a single word is the name of an argument of ``TrainingArguments`` or ``Trainer``.
"""

from __future__ import annotations

from collections.abc import Container

_OPTIMIZER = "build the optimizer and pass it: Trainer(optimizer=…)"
_LOADER = "build the loader and pass it: Trainer(train_dataloader=…)"
_PARALLEL = "parallel='ddp', 'fsdp', or modes such as HSDP(replicate=2), under torchrun"
_DDP = "wrap the model in DDP with this option, in a loop of your own around dalsegno.Run"
_GROUP = "call torch.distributed.init_process_group(…) with it before you build the trainer, which uses that group"
_METRICS = "callbacks=[ModelEvalMetrics(…)] computes metrics batch by batch and keeps no outputs"
_KERNELS = "apply these kernels to the model before you build the trainer"
_HUB = "upload in on_save of a callback; save_pretrained=True makes its path a model in Hugging Face's format"
_TRACKER = "configure the tracker itself, by its environment variables or its callback's arguments"
_BATCHES = "pass a part of the dataset: torch.utils.data.Subset(dataset, range(n))"
_OUTPUT_DIR = "checkpoints and logs are in output_dir, which all hosts must see; rank 0 writes the logs"
_LOG_LEVEL = "logging.getLogger('dalsegno').setLevel(…)"
_DEVICE = "an accelerator is used if there is one; use_cpu=True for the CPU"
_DEVICES = "torchrun --nproc-per-node N starts one process per device"
_PRECISION = "bf16=True or fp16=True"
_MINIMUM = "a run ends early only if a callback stops it: see patience= of EarlyStopping, warmup= of DivergenceDetector"
_MEMORY = "callbacks=[PeakMemory()] or [MemoryMonitor()] records memory"
_BETAS = "adam_beta1= and adam_beta2="
_LENGTH = "datasets determine the length of samples; sequence_length_schedule= changes it during the run"
_LOSS = "compute it in loss_fn= of the trainer"
_MODEL = "prepare the model before you build the trainer"
_ZERO = "parallel='fsdp', under torchrun, shards parameters, gradients and optimizer state as ZeRO-3 does"
_FSDP = "parallel=FSDP(reshard_after_forward=…, mp_policy=…), under torchrun"
_RESUME = "trainer.train() resumes by itself; trainer.train(path) from that checkpoint"
_EPOCH = "an epoch ends with the data; max_steps= ends the run at a step"
_OPTIM_ARGS = "optim_args={…} has the optimizer's own arguments"

COMMON = {
    "model": "model",
    "callbacks": "callbacks",
    "loss_weight": "loss_weight",
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "batch_size_schedule": "gradient_accumulation_schedule",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "train_data": "train_dataset",
    "eval_data": "eval_dataset",
    "train_loader": "train_dataloader",
    "eval_loader": "eval_dataloader",
    "scheduler": "lr_scheduler",
    "tokenizer": "processing_class",
    "collate_fn": "data_collator",
    "criterion": "loss_fn",
    "grad_clip": "max_grad_norm",
    "clip_grad": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "grad_accum": "gradient_accumulation_steps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "accumulation_steps": "gradient_accumulation_steps",
    "num_epochs": "num_train_epochs",
    "betas": _BETAS,
    "eps": "adam_epsilon",
    "momentum": "optim_args={'momentum': …}, for an optimizer that has one",
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "amp": _PRECISION,
    "mixed_precision": _PRECISION,
    "device": _DEVICE,
    "world_size": _DEVICES,
    "compile": "torch_compile",
    "num_workers": "dataloader_num_workers",
    "pin_memory": "dataloader_pin_memory",
    "prefetch_factor": "dataloader_prefetch_factor",
    "drop_last": "dataloader_drop_last",
    "shuffle": "samples are shuffled by seed= and data_seed=; another order: Trainer(train_dataloader=…)",
    "seq_len": _LENGTH,
    "max_length": _LENGTH,
    "ema": "callbacks=[EMA()] keeps averages of the weights and evaluates with them",
    "patience": "callbacks=[EarlyStopping(patience=…)]",
    "early_stopping_patience": "callbacks=[EarlyStopping(patience=…)]",
    "log_dir": "output_dir",
    "checkpoint_dir": "output_dir",
    "resume": _RESUME,
}
"""Names in common use, and arguments of ``Trainer`` that are passed to ``TrainingArguments``."""

HUGGING_FACE = {
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "evaluation_strategy": "eval_strategy",
    "optim_target_modules": _OPTIMIZER,
    "optimizers": "optimizer",
    "optimizer_cls_and_kwargs": _OPTIMIZER,
    "average_tokens_across_devices": "loss_weight= of the trainer: a function that returns a batch's number of tokens",
    "label_smoothing_factor": "compute it in loss_fn= of the trainer, with CrossEntropyLoss(label_smoothing=…)",
    "compute_loss_func": "loss_fn",
    "model_init": "build the model and pass it: Trainer(model, …)",
    "compute_metrics": _METRICS,
    "preprocess_logits_for_metrics": "select= of the callback ModelEvalMetrics",
    "include_for_metrics": _METRICS,
    "batch_eval_metrics": _METRICS,
    "eval_do_concat_batches": _METRICS,
    "eval_use_gather_object": _METRICS,
    "eval_accumulation_steps": _METRICS,
    "prediction_loss_only": "evaluation keeps no outputs, so nothing needs to be switched off",
    "eval_delay": "eval_steps=0, and a callback that sets ctx.control.should_evaluate from the step on that you want",
    "eval_on_start": "call trainer.evaluate() before trainer.train()",
    "bf16_full_eval": "evaluation has the precision of training: bf16=, fp16=",
    "fp16_full_eval": "evaluation has the precision of training: bf16=, fp16=",
    "tf32": "torch.set_float32_matmul_precision('high') before training",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "use_liger_kernel": _KERNELS,
    "liger_kernel_config": _KERNELS,
    "use_cache": "model.config.use_cache = False before training",
    "neftune_noise_alpha": "add the noise in a forward hook on model.get_input_embeddings()",
    "torch_empty_cache_steps": "call torch.cuda.empty_cache() in on_step_end of a callback",
    "auto_find_batch_size": "not here: a run whose batch size depends on free memory would not resume exactly",
    "log_on_each_node": _OUTPUT_DIR,
    "save_on_each_node": _OUTPUT_DIR,
    "logging_dir": _OUTPUT_DIR,
    "overwrite_output_dir": "trainer.train(False) moves the run in output_dir into rewound/ and starts from scratch",
    "logging_nan_inf_filter": "NaN and infinity are logged as they are; CheckLoss() or NaNChecker() ends the run",
    "include_num_input_tokens_seen": "tokens are always counted: state.num_input_tokens_seen",
    "log_level": _LOG_LEVEL,
    "log_level_replica": _LOG_LEVEL,
    "project": _TRACKER,
    "trackio_space_id": _TRACKER,
    "trackio_bucket_id": _TRACKER,
    "trackio_static_space_id": _TRACKER,
    "save_only_model": "`dalsegno checkpoints export` writes the model alone; a checkpoint has all that a resume needs",
    "save_safetensors": "tensors are always saved as safetensors",
    "enable_jit_checkpoint": "SIGTERM always saves a checkpoint before the end",
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "ignore_data_skip": "a resumed run always continues at the next sample; a map dataset takes no time for that",
    "restore_callback_states_from_checkpoint": "states of callbacks are always saved and restored",
    "resume_from_checkpoint": _RESUME,
    "full_determinism": "torch.use_deterministic_algorithms(True) before training",
    "accelerator_config": "samples are always split over the ranks, and shuffled by seed= and data_seed=",
    "parallelism_config": _PARALLEL,
    "fsdp": "parallel='fsdp', under torchrun",
    "fsdp_config": _FSDP,
    "deepspeed": _ZERO,
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
    "ddp_backend": _GROUP,
    "ddp_timeout": _GROUP,
    "local_rank": "torchrun sets each rank in the environment (LOCAL_RANK)",
    "no_cuda": "use_cpu",
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    "train_sampling_strategy": _LOADER,
    "length_column_name": _LOADER,
    "group_by_length": _LOADER,
    "remove_unused_columns": "the model gets the columns that its forward() takes; a warning names the others once",
    "label_names": "the model gets the columns that its forward() takes; loss_fn= of the trainer gets all",
    "debug": "callbacks=[NaNChecker()] names the first module with NaN or infinity",
    "skip_memory_metrics": _MEMORY,
    "do_train": "call trainer.train()",
    "do_eval": "call trainer.evaluate()",
    "do_predict": "call trainer.predict(dataset)",
}
"""Of Hugging Face's ``TrainingArguments`` and ``Trainer``."""

LIGHTNING = {
    "accelerator": _DEVICE,
    "strategy": _PARALLEL,
    "devices": _DEVICES,
    "num_nodes": "torchrun --nnodes N",
    "precision": _PRECISION,
    "logger": "callbacks=[JsonLogger(), TBLogger()]",
    "fast_dev_run": "max_steps=1, with an output_dir of its own, which the real run would otherwise resume from",
    "max_epochs": "num_train_epochs",
    "min_epochs": _MINIMUM,
    "min_steps": _MINIMUM,
    "max_time": "max_seconds= limits the time of each start; Timer of Lightning in callbacks= that of all together",
    "limit_train_batches": _BATCHES,
    "limit_val_batches": _BATCHES,
    "limit_test_batches": _BATCHES,
    "limit_predict_batches": _BATCHES,
    "overfit_batches": "pass the same Subset(dataset, range(n)) as train_dataset= and as eval_dataset=",
    "val_check_interval": "eval_steps",
    "check_val_every_n_epoch": "eval_strategy='epoch' evaluates after every epoch",
    "num_sanity_val_steps": "call trainer.evaluate() before trainer.train()",
    "log_every_n_steps": "logging_steps",
    "enable_checkpointing": "save_steps=0 saves no checkpoints",
    "enable_progress_bar": "disable_tqdm=True prints lines instead",
    "enable_model_summary": "callbacks=[CountParams()] prints a summary",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_clip_val": "max_grad_norm",
    "gradient_clip_algorithm": "gradients are clipped by their total norm: max_grad_norm=",
    "deterministic": "torch.use_deterministic_algorithms(True) before training",
    "benchmark": "torch.backends.cudnn.benchmark = True before training",
    "inference_mode": "evaluation runs under torch.no_grad()",
    "use_distributed_sampler": "samples are always distributed over the ranks",
    "profiler": "callbacks=[ProfilerCallback(…)]",
    "detect_anomaly": "torch.autograd.set_detect_anomaly(True), or callbacks=[NaNChecker()]",
    "barebones": "trainer.remove_callback(key) removes the default callbacks; what is not there costs nothing",
    "plugins": "torchrun and Slurm are recognized; parallel=, bf16= and fp16= cover the rest",
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before you build the trainer",
    "reload_dataloaders_every_n_epochs": "a dataset with set_epoch(epoch) reads each epoch's data: docs/guides/data.md",
    "default_root_dir": "output_dir",
    "enable_autolog_hparams": "settings are recorded in every checkpoint",
    "model_registry": "upload in on_save of a callback",
}
"""Of Lightning's ``Trainer``."""

ACCELERATE = {
    "device_placement": "the trainer moves the model and each batch to the rank's device",
    "split_batches": "per_device_train_batch_size= is each rank's",
    "mixed_precision": _PRECISION,
    "cpu": "use_cpu",
    "dataloader_config": _LOADER,
    "deepspeed_plugin": _ZERO,
    "deepspeed_plugins": _ZERO,
    "fsdp_plugin": _FSDP,
    "torch_tp_plugin": "parallel=TensorParallel(), under torchrun",
    "megatron_lm_plugin": _PARALLEL,
    "parallelism_config": _PARALLEL,
    "rng_types": "all random generators are saved and restored",
    "log_with": "callbacks=[TBLogger(), WandbLogger()]",
    "project_dir": "output_dir",
    "project_config": "output_dir= for the folder, save_total_limit= for the number of checkpoints",
    "gradient_accumulation_plugin": "gradient_accumulation_steps",
    "step_scheduler_with_optimizer": "lr_scheduler= of the trainer is stepped after every step",
    "kwargs_handlers": _DDP,
    "dynamo_backend": "torch_compile_backend",
    "dynamo_plugin": "torch_compile=True, torch_compile_backend= and torch_compile_mode=",
}
"""Of ``Accelerator``."""

FORGATHER = {
    "preserve_best_model": "keep=Latest(n) | Best(), which keeps the best checkpoint beside the newest ones",
    "preserve_n_best": "keep=Best(n), or joined to others: keep=Latest(2) | Best(n)",
    "best_model_metric": "metric_for_best_model",
    "best_model_greater_is_better": "greater_is_better",
    "max_eval_steps": _BATCHES,
    "epoch_train_steps": _EPOCH,
    "float32_matmul_precision": "torch.set_float32_matmul_precision(…) before training",
    "fp8_recipe": _MODEL,
    "qat_recipe": _MODEL,
}
"""Of Forgather's trainers, where they are not Hugging Face's."""

KEMPNERFORGE = {
    "grad_clip_norm": "max_grad_norm",
    "compile_model": "torch_compile",
    "activation_checkpointing": "gradient_checkpointing",
    "z_loss_weight": _LOSS,
    "ce_chunk_size": _LOSS,
    "fused": "optim='adamw_fused'",
    "muon_momentum": _OPTIM_ARGS,
    "muon_ns_steps": _OPTIM_ARGS,
    "dir": "output_dir",
    "interval": "save_steps= of checkpoints, eval_steps= of evaluations",
    "log_interval": "logging_steps",
    "async_mode": "save_in_background",
    "keep_last_n": "save_total_limit",
    "load_path": _RESUME,
    "exclude_from_loading": "trainer.train(path, load_components=(…)) names what is loaded",
    "enable_wandb": "callbacks=[WandbLogger()]",
    "enable_tensorboard": "callbacks=[TBLogger()]",
    "wandb_project": _TRACKER,
    "wandb_run_name": _TRACKER,
    "tensorboard_dir": _OUTPUT_DIR,
}
"""Of KempnerForge's sections of settings."""

CEREBRAS = {
    "model_dir": "output_dir",
    "backend": _DEVICE,
    "schedulers": "lr_scheduler",
    "precision": _PRECISION,
    "sparsity": _MODEL,
    "loop": "max_steps= or num_train_epochs=, and eval_steps=",
    "num_steps": "max_steps",
    "steps_per_epoch": _EPOCH,
    "eval_frequency": "eval_steps",
    "checkpoint": "save_steps= and save_total_limit=",
    "logging": "logging_steps",
    "loggers": "callbacks",
    "autorestart": "`dalsegno launch --max-restarts N`",
}
"""Of the Model Zoo's ``Trainer`` and ``TrainingLoop``."""

INSTRUCTLAB = {
    "model_path": "load the model and pass it: Trainer(model, …)",
    "data_path": "train_dataset",
    "process_data": "tokenize the data and pass them: Trainer(train_dataset=…)",
    "chat_tmpl_path": "tokenize the data and pass them: Trainer(train_dataset=…)",
    "ckpt_output_dir": "output_dir",
    "max_seq_len": _LENGTH,
    "max_batch_len": _LOADER,
    "effective_batch_size": "per_device_train_batch_size= · gradient_accumulation_steps= · ranks",
    "save_samples": "save_steps= counts steps, not samples",
    "checkpoint_at_epoch": "save_strategy='epoch'",
    "accelerate_full_state_at_epoch": "each checkpoint has all that a resume needs",
    "keep_last_checkpoint_only": "save_total_limit=1",
    "adamw_weight_decay": "weight_decay",
    "adamw_betas": _BETAS,
    "adamw_eps": "adam_epsilon",
    "random_seed": "seed",
    "distributed_backend": _PARALLEL,
    "fsdp_options": _FSDP,
    "deepspeed_options": _ZERO,
    "lora": _MODEL,
    "use_liger": _KERNELS,
    "logger_type": "callbacks=[TBLogger(), WandbLogger(), MLflowLogger()]",
    "wandb_entity": _TRACKER,
    "mlflow_run_name": _TRACKER,
    "mlflow_tracking_uri": _TRACKER,
    "mlflow_experiment_name": _TRACKER,
    "tensorboard_log_dir": _OUTPUT_DIR,
}
"""Of InstructLab's ``TrainingArgs``."""

_EVENTS = (
    *("on_train_begin", "on_epoch_begin", "on_step_begin", "on_before_forward", "on_after_forward"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_after_optimizer_step"),
    *("on_log", "on_evaluate", "on_save", "on_step_end", "on_epoch_end", "on_train_end"),
)
_FUNCTIONS = {**{event: event for event in _EVENTS}, "on_checkpoint": "on_save", "on_validation_loss": "on_evaluate"}
INSTRUCTLAB_FUNCTIONS = {theirs: f"callbacks=[dalsegno.functions({event}=…)]" for theirs, event in _FUNCTIONS.items()}
"""Of the first proposal of InstructLab's ``TrainingArgs``."""

_OF_ONE_LIBRARY = CEREBRAS | KEMPNERFORGE | FORGATHER | ACCELERATE | INSTRUCTLAB_FUNCTIONS | INSTRUCTLAB
_ANSWERS = {**_OF_ONE_LIBRARY, **LIGHTNING, **HUGGING_FACE, **COMMON}
_ANSWERS |= {answer: answer for answer in _ANSWERS.values() if answer.isidentifier()}


def answers(known: Container[str], elsewhere: str) -> dict[str, str]:
    """What to use instead of an argument that a callable does not take, by that argument's name. ``known``: its own
    arguments; ``elsewhere``: the callable that takes the others."""
    return {
        name: answer if answer in known or not answer.isidentifier() else f"use {elsewhere}({answer}=…)"
        for name, answer in _ANSWERS.items()
    }
