"""LLaMA-Factory's keys that a table says enough of, beside those of transformers' TrainingArguments."""

from __future__ import annotations

PASSIVE = {
    "how files are loaded and kept, not what they hold": """cache_dir adapter_folder use_fast_tokenizer
        low_cpu_mem_usage offload_folder hf_hub_token ms_hub_token om_hub_token overwrite_cache
        preprocessing_batch_size preprocessing_num_workers data_shared_file_system
        print_param_status trust_remote_code media_dir""",
    "a setting of generation, which trains nothing": """infer_backend infer_dtype use_kv_cache vllm_maxlen
        vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen
        sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend do_sample temperature
        top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
        skip_special_tokens eval_num_beams generation_max_length generation_num_beams""",
    "a setting of the export, which merge.py does by the recipe's merge section": """export_dir export_size
        export_device export_quantization_bit export_quantization_dataset
        export_quantization_nsamples export_quantization_maxlen export_legacy_format
        export_hub_model_id""",
    "images and sound are not read": """image_max_pixels image_min_pixels image_do_pan_and_scan
        crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video
        audio_sampling_rate""",
    "the vision tower is not part of the model here": "freeze_vision_tower freeze_multi_modal_projector",
    "a log": """use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key
        swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret plot_loss compute_accuracy
        include_effective_tokens_per_second enable_torch_profiler profiler_output_dir
        profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat
        profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules
        badam_verbose""",
    "kernels of the same arithmetic; XLA compiles the whole step": """use_unsloth use_unsloth_gc
        enable_liger_kernel use_v1_kernels use_reentrant_gc""",
    "how processes are started and find each other": """ray_init_kwargs master_addr
        master_port quantization_device_map device_map""",
    "what LLaMA-Factory derives from other keys": "compute_dtype model_max_length block_diag_attn",
    "padding is never trained on here": "ignore_pad_token_for_loss",
    "each source of data.eval is evaluated together with the others": "eval_on_each_dataset",
    "disable_gradient_checkpointing tells whether activations are kept": """gradient_checkpointing
        gradient_checkpointing_kwargs""",
}

LEARNT = {
    "adapter_name_or_path": "training starts from new adapters; merge.py --import-adapter and --resume go on",
    "additional_target": "whole modules beside the adapters are not trained here: they stay the base's",
    "loraplus_lr_ratio": "A and B share one learning rate here; LoRA+ gives B a higher one",
    "use_dora": "plain LoRA in its place: no trained magnitudes, so the updates are others",
    "pissa_init": "A and B start from PEFT's own values here, not from the weights' principal directions",
    "create_new_adapter": "there is one adapter here, on the base itself",
    "use_llama_pro": "no layers are added to the model here",
    "use_galore": "gradients are not projected to a low rank here: other updates, and a larger state",
    "use_apollo": "gradients are not scaled by a low-rank projection here: other updates",
    "use_badam": "all parameters are trained at each step here, not one block after another",
    "use_adam_mini": "AdamW in its place keeps a second moment for each parameter",
    "use_muon": "AdamW in its place: updates are not orthogonalised",
    "use_dft_loss": "the loss is plain cross-entropy, not weighted by the token's probability",
    "use_asft_loss": "the loss is plain cross-entropy, without a term that keeps it near the base",
    "use_eaft_loss": "the loss is plain cross-entropy, not weighted by entropy",
    "freeze_language_model": "the language model is what is trained here",
    "split_special_tokens": "marks of the template are read as the tokens that they are here",
    "add_tokens": "no tokens are added to the tokenizer here: they are written in several tokens each",
    "add_special_tokens": (
        "no tokens are added to the tokenizer here: they are written in several tokens each"
    ),
    "new_special_tokens_config": "no tokens are added to the tokenizer here",
    "rope_scaling": "config.json is taken as it is, with its own rotary embedding",
    "shift_attn": "attention is over the whole row here, not over shifted groups",
    "mixture_of_depths": "every layer handles every token here",
    "moe_aux_loss_coef": "no loss that balances the experts is added here",
    "train_from_scratch": "training starts from the checkpoint's weights here, not from random ones",
    "tokenized_path": "the step tokenises rows, or trains on ones that another step has tokenised",
    "pref_ftx": "the supervised loss of the chosen answer is not added here",
    "pref_bco_weight": "the classifier's loss is not added here",
    "ld_alpha": "answers are not weighted by their length here",
    "ref_model": "the reference is the model that training starts from here",
    "ref_model_adapters": "the reference is the model that training starts from here",
}
"""Keys that change what is learnt, and what is without them: an error where they are on."""

FEATURES = {
    "pissa_convert": "there is nothing to convert: A and B start from PEFT's own values",
    "use_mca": "the runtime's own sharding in place of Megatron's",
    "use_hyper_parallel": "the runtime's own sharding in place of HyperParallel's",
    "early_stopping_steps": "the run goes on to its last step here",
    "resize_vocab": "the embedding keeps its size here",
    "upcast_layernorm": "norms are kept in model.dtype here",
    "upcast_lmhead_output": "logits are computed in model.dtype here, and their loss in float32",
    "use_kt": "the runtime's own experts in place of KTransformers'",
    "fp8": "bfloat16 in its place: products are more precise, and take longer",
    "streaming": "the data set is read as a whole here, and shuffled as a whole",
    "ref_model_quantization_bit": "the reference is the model that training starts from here",
    "tool_format": "tools are written by the template alone here",
}
"""Keys without a counterpart that leave what is learnt as it is, and what they change."""

SETTINGS = {
    "loraplus_lr_ratio": "loraplus_lr_embedding",
    "pissa_init": "pissa_iter",
    "add_special_tokens": "init_special_tokens",
    "use_galore": """galore_target galore_rank galore_update_interval galore_scale galore_proj_type
        galore_layerwise""",
    "use_apollo": """apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj
        apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front""",
    "use_badam": """badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio
        badam_mask_mode""",
    "use_hyper_parallel": "hyper_parallel_args",
    "use_asft_loss": "asft_alpha",
    "use_eaft_loss": "eaft_alpha",
    "use_kt": """kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num
        kt_lora_expert_intermediate_size""",
    "fp8": "fp8_backend fp8_enable_fsdp_float8_all_gather",
    "streaming": "buffer_size",
}
"""Settings of a feature, by the key that switches it on."""

OF_STAGES = """kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm
    ppo_target ppo_whiten_rewards reward_model reward_model_adapters reward_model_quantization_bit
    reward_model_type freeze_trainable_layers freeze_trainable_modules freeze_extra_modules module_dropout
    oft_rank oft_block_size oft_target"""
"""Settings of stages and methods that are refused."""

OFF: tuple[object, ...] = (None, False, 0, 0.0, "", [])
