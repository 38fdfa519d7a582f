"""Axolotl's keys that a table says enough of."""

from __future__ import annotations

from compiler.port.meaning import results

IRRELEVANT = {
    "wandb_project says whether the run is logged there": "use_wandb",
    "tokens a second are logged in any case": "include_tokens_per_second include_tkps",
    "the hub's token is the environment's": "hf_use_auth_token",
    "the merged model has both": "save_safetensors tokenizer_save_jinja_files",
    "how rows are prepared and loaded, not which": """dataset_prepared_path num_dataset_shards_to_save
        dataset_processes dataset_num_proc dataset_keep_in_memory dataloader_pin_memory
        dataloader_num_workers dataloader_prefetch_factor remove_unused_columns
        sample_packing_mp_start_method is_preprocess preprocess_iterable total_num_tokens
        total_supervised_tokens sample_packing_eff_est accelerator_config skip_prepare_dataset""",
    "a demonstration or a report beside the training": """gradio_title gradio_share gradio_server_name
        gradio_server_port gradio_max_new_tokens gradio_temperature generate_samples
        num_generation_samples generation_max_new_tokens generation_temperature generation_top_p
        generation_top_k generation_prompt_ratio generation_do_sample do_causal_lm_eval
        eval_causal_lm_metrics do_bench_eval bench_dataset bench_split lm_eval_tasks
        lm_eval_batch_size lm_eval_post_train lm_eval_model eval_table_size eval_max_new_tokens""",
    "how the GPU's memory and its processes are managed": """device device_map local_rank ddp ddp_timeout
        ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters gc_steps gc_collect_steps
        torch_empty_cache_steps max_memory gpu_memory_limit low_cpu_mem_usage lora_on_cpu
        qlora_sharded_model_loading experimental_skip_move_to_device ple_cpu_offload ray_run_name
        resources_per_worker use_ray relora_cpu_offload""",
    "the same arithmetic in fused or compiled kernels; XLA compiles the whole step": """torch_compile
        torch_compile_backend torch_compile_mode torch_compile_options deepcompile use_kernels
        lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel liger_rope
        liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_swiglu liger_glu_activation
        liger_cross_entropy liger_fused_linear_cross_entropy liger_kernel_impl cut_cross_entropy
        chunked_cross_entropy chunked_cross_entropy_num_chunks flash_attn_cross_entropy
        flash_attn_fuse_mlp flash_optimum fused_attn_kernel large_head_attention flash_attn_d512
        sdpa_varlen gemma4_hybrid_attn_impl experts_implementation tiled_mlp tiled_mlp_num_shards
        tiled_mlp_use_original_mlp flex_attn_compile_kwargs pretrain_multipack_attn
        dpo_use_liger_kernel dpo_padding_free expert_backend moe_grouped_backend
        moe_dequant_chunk_size moe_bnb_fast use_scattermoe use_sonicmoe llama4_linearized_experts""",
    "a memory saving of the GPU; remat.policy is what there is here": """gradient_checkpointing_kwargs
        activation_offloading layer_offloading selective_checkpointing auto_find_batch_size""",
    "rows are padded with tokens that are neither trained on nor attended to": """pad_to_sequence_len
        pad_to_multiple_of batch_flattening multipack_real_batches""",
    "what Axolotl finds out about the model by itself": """is_falcon_derived_model is_llama_derived_model
        is_mistral_derived_model is_qwen_derived_model axolotl_config_path strict tokenizer_use_fast
        tokenizer_legacy tokenizer_type base_model_config type_of_model model_type trust_remote_code
        lora_fan_in_fan_out embeddings_skip_upcast""",
    "a run is begun anew here; --resume goes on with its own checkpoints": """resume_from_checkpoint
        auto_resume_from_checkpoints""",
    "the same weights, merged by merge.py": "merge_lora merge_method",
    "the run is watched by people: a loss that explodes is not stopped here": """loss_watchdog_threshold
        loss_watchdog_patience""",
    "checkpoints come at fixed steps here; what is trained is the same": """save_first_step save_only_model
        dynamic_checkpoint""",
    "the server is vLLM-TPU's, and is described by the recipe's serve section": "vllm",
}

