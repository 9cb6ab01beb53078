"""What other programs call a field, for the line that answers an unknown one."""

HARDWARE = "the accelerate YAML decides it, as"
# Names of Hugging Face's Trainer, of Lightning and of scripts, and what is meant here. A hint that
# is the name of a field counts where the config has that field.
OTHER_NAMES = {
    "lr": "learning_rate",
    "batch_size train_batch_size per_device_train_batch_size per_device_eval_batch_size": (
        "global_batch_size decides the result, micro_batch_size the memory"
    ),
    "gradient_accumulation_steps accumulate_grad_batches": (
        "it follows from global_batch_size and micro_batch_size"
    ),
    "bf16 fp16 fp32 amp precision mixed_precision": f"{HARDWARE} mixed_precision",
    "gpus num_gpus devices num_processes world_size": f"{HARDWARE} num_processes",
    "fsdp deepspeed": f"{HARDWARE} configs/accelerate/fsdp2.yaml",
    "epochs max_epochs num_train_epochs": "num_epochs",
    "steps max_iters": "max_steps",
    "max_length max_seq_length max_seq_len seq_len block_size": "task.context_length",
    "dataset dataset_name train_file data_path": "task.data",
    "dataset_config_name": "task.data_config",
    "validation_file eval_file": "task.validation_data",
    "model model_name pretrained": "task.model_name_or_path",
    "lora lora_r": "task.lora_rank",
    "wandb report_to": "it is tracker here: wandb, trackio, tensorboard or none",
    "run_name": "output_dir",
    "logging_steps log_every_n_steps": "log_every",
    "eval_steps val_check_interval": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "resume_from_checkpoint ckpt_path": "resume",
    "do_eval": "eval_only",
    "warmup": "warmup_steps",
    "warmup_ratio": "it is warmup_steps here, a number of steps",
    "scheduler lr_scheduler lr_scheduler_type": "lr_schedule",
    "optim optimizer": "build_optimizer in train.py is where it is changed",
    "grad_clip clip_grad gradient_clip_val": "max_grad_norm",
    "workers dataloader_num_workers": "num_workers",
    "torch_compile": "compile",
}
MEANT = {name: hint for names, hint in OTHER_NAMES.items() for name in names.split()}


def hint_of(name: str, fields: dict) -> str:
    """What is meant by a name of another program; empty: nothing is known of it."""
    hint = MEANT.get(name, "")
    if " " in hint:
        return hint
    return f"it is {hint} here" if hint in fields else ""
