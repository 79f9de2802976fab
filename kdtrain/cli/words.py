"""What a user may have meant by a name that a command does not take: a near spelling, or the word of another tool."""

import difflib
from collections.abc import Collection

from kdtrain.config.values import flag

MOST = 5
"""Mistakes that one message names, and for which a hint is looked for."""
_LONGEST = 60
"""Characters of a word in a message."""
COMMANDS = {
    **dict.fromkeys(("train", "fit", "run", "finetune", "sft", "student", "kd"), "distill"),
    **dict.fromkeys(("cache", "teacher", "logits", "generate-logits", "precompute", "prepare"), "cache-teacher"),
    **dict.fromkeys(("lr", "find-rate", "lr-find", "lr-finder", "tune", "sweep"), "find-lr"),
    **dict.fromkeys(("eval", "test", "score", "measure", "validate", "benchmark"), "evaluate"),
    **dict.fromkeys(("show", "info", "ls", "list", "view", "status", "describe"), "inspect"),
    **dict.fromkeys(("check", "fsck", "validate-cache"), "verify"),
    **dict.fromkeys(("save", "convert", "merge"), "export"),
    **dict.fromkeys(("minitron", "shrink", "compress", "sparsify"), "prune"),
}
"""A word for a command -> the command."""

_NAMES = {
    "lr": "learning_rate learningrate peak_lr max_lr base_lr lr_rate rate",
    "min_lr": "end_lr final_lr lr_min eta_min minimum_lr",
    "lr_schedule": "lr_scheduler lr_scheduler_type scheduler schedule lr_decay_style",
    "warmup_steps": "warmup num_warmup_steps warmup_iters warmup_ratio lr_warmup_steps lr_warmup_fraction"
    " lr_warmup_samples",
    "weight_decay": "wd decay",
    "betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "clip": "max_grad_norm grad_clip gradient_clipping gradient_clip_val clip_grad clip_grad_norm grad_norm",
    "steps": "max_steps num_steps total_steps train_steps training_steps iters max_iters iterations num_iterations"
    " train_iters max_steps_per_epoch",
    "epochs": "num_train_epochs num_epochs epoch max_epochs n_epochs",
    "batch_size": "train_batch_size global_batch_size bs batchsize batch eval_batch_size per_device_eval_batch_size"
    " gbs",
    "micro_batch_size": "per_device_train_batch_size per_device_batch_size micro_batch mbs gradient_accumulation_steps"
    " grad_accum device_batch_size accumulation_steps",
    "student": "model model_name model_name_or_path student_model student_path base_model model_path hidden_size"
    " num_layers num_attention_heads",
    "teacher": "teacher_model teacher_model_name_or_path teacher_path teacher_name export_kd_teacher_load",
    "out": "output output_dir out_dir output_folder save_dir save_to outdir run_dir destination o checkpoint_dir"
    " ckpt_dir save log_dir logging_dir",
    "cache": "cache_dir cached logits logits_dir teacher_cache teacher_logits",
    "config": "config_file cfg conf yaml toml c",
    "data": "dataset dataset_name train_data train_file text corpus data_path data_dir train_files train_data_path",
    "format": "dataset_format data_format dataset_type formatting chat_format",
    "text_column": "text_field dataset_text_field column text_key",
    "messages_column": "chat_column conversations messages_field",
    "seq_len": "max_length max_seq_length max_seq_len block_size context_length sequence_length seq_length cutoff_len"
    " sequence_len ctx_len max_len",
    "num_sequences": "max_samples max_train_samples limit num_examples train_samples n_samples sequences",
    "validation_sequences": "num_validation num_validation_sequences max_eval_samples eval_samples validation_samples"
    " valid_data_path",
    "num_workers": "workers dataloader_num_workers num_proc preprocessing_num_workers dataset_num_proc",
    "alpha": "kd_weight distill_weight kd_ratio lmbda lambda kd_alpha distillation_weight kl_weight kd_coef"
    " lambda_weight distill_alpha",
    "divergence": "kd_loss loss loss_type loss_fn distill_loss kl criterion distance beta",
    "temperature": "temp tau kd_temperature distill_temperature t kd_temp softmax_temp",
    "top_k": "topk k logprobs top_logprobs num_logprobs",
    "num_samples": "samples rounds num_draws rs_kd",
    "precision": "mixed_precision amp autocast torch_dtype dtype quantization quant_mode",
    "dtype": "precision torch_dtype",
    "activation_checkpointing": "gradient_checkpointing grad_checkpointing checkpointing recompute"
    " recompute_activations recompute_granularity",
    "compile": "torch_compile",
    "compile_mode": "torch_compile_mode",
    "deterministic": "full_determinism reproducible",
    "seed": "random_seed data_seed manual_seed",
    "checkpoint_freq": "save_steps save_freq save_interval save_every checkpoint_interval checkpoint_every ckpt_freq"
    " save_strategy",
    "keep_rolling": "save_total_limit keep max_checkpoints keep_last",
    "eval_freq": "eval_steps eval_interval eval_every val_freq validation_freq val_check_interval eval_strategy"
    " evaluation_strategy",
    "eval_batches": "eval_iters limit_val_batches max_eval_batches",
    "log_freq": "logging_steps log_interval log_every log_steps log_every_n_steps print_freq",
    "log_to": "report_to logger loggers",
    "resume": "resume_from_checkpoint resume_from ckpt_path from_checkpoint",
    "load": "init_from load_from load_checkpoint load_from_checkpoint pretrained restore",
    "early_stopping": "early_stop early_stopping_enabled",
    "early_stopping_patience": "patience",
    "early_stopping_min_delta": "min_delta early_stopping_threshold",
    "overwrite": "force overwrite_output_dir f",
    "parallel": "strategy fsdp ddp distributed tp tp_size pp_size cp_size dp_size tensor_parallel"
    " tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size sequence_parallel"
    " tensor_parallel_dim deepspeed local_rank num_gpus",
    "document_mask": "packed packing",
    "lora_rank": "use_peft",
    "lora_targets": "lora_attn_modules",
    "keep_epochs": "save_every_epoch",
    "teacher_parallel": "tp tp_size tensor_parallel tensor_model_parallel_size",
    "checkpoint": "step ckpt",
    "sanity": "sanity_check sanity_checks",
    "dry_run": "dryrun test_run try",
    "path": "run folder dir",
    "run": "path student model folder",
    "hardware": "gpu gpus devices",
    "json": "as_json format",
    "repair": "fix",
}
"""An option -> its names in other trainers and in everyday speech."""
_NAME = {word: name for name, words in reversed(_NAMES.items()) for word in words.split()}
_VALUE = {
    **{word: f"--precision {word}" for word in ("bf16", "fp16", "fp32", "fp8", "mxfp8", "mxfp4")},
    **{"bfloat16": "--precision bf16", "half": "--precision fp16", "float16": "--precision fp16"},
    **{"float32": "--precision fp32", "cpu": "--device cpu", "cuda": "--device cuda", "no_cuda": "--device cpu"},
    **{"gpu": "--device cuda", "use_cpu": "--device cpu", "use_fp8": "--precision fp8"},
    **dict.fromkeys(("wandb", "use_wandb", "wandb_exp_name", "run_name"), "--log-to wandb:PROJECT"),
    **dict.fromkeys(("wandb_project", "wandb_name"), "--log-to wandb:PROJECT"),
    **dict.fromkeys(("tensorboard", "use_tensorboard", "tensorboard_dir"), "--log-to tensorboard"),
    **dict.fromkeys(("y", "assume_yes", "no_input"), "--resume latest"),
    **{"load_in_4bit": "--base-weights nf4", "load_in_8bit": "--base-weights int8"},
    **{"cosine": "--lr-schedule cosine", "wsd": "--lr-schedule wsd", "fsdp": "--parallel fsdp"},
    **{"ddp": "--parallel ddp", "reverse_kl": "--divergence reverse-kl", "jsd": "--divergence jsd"},
    **{"forward_kl": "--divergence forward-kl"},
}
"""A word that is a value of an option here -> the option with it."""


def option_meant(word: str, known: Collection[str]) -> str | None:
    """The flag, perhaps with a value, that `word` (without --) stands for among the options `known`; None: nothing.

    A name of another tool wins over a near spelling: max_steps is not max_skips.
    """
    name = word.strip("-").replace("-", "_").lower()
    negated = name.startswith("no_") and name not in _VALUE
    if name in known:
        return flag(name)
    value = _VALUE.get(name)
    if value is not None and value.split()[0][2:].replace("-", "_") in known:
        return value
    for option, words in _NAMES.items():
        if option in known and name in words.split():
            return flag(option)
    bare = name.removeprefix("no_") if negated else name
    found = difflib.get_close_matches(bare, known, 1, 0.7)
    if not found:  # a name of another tool, misspelt
        found = [_NAME[each] for each in difflib.get_close_matches(bare, _NAME, 1, 0.85) if _NAME[each] in known]
    return (flag(f"no_{found[0]}") if negated else flag(found[0])) if found else None


def word_meant(word: str, known: Collection[str]) -> str | None:
    """The one of `known` that is spelt most like `word`; None where none is."""
    lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), lower, 1)
    return lower[found[0]] if found else None


def short(word: str) -> str:
    """`word` as a message shows it."""
    return word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."