LEARNT = {
    "lora_target_parameters": (
        "adapters of fused experts are not trained here: those parameters stay as they are"
    ),
    "lora_modules_to_save": "whole modules beside the adapters are not trained here: they stay the base's",
    "peft_use_dora": "plain LoRA in its place: no trained magnitudes, so the updates are others",
    "peft_layer_replication": "layers are not repeated here: the model keeps its depth",
    "peft_trainable_token_indices": "rows of the embedding are not trained here: those tokens keep theirs",
    "loraplus_lr_ratio": "A and B share one learning rate here; LoRA+ gives B a higher one",
    "lora_model_dir": "training starts from new adapters; merge.py --import-adapter and --resume go on",
    "relora": "adapters are not merged and begun anew during the run",
    "lisa_n_layers": "all layers are trained throughout, not a few drawn ones",
    "unfrozen_parameters": "parameters cannot be chosen by name here: without lora everything is trained",
    "use_onebitllms": "weights of one bit are not trained here",
    "neftune_noise_alpha": "no noise is added to the embeddings while training: less regularisation",
    "noisy_embedding_alpha": "no noise is added to the embeddings while training: less regularisation",
    "use_eaft": "the loss is plain cross-entropy, not weighted by entropy",
    "embedding_lr": "one learning rate for all parameters here",
    "embedding_lr_scale": "one learning rate for all parameters here",
    "lr_groups": "one learning rate for all parameters here",
    "jagged_restart_steps": "the schedule is not restarted here",
    "optim_target_modules": "the optimizer treats all parameters alike here",
    "grokfast_alpha": "slow gradients are not amplified here",
    "spectrum_top_fraction": "all layers are trained, not those of the highest signal-to-noise ratio",
    "dense_mixer": "experts' gradients come from the chosen experts alone",
    "liger_use_token_scaling": "each token's loss counts alike here",
    "scaling_softmax": "attention is not scaled by the length of the context here",
    "use_pose": "positions are not skipped to lengthen the context here",
    "fix_untrained_tokens": "untrained embeddings keep their values here",
    "tokens": "no tokens are added to the tokenizer here: they are written in several tokens each",
    "added_tokens_overrides": "the tokenizer's tokens are not renamed here",
    "reinit_weights": "training starts from the checkpoint's weights here, not from random ones",
    "overrides_of_model_config": "config.json is taken as it is",
    "model_config": "config.json is taken as it is",
    "rope_scaling": "config.json is taken as it is, with its own rotary embedding",
    "trainer_cls": "the trainer is the runtime's here: what another class does is not done",
    "qat": "weights are not rounded while training here",
    "llmcompressor": "weights are neither pruned nor quantised while training here",
    "nvfp4_merge_aware": "weights in nvfp4 are not trained here",
    "nvfp4_merge_aware_start_step": "weights in nvfp4 are not trained here",
    "grokfast_lamb": "slow gradients are not amplified here",
    "spectrum_model_name": "all layers are trained, not those of the highest signal-to-noise ratio",
    "mora": "plain LoRA in its place: MoRA's square matrices are others",
    "diffusion": "the loss is the next token's, not a diffusion's",
}
"""Keys that change what is learnt, and what is without them: an error where they are on."""

FEATURES = {
    "peft_ensure_weight_tying": "embeddings carry no adapters here, so nothing is to be tied",
    "gptq": "GPTQ weights cannot be read here: the unquantised base's are taken",
    "quantize_moe_experts": "experts stay in model.dtype here: more precise, with more memory",
    "lr_quadratic_warmup": "the warm-up is linear here",
    "cosine_constant_lr_ratio": "the cosine reaches the run's end here, without a constant stretch",
    "lr_div_factor": "the warm-up starts from zero here",
    "fp32_norms": "norms are computed in model.dtype here, as they are stored",
    "group_by_length": "rows are not grouped by length: other rows share a batch",
    "sample_packing_sequentially": "packing chooses among many samples here, not only the next ones",
    "shuffle_before_merging_datasets": "all sources are shuffled together here",
    "dataset_exact_deduplication": "rows that stand twice are trained on twice here",
    "dataset_shard_num": "the whole data set is taken here, not one shard of it",
    "streaming": "the data set is read as a whole here",
    "resize_token_embeddings_to_32x": "the embedding keeps its size here",
    "mean_resizing_embeddings": "the embedding keeps its size here",
    "shrink_embeddings": "the embedding keeps its size here",
    "overrides_of_model_kwargs": "config.json is taken as it is",
    "model_kwargs": "config.json is taken as it is",
    "tokenizer_use_mistral_common": "the tokenizer is Hugging Face's here",
    "model_quantization_config": "the base is read as it is published, and quantised by lora.quantize alone",
    "expert_parallel_size": "experts are split over the mesh by the runtime's rules",
    "early_stopping_patience": "the run goes on to its last step here",
    "load_best_model_at_end": "the last step's weights are kept here",
    "cls_model_config": "the model is a language model here",
    "quantization": "quantised after the training by merge.quantization, not trained with",
    "max_packed_sequence_len": "Axolotl refuses this key; sample_packing with sequence_len is what it has",
    "dpo_use_logits_to_keep": "Axolotl refuses this key",
    "dpo_generate_during_eval": "Axolotl refuses this key",
    "dpo_norm_loss": "Axolotl refuses this key",
    "rpo_alpha": "Axolotl refuses this key: the loss of the chosen answer is not added",
    "s2_attention": "Axolotl refuses this key: attention is over the whole row",
    "flash_attn_rms_norm": "Axolotl refuses this key",
    "metric_for_best_model": "the last step's weights are kept here, whichever were best",
    "greater_is_better": "the last step's weights are kept here, whichever were best",
    "eval_sequence_len": "evaluation has rows of data.max_length here",
    "min_sample_len": "short samples are kept here, as long as a token of them is a target",
    "max_prompt_len": "a preference is cut as a whole here",
    "chat_template_kwargs": "the template is given no variables of the recipe's own",
    "default_system_message": "a conversation without a system message keeps none",
    "use_dsv4_kernels": "kernels of another model",
    "use_glm_dsa_kernels": "kernels of another model",
    "nonexpert_quantization": "lora.quantize says how weights outside the experts are stored here",
    "gemma4_fp8_nonexpert": "lora.quantize says how weights outside the experts are stored here",
    "gemma4_nf4_nonexpert": "lora.quantize says how weights outside the experts are stored here",
    "dsv4_fp8_nonexpert_mode": "kernels of another model",
    "dsv4_fp8_lora_kernel": "kernels of another model",
    "dsv4_shared_mlp_lora_kernel": "kernels of another model",
    "dsv4_bf16_all": "kernels of another model",
    "dsv4_fp4_grouped_mode": "kernels of another model",
    "fp8_enable_fsdp_float8_all_gather": "weights are gathered in model.dtype here",
    "sample_packing_group_size": "packing has groups of its own here: other samples share a row",
    "sample_packing_bin_size": "packing has groups of its own here: other samples share a row",
    "world_size": "the number of GPUs is given by --devices",
    "peft_autocast_adapter_dtype": "adapters are float32 here (lora.dtype)",
    "torchdistx_path": "AnyPrecision's optimizer is not used here",
}
"""Keys without a counterpart that leave what is learnt as it is, and what they change."""

