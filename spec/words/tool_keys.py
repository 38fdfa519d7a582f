"""Keys of other tools."""

from __future__ import annotations

from recipec.spec.words.apart import apart, named

_TEMPLATE = "the tokenizer's own template is taken; `data: {chat_template: template.jinja}` names another"
_ROLLOUT = "the chips that train generate the completions too: `rollout: {engine: mesh}`"
_BATCHES = (
    "global_batch_size holds the micro-batches of a step: `train: {global_batch_size: 8, "
    "micro_batch_size: 1}`"
)
_BEST = (
    "`checkpoint: {keep_best: true}` keeps the checkpoint of the best evaluation, which merge.py "
    "--step best merges; `train: {early_stopping: {patience: 3}}` ends a run without progress"
)
_FINDER = (
    "no learning rate is looked for: give `train: {optimizer: {learning_rate: 1.0e-4}}`; `recipe sweep` "
    "trains with several, and compares the runs"
)
_LOADERS = "remove it: samples are read, tokenized and packed when train.py starts, and cached"
_MEMORY = "remove it: the mesh splits the weights, `mesh: {accelerator: v6e-8, axes: {fsdp: 8}}`"
_REMAT = "remove it: layers are recomputed by default; `remat: {policy: none}` stores every activation"
_DTYPE = "`model: {dtype: bfloat16}`, which is the default"
_ONCE_A_STEP = "intervals are steps: `train: {eval_every: 100}`, `checkpoint: {every_steps: 100}`"