SETTINGS = {
    "relora": "relora_prune_ratio relora_prune_method",
    "lisa_n_layers": "lisa_step_interval lisa_layers_attribute",
    "jagged_restart_steps": "jagged_restart_warmup_steps jagged_restart_anneal_steps",
    "loraplus_lr_ratio": "loraplus_lr_embedding",
    "use_eaft": "eaft_alpha eaft_k",
    "use_pose": "pose_split_on_token_ids pose_max_context_len pose_num_chunks",
    "scaling_softmax": "scaling_softmax_factor scaling_softmax_bias",
    "streaming": "streaming_multipack_buffer_size",
    "pretraining_dataset": "pretrain_multipack_buffer_size pretraining_sample_concatenation",
    "dataset_shard_num": "dataset_shard_idx",
    "model_quantization_config": "model_quantization_config_kwargs",
    "fp32_norms": "fp32_norm_classes",
    "expert_parallel_size": """expert_parallel_backend expert_parallel_num_nvl_bytes
        expert_parallel_num_rdma_bytes expert_parallel_token_capacity
        expert_parallel_fallback_on_unsupported""",
    "context_parallel_size": "heads_k_stride ring_attn_func",
    "kd_trainer": """kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_server_base_url
        kd_online_topk kd_online_server kd_online_timeout kd_temperature_min""",
    "nemo_gym_enabled": """nemo_gym_dir nemo_gym_auto_clone nemo_gym_config_paths nemo_gym_head_port
        nemo_gym_server_timeout nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_datasets
        nemo_gym_auto_start nemo_gym_model_name nemo_gym_multi_turn nemo_gym_max_turns""",
    "optimizer": """adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of
        qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant
        qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj
        qgalore_queue_size""",
    "rl": """simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight center_rewards_coefficient
        num_labels ebft dpo_loss_weights""",
}

LOST = {
    "the environment of the run says it: WANDB_ENTITY, WANDB_NAME, WANDB_MODE, WANDB_RUN_ID": """wandb_name
        wandb_run_id wandb_mode wandb_entity""",
    "metrics alone go to Weights & Biases": "wandb_watch wandb_log_model",
    f"nothing is logged there: {results.LOGS}": """use_mlflow mlflow_tracking_uri
        mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_comet comet_api_key
        comet_workspace comet_project_name comet_experiment_key comet_mode comet_online
        comet_experiment_config use_trackio trackio_project_name trackio_run_name trackio_space_id
        use_otel_metrics otel_metrics_host otel_metrics_port use_swanlab swanlab_project
        swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_api_key
        swanlab_log_model swanlab_web_host swanlab_api_host swanlab_lark_webhook_url
        swanlab_lark_secret swanlab_log_completions swanlab_completion_log_interval
        swanlab_completion_max_buffer""",
    "steps are not profiled here": "profiler_steps profiler_steps_start",
    results.UPLOAD: "hub_model_id hub_strategy hub_revision push_dataset_to_hub",
}
"""Keys that change no number of the run, and whose results there are not here, by why."""

REFUSED = {
    "reward_model": "a reward model is trained for another stage",
    "process_reward_model": "a reward model is trained for another stage",
    "kd_trainer": "distillation needs a teacher's logits",
    "nemo_gym_enabled": "reinforcement learning with environments needs answers while training",
    "hatchery": "the training runs on another service",
    "pretraining_dataset": "pre-training streams its texts",
}
"""Keys that make another kind of run of it."""

VISION = ("processor_type", "processor_kwargs", "image_size", "image_resize_algorithm", "role_boundaries")