KEYS: dict[str, str] = {
    **named(
        {
            "model.id": "base_model model_name_or_path model_name pretrained_model_name_or_path "
            "hf_model_id checkpoint_dir model_path model_id",
            "model.revision": "model_revision revision_of_model hf_revision",
            "model.dtype": "torch_dtype weight_dtype model_dtype precision compute_dtype",
            "model.tokenizer": "tokenizer_path tokenizer_name tokenizer_config tokenizer_name_or_path",
            "model.quantization": "lora.quantize lora.quantization quantize",
            "model.quantized_matmul": "lora.products lora.quantized_matmul",
            "model.attention": "attn_implementation flash_attn attention_type attention_kernel attn",
            "lora.rank": "r lora_r lora_rank adapter_rank peft_lora_r",
            "lora.alpha": "lora_alpha peft_lora_alpha",
            "lora.dropout": "lora_dropout peft_lora_dropout",
            "lora.targets": "target_modules lora_target_modules lora_target lora_attn_modules "
            "lora_module_path",
            "lora.layers": "layers_to_transform lora_layers_to_transform num_layers_to_tune",
            "lora.rslora": "use_rslora peft_use_rslora lora_use_rslora",
            "lora.kind": "use_dora peft_use_dora lora_use_dora dora",
            "lora.loraplus_lr_ratio": "plus_ratio lora_plus_lr_ratio lorap_lr_ratio",
            "lora.modules_to_save": "train_also lora_modules_to_save additional_target",
            "lora.trainable_tokens": "train_tokens trainable_token_indices peft_trainable_token_indices",
            "lora.start_from": "lora_model_dir adapter_name_or_path adapter_checkpoint",
            "lora.init": "init_lora_weights peft_init_lora_weights",
            "data.train": "datasets dataset train_dataset train_file train_data dataset_path "
            "dataset_name "
            "train_files hf_path hf_train_files",
            "data.eval": "eval_dataset test_datasets eval_file validation_file val_dataset dataset_val "
            "eval_data validation_data val_data hf_eval_files",
            "data.eval_fraction": "val_set_size val_size test_size validation_split eval_split "
            "eval_ratio "
            "val_split val_split_fraction validation_fraction",
            "data.max_length": "max_seq_length sequence_len cutoff_len max_seq_len model_max_length "
            "block_size max_target_length seq_len seq_length sequence_length context_length",
            "data.packing": "sample_packing packed pack_sequences pack_dataset",
            "data.shuffle_seed": "data_seed data_shuffle_seed",
            "data.fields": "column_mapping rename_columns",
            "train.trainable_modules": "train.only freeze_trainable_modules",
            "train.generations": "train.samples",
            "evaluate.num_generations": "evaluate.samples",
            "train.objective": "stage rl trainer_type",
            "train.grpo.num_generations": "num_generations",
            "train.grpo.iterations": "num_iterations train.grpo.num_iterations",
            "train.grpo.loss": "train.grpo.loss_type",
            "train.grpo.mask_truncated": "mask_truncated_completions train.grpo.mask_truncated_completions",
            "train.grpo.kl_bias_correction": "use_bias_correction_kl train.grpo.use_bias_correction_kl",
            "rewards": "reward_funcs reward_functions",
            "train.loss_type": "pref_loss dpo_loss_type",
            "train.eaft_top_k": "eaft_k",
            "train.beta": "rl_beta pref_beta dpo_beta orpo_alpha orpo_beta",
            "train.desirable_weight": "kto_desirable_weight kto_chosen_weight chosen_weight",
            "train.undesirable_weight": "kto_undesirable_weight kto_rejected_weight rejected_weight",
            "train.router_aux_loss_coef": "moe_aux_loss_coef moe_aux_loss_coeff aux_loss_coef aux_loss_alpha "
            "router_aux_loss_coefficient load_balancing_loss_coef load_balance_loss_weight",
            "train.neftune_noise_alpha": "noise_alpha noisy_embedding_alpha neft_alpha neftune_alpha",
            "train.qat": "quantization_aware_training fake_quant fake_quantization quantizer qat_config",
            "train.qat.start_step": "fake_quant_after_n_steps",
            "train.label_smoothing": "label_smoothing_factor",
            "train.z_loss": "z_loss_multiplier z_loss_weight z_loss_coef",
            "train.steps": "max_steps total_steps num_train_steps train_steps max_steps_per_epoch num_steps",
            "train.epochs": "num_train_epochs num_epochs n_epochs max_epochs epoch",
            "train.global_batch_size": "batch_size total_batch_size train_batch_size effective_batch_size",
            "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size "
            "train_micro_batch_size_per_gpu",
            "train.optimizer.name": "optim opt_type optimizer_name optimizer_type",
            "train.optimizer.learning_rate": "lr max_lr peak_lr peak_learning_rate",
            "train.optimizer.b1": "adam_beta1 beta1 adam_b1",
            "train.optimizer.b2": "adam_beta2 beta2 adam_b2",
            "train.optimizer.eps": "adam_epsilon epsilon adam_eps",
            "train.optimizer.weight_decay": "wd adam_weight_decay decay",
            "train.optimizer.max_grad_norm": "grad_clip max_norm clip_grad clip_grad_norm "
            "gradient_clipping "
            "gradient_clip gradient_clip_val gradient_clipping_threshold",
            "train.schedule.name": "lr_scheduler_type lr_scheduler lr_schedule scheduler lr_decay_style",
            "train.schedule.warmup_steps": "num_warmup_steps lr_warmup_steps warmup_iters",
            "train.schedule.warmup_ratio": "warmup_steps_fraction warmup_fraction lr_warmup_ratio warmup",
            "train.schedule.min_lr_ratio": "cosine_learning_rate_final_fraction final_ratio min_lr_rate "
            "cosine_min_lr_ratio",
            "train.eval_every": "eval_steps eval_interval eval_freq evaluation_steps val_check_interval "
            "run_val_every_n_steps eval_every_n_steps",
            "train.seed": "random_seed global_seed init_weights_seed",
            "train.log.every": "logging_steps log_every_n_steps log_interval log_period log_every log_steps",
            "train.log.wandb_project": "wandb_project_name",
            "train.log.mlflow_experiment": "mlflow_experiment_name",
            "checkpoint.every_steps": "save_steps checkpoint_period save_interval checkpoint_every "
            "save_every "
            "save_every_n_steps checkpointing_steps",
            "checkpoint.keep": "save_total_limit max_to_keep keep_last_n_checkpoints max_checkpoints",
            "cache.directory": "dataset_prepared_path cache_dir jax_cache_dir tokenized_path",
            "remat.policy": "remat_policy",
            "merge.output": "export_dir merged_output_dir",
            "serve.tensor_parallel_size": "serve.tp serve.tensor_parallel",
            "serve.max_model_len": "max_model_length vllm_max_model_len",
            "serve.prefix_caching": "enable_prefix_caching",
            "serve.quantization": "vllm_quantization",
            "mesh.accelerator": "tpu tpu_type accelerator_type",
            "mesh.axes.fsdp": "mesh.fsdp ici_fsdp_parallelism fsdp_size data_parallel_shard_dim mesh.dp "
            "mesh.axes.data mesh.axes.dp",
            "mesh.axes.tp": "mesh.tp ici_tensor_parallelism tensor_parallel_dim tp_size mesh.axes.model "
            "mesh.axes.mp mesh.axes.tensor mesh.tensor_parallel_size",
            "mesh.axes.dcn": "mesh.dcn slices num_slices dcn_data_parallelism mesh.axes.slices",
            "mesh.axes.ep": "mesh.ep ici_expert_parallelism expert_parallel_size mesh.axes.expert "
            "expert_model_parallel_size",
            "name": "run_name experiment_name wandb_run_name output_name wandb_name",
            "cost": "price prices",
            "budget.max_usd": "budget.max_dollars budget.max_cost budget.max_price max_cost",
            "budget.max_hours": "budget.max_time max_train_hours",
            "launch.spot": "preemptible",
            "launch.zone": "gcp_zone tpu_zone",
            "launch.project": "gcp_project project_id",
            "evaluate.tasks": "eval_tasks lm_eval_tasks",
        }
    ),
    **apart(
        {
            # Adapters and quantization.
            "adapter finetuning_type use_peft use_lora peft peft_method finetune_type "
            "enable_lora": "adapters are the section `lora: {rank: 16}`; without it all weights are trained",
            "peft_config lora_config lora_params adapter_config": "`lora: {rank: 16, alpha: 32}`",
            "lora_target_linear apply_lora_to_mlp lora_query lora_key lora_value lora_projection lora_mlp": (
                "remove it: every projection of attention and MLP has an adapter unless `lora: {targets: "
                "[q_proj, v_proj]}` names fewer"
            ),
            "lora.apply_lora_to_output apply_lora_to_output lora_head": "`lora: {modules_to_save: "
            "[lm_head]}` trains the head whole",
            "loraplus_lr_embedding use_galore use_badam use_apollo vera ia3": "it is "
            "not in this version; `lora: {rslora: true}` scales by the square root of the rank",
            "pissa_init": "`lora: {init: pissa}`",
            "loftq_config": "`lora: {init: loftq}`, with `model: {quantization: nf4}`",
            "bias lora_bias fan_in_fan_out lora_fan_in_fan_out task_type inference_mode layers_pattern "
            "lora_modules peft_type": "remove it: an adapter has no bias and is that of a language model",
            "load_in_4bit use_4bit qlora quantize_base bnb_4bit_quant_type bnb_4bit_compute_dtype "
            "bnb_4bit_use_double_quant bnb_config quantization_config quantization_bit "
            "quantization_method": (
                "`model: {quantization: nf4}` or `model: {quantization: int8}` quantizes the frozen base "
                "weights"
            ),
            "load_in_8bit use_8bit": "`model: {quantization: int8}`",
            # Numbers.
            "bf16 fp16 tf32 amp pure_bf16 bfloat16 mixed_precision bf16_full_eval half_precision "
            "float16 enable_mixed_precision": _DTYPE,
            "fp8 fp8_config": "`model: {quantization: int8, quantized_matmul: both}`, on TPU7x fp8, "
            "multiplies by the frozen weights in 8 bits",
            # Memory and devices.
            "gradient_checkpointing gradient_checkpointing_kwargs enable_activation_checkpointing "
            "activation_checkpointing use_gradient_checkpointing recompute use_unsloth_gc "
            "unsloth_gradient_checkpointing": _REMAT,
            "enable_activation_offloading activation_offloading cpu_offload offload": "`remat: {policy: "
            "offload_dots}` keeps activations in the host's memory",
            "deepspeed fsdp fsdp_config fsdp_version ddp ddp_backend ddp_timeout device_map "
            "ddp_find_unused_parameters local_rank num_gpus n_gpus gpus devices device world_size "
            "parallelism_config tensor_parallel low_cpu_mem_usage zero_stage num_processes": _MEMORY,
            "mesh.axes.sp mesh.axes.sequence mesh.axes.context context_parallel_size "
            "sequence_parallel_degree ici_sequence_parallelism ici_context_parallelism": "`mesh: "
            "{accelerator: v6e-8, axes: {cp: 8}}` splits the tokens of each row, and the weights, over "
            "devices",
            "mesh.axes.pp mesh.axes.pipeline pipeline_parallel_size ici_pipeline_parallelism": "it is not in "
            "this version: the axes are fsdp, tp, cp for tokens, ep for experts and, over slices, dcn, as in "
            "`mesh: {accelerator: v6e-8, axes: {fsdp: 8}}`",
            "num_nodes nnodes num_machines": "a slice has its hosts: `mesh: {accelerator: v5p-16, axes: "
            "{fsdp: 8}}`",
            "gradient_accumulation_steps grad_accum_steps gradient_accumulation accumulate_grad_batches "
            "grad_accumulation_steps": _BATCHES,
            "per_device_eval_batch_size eval_batch_size": "remove it: an evaluation's rows are those of "
            "a "
            "micro-batch, `train: {micro_batch_size: 1}`",
            "torch_compile compile jit use_unsloth use_unsloth_lm_head use_liger_kernel liger_kernel "
            "enable_liger_kernel liger_rope fused_ops unsloth_lora_mlp cut_cross_entropy "
            "optimize_model": (
                "remove it: the whole step is compiled, and the loss computed in chunks of the vocabulary"
            ),
            "flash_attention sdp_attention xformers_attention eager_attention flex_attention "
            "use_flash_attention use_flash_attention_2 flash_attention_2": "`model: {attention: "
            "splash}`, the "
            "TPU's fused kernel",
            "rope_scaling rope_theta overrides_of_model_config model_type architecture "
            "is_llama_derived_model "
            "trust_remote_code tokenizer_type base_model_config model_kwargs "
            "use_cache": "remove it: the checkpoint's own config.json says it",
            # Data.
            "data.type data.train.type data.eval.type data.template_type dataset_type data_format "
            "dataset_format data.formatting data.train.formatting": "`data: {format: chat}`, or "
            "instruction, "
            "prompt_completion, text, preference or unpaired_preference, for all sources",
            "split dataset_split train_split data.subset data.split": "of a source: `data: {train: "
            "[{path: "
            '"hf://OWNER/NAME", split: "train[:10%]"}]}`',
            "data.train.name data.train.subset data.eval.name data.eval.subset data.train.dataset_config "
            "dataset_config dataset_config_name": "of a source: `data: {train: [{path: 'hf://OWNER/NAME', "
            "config: default}]}`",
            "data.train.file_name data.train.hf_hub_url data.train.data_files data.train.source "
            "data.train.file "
            "data.eval.file_name data.eval.data_files data.eval.file data_files dataset_dir data_dir "
            "media_dir": "`data: {train: [data/train.jsonl]}`; train.py's --data-dir names "
            "another folder of the files",
            "max_samples data.train.num_samples data.train.max_samples data.eval.num_samples num_samples "
            "data.train.shards data.limit max_train_samples": "of a source: `data: {train: [{path: "
            "data/train.jsonl, limit: 1000}]}`",
            "interleave_probs mix_strategy dataset_weights probabilities data.weights "
            "data.train.probability": "of a source: `data: {train: [{path: data/train.jsonl, weight: 2.0}]}`",
            "dataset_text_field text_field text_column data.train.field data.text_column "
            "dataset_text_column "
            "train_data_columns field_messages field_instruction message_property_mappings data.columns "
            "data.train.columns": "`data: {format: text, fields: {text: content}}` renames columns",
            "train_on_inputs train_on_prompt train_on_input train_on_source": (
                "`data: {loss_on: all}` learns the prompts too; by default only the answers are learned"
            ),
            "mask_prompt mask_inputs completion_only_loss assistant_only_loss train_on_responses_only "
            "response_template instruction_template roles_to_train train_on_eos ignore_index "
            "data.train.roles_to_train loss_mask train_on_completions_only use_sft_loss_mask "
            "sft_train_on_"
            "completion_only": "remove it: only the answers carry loss unless `data: {loss_on: all}` "
            "says "
            "otherwise",
            "mask_history train_on_last_turn": "`data: {loss_on: last_assistant}`",
            "streaming iterable_dataset data.train.streaming": "`data: {stream_window: 10000}` reads so many "
            "samples at a time during the run, which needs train.steps",
            "shuffle shuffle_merged_datasets shuffle_before_merging_datasets enable_data_shuffling "
            "shuffle_train_dataset": "samples are shuffled; `data: {shuffle_seed: null}` keeps their order",
            "truncation excess_length_strategy truncate truncation_side max_length_policy": "`data: "
            "{overlong: "
            "truncate}`, or drop, or error",
            "pad_to_sequence_len padding pad_to_max_length data_collator dataset_num_proc "
            "dataset_processes "
            "preprocessing_num_workers dataloader_num_workers dataloader_pin_memory num_workers "
            "group_by_length "
            "remove_unused_columns overwrite_cache dataset_kwargs dataloader_prefetch_factor "
            "dataset_batch_size "
            "grain_worker_count eval_sample_packing eval_packing packing_strategy multipack_real_batches "
            "sample_packing_eff_est dataset_keep_in_memory dataloader_drop_last data_impl": _LOADERS,
            "template chat_template_jinja prompt_template prompt_style conversation_template "
            "default_system "
            "chat_template_path": _TEMPLATE,
            "special_tokens tokens added_tokens new_special_tokens "
            "add_tokens": '`model: {id: Qwen/Qwen3-8B, add_tokens: {"<note>": null}}`',
            "resize_token_embeddings_to_32x resize_vocab pad_vocab_to pad_to_multiple_of "
            "new_vocab_size": "`model: {id: Qwen/Qwen3-8B, vocab_size: 152000}` adds rows",
            # The run.
            "warmup_epochs": "`train: {schedule: {warmup_ratio: 0.03}}`",
            "betas adam_betas": "`train: {optimizer: {b1: 0.9, b2: 0.999}}`",
            "min_lr min_learning_rate end_lr lr_end": "`train: {schedule: {min_lr_ratio: 0.1}}`, the last "
            "learning rate as a share of the peak",
            "lr_scheduler_kwargs scheduler_kwargs cosine_constant_lr_ratio num_cycles lr_groups "
            "optim_args "
            "embedding_lr embedding_lr_scale layerwise_lr_decay optim_target_modules": "it is not in "
            "this "
            "version: `train: {schedule: {name: cosine, warmup_ratio: 0.03}}`",
            "evaluation_strategy eval_strategy save_strategy logging_strategy evals_per_epoch "
            "saves_per_epoch do_eval do_train eval_on_start logging_first_step "
            "eval_at_start": _ONCE_A_STEP,
            "save_best load_best_model_at_end metric_for_best_model greater_is_better "
            "early_stopping_patience early_stopping_threshold save_best_only": _BEST,
            "lr_find lr_finder auto_lr_find find_lr learning_rate_finder auto_lr find_learning_rate": _FINDER,
            "use_mlflow mlflow_tracking_uri": "`train: {log: {mlflow_experiment: my-experiment}}`, at the "
            "MLFLOW_TRACKING_URI of the run's environment",
            "output_dir base_output_directory out_dir output_path logging_dir overwrite_output_dir": (
                "`checkpoint: {directory: checkpoints}`, below the folder that train.py is given by --output"
            ),
            "resume resume_from_checkpoint auto_resume_from_checkpoints load_parameters_path "
            "load_full_state_path resume_from ckpt_path": "remove "
            "it: "
            "train.py --resume continues from the newest checkpoint, and `lora: {start_from: FOLDER}` "
            "starts from a PEFT adapter",
            "report_to use_wandb wandb logger metric_logger wandb_entity wandb_mode wandb_log_model "
            "use_swanlab comet_project_name": "`train: {log: {wandb_project: "
            "my-project}}`; TensorBoard is the default",
            "use_tensorboard tensorboard_dir": "`train: {log: {tensorboard: true}}`, which is the default",
            "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo export_hub_model_id "
            "push_to_hub_model_id": "`recipe push FOLDER OWNER/NAME` uploads what merge.py wrote",
            "save_safetensors save_only_model save_first_step save_on_each_node export_legacy_format "
            "export_device save_merged_16bit": "remove it: merge.py writes safetensors, as `merge: "
            "{dtype: "
            "bfloat16}` says",
            "export_size max_file_size": "`merge: {max_shard_size: 5GB}`",
            "label_pad_token_id average_tokens_across_devices num_items_in_batch": "remove it: `train: "
            "{loss_normalization: tokens}` is the mean over all target tokens of a step",
            "plugins integrations callbacks hooks profiler profiler_steps_per_profile": "plug-ins are "
            "not in "
            "this version: remove it",
            "reference_free": "without a reference learns `train: {objective: cpo}`, as SimPO with "
            "`train: {objective: cpo, loss_type: simpo, cpo_alpha: 0.0}`",
            "use_dft_loss enable_dft_loss": "`train: {loss_type: dft}`",
            "use_eaft_loss use_eaft": "`train: {loss_type: eaft}`",
            "use_asft_loss": "`train: {loss_type: asft}`",
            "use_muon": "`train: {optimizer: {name: muon}}`",
            "ref_model reference_model ref_adapter_name pref_ftx": "dpo compares with "
            "the model "
            "without its adapters: `train: {objective: dpo, beta: 0.1}`",
            "max_prompt_length max_completion_length max_new_tokens": "`data: {max_length: 3072}` holds "
            "prompt and answer together; with objective grpo, `train: {grpo: {max_completion_length: 512}}`",
            "reward_model": "a reward is a function or a ready one: `rewards: [{function: "
            "rewards.py:correct}]`",
            "reward_weights": "each reward has its weight: `rewards: [{function: rewards.py:correct, "
            "weight: 0.5}]`",
            "vllm_mode use_vllm": _ROLLOUT,
            "quantization": "`model: {quantization: nf4}` quantizes the base while training, `merge: "
            "{quantization: fp8}` what merge.py writes",
            "gpu_memory_utilization serve.dtype serve.swap_space serve.enforce_eager "
            "serve.trust_remote_code "
            "serve.enable_chunked_prefill serve.served_model_name serve.seed serve.max_logprobs "
            "serve.args serve.flags serve.vllm_args": "further flags of `vllm serve` are written as "
            "`serve: {extra_args: {gpu-memory-utilization: 0.9}}`",
        }
    ),
}
"""Keys of other tools, "SECTION.KEY" where one means its own in a section: to a path here, or to a help.

Of Axolotl, LLaMA-Factory, TRL, PEFT, transformers, torchtune, litgpt, MaxText, Unsloth and vLLM."""
