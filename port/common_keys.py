"""Keys that mean the same in every tool and do not depend on other keys: one table for all dialects.

A word of keys.REASONS marks keys that do not affect any number here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from recipec.compiler.catalog import Model
from recipec.port.engine import Says
from recipec.port.keys import OFF, Keys, table, tools
from recipec.port.meaning import adapters, model_names
from recipec.port.refusals import E1163
from recipec.port.tool_names import known, tokenizer_of
from recipec.runtime.data.tokenizer import MULTIPLE, padded
from recipec.runtime.training.objectives import OBJECTIVES

COMMON = table("""
learned use_dora peft_use_dora: the run trains no adapter, so it has no magnitudes
learned modules_to_save lora_modules_to_save additional_target: the run has no adapters, and these modules are
    trained only next to adapters
learned trainable_token_indices peft_trainable_token_indices: the run has no adapters, and rows of the
    embedding are trained only next to adapters
learned loraplus_lr_ratio lorap_lr_ratio: the run trains no adapter, so there is no B to give a higher
    learning rate
learned lora_model_dir adapter_name_or_path neftune_noise_alpha noisy_embedding_alpha z_loss_multiplier=0
    rope_scaling
learned label_smoothing_factor=0: recipec smooths labels only with train.objective: sft
lost fp8 streaming
exact do_train: a run of a recipe always trains
exact loraplus_lr_embedding: recipec puts no adapters on embeddings
files access_token adapter_folder cache_dir data_shared_file_system dataset_keep_in_memory dataset_num_proc
    dataset_prepared_path dataset_processes hf_hub_token hf_use_auth_token ignore_bias_buffers is_preprocess
    logging_dir media_dir ms_hub_token num_dataset_shards_to_save offload_folder om_hub_token overwrite_cache
    preprocess_iterable preprocessing_batch_size preprocessing_num_workers print_param_status
    remove_unused_columns sample_packing_eff_est sample_packing_mp_start_method skip_prepare_dataset
    total_num_tokens total_supervised_tokens use_fast_tokenizer
log badam_verbose bench_dataset bench_split compute_accuracy debug disable_tqdm do_bench_eval
    do_causal_lm_eval enable_torch_profiler eval_causal_lm_metrics eval_max_new_tokens eval_table_size
    generate_samples generation_do_sample generation_max_new_tokens generation_prompt_ratio
    generation_temperature generation_top_k generation_top_p gradio_max_new_tokens gradio_server_name
    gradio_server_port gradio_share gradio_temperature gradio_title include_effective_tokens_per_second
    include_num_input_tokens_seen include_tkps include_tokens_per_second lm_eval_batch_size lm_eval_model
    lm_eval_post_train lm_eval_tasks log_level log_level_replica log_on_each_node log_peak_memory_stats
    logging_first_step logging_nan_inf_filter logging_strategy num_generation_samples plot_loss
    profile_modules profiler_active_steps profiler_output_dir profiler_profile_memory profiler_record_shapes
    profiler_repeat profiler_wait_steps profiler_warmup_steps profiler_with_stack project run_name
    skip_memory_metrics swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir
    swanlab_mode swanlab_project swanlab_run_name swanlab_workspace trackio_bucket_id trackio_space_id
    trackio_static_space_id use_swanlab use_tensorboard
speed ac_mode ac_option accelerator_config activation_offloading auto_find_batch_size compile
    cudnn_deterministic_mode custom_sharded_layers dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor ddp ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_static_graph ddp_timeout device device_map enable_activation_offloading
    experimental_skip_move_to_device fsdp_cpu_offload fsdp_reshard_after_forward full_determinism
    gc_collect_steps gc_steps gpu_memory_limit gradient_checkpointing_kwargs layer_offloading local_rank
    lora_on_cpu low_cpu_mem_usage low_cpu_ram max_memory optimizer_in_bwd ple_cpu_offload
    qlora_sharded_model_loading ray_run_name relora_cpu_offload resources_per_worker selective_checkpointing
    tensor_parallel_plan tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    use_cache use_cpu use_ray
kernels chunked_cross_entropy chunked_cross_entropy_num_chunks cut_cross_entropy deepcompile dpo_padding_free
    dpo_use_liger_kernel enable_liger_kernel expert_backend experts_implementation flash_attn_cross_entropy
    flash_attn_d512 flash_attn_fuse_mlp flash_optimum flex_attn_compile_kwargs fused_attn_kernel
    gemma4_hybrid_attn_impl large_head_attention liger_cross_entropy liger_fused_linear_cross_entropy
    liger_glu_activation liger_kernel_impl liger_layer_norm liger_rms_norm liger_rms_norm_gated liger_rope
    liger_swiglu llama4_linearized_experts lora_embedding_kernel lora_mlp_kernel lora_o_kernel lora_qkv_kernel
    moe_bnb_fast moe_dequant_chunk_size moe_grouped_backend pretrain_multipack_attn sdpa_varlen tiled_mlp
    tiled_mlp_num_shards tiled_mlp_use_original_mlp torch_compile_options use_kernels use_liger_kernel
    use_reentrant_gc use_scattermoe use_sonicmoe use_unsloth use_unsloth_gc use_v1_kernels
launch master_addr master_port quantization_device_map ray_init_kwargs
padding batch_flattening ignore_pad_token_for_loss multipack_real_batches pad_to_multiple_of
    pad_to_sequence_len pad_token padding_free padding_value
derived axolotl_config_path base_model_config embeddings_skip_upcast is_falcon_derived_model
    is_llama_derived_model is_mistral_derived_model is_qwen_derived_model lora_fan_in_fan_out strict
    tokenizer_legacy tokenizer_type tokenizer_use_fast trust_remote_code type_of_model
checkpoints auto_resume_from_checkpoints dynamic_checkpoint enable_async_checkpointing enable_jit_checkpoint
    greater_is_better ignore_data_skip metric_for_best_model restore_callback_states_from_checkpoint resume
    resume_from_checkpoint save_adapter_weights_only save_first_step save_on_each_node save_only_model
    save_steps save_strategy save_total_limit
evaluation batch_eval_metrics bf16_full_eval do_eval do_predict eval_accumulation_steps eval_batch_size
    eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object fp16_full_eval include_for_metrics
    per_device_eval_batch_size prediction_loss_only
export export_device export_dir export_hub_model_id export_legacy_format export_quantization_bit
    export_quantization_dataset export_quantization_maxlen export_quantization_nsamples export_size merge_lora
    merge_method save_safetensors tokenizer_save_jinja_files
media audio_sampling_rate crop_to_patches freeze_mm_modules freeze_multi_modal_projector freeze_vision_tower
    image_do_pan_and_scan image_max_pixels image_min_pixels use_audio_in_video video_fps video_max_pixels
    video_maxlen video_min_pixels
""")
"""A dialect's own tables and functions are applied first, and override this table."""


METHODS = table("""
number loraplus_lr_ratio lorap_lr_ratio -> lora.loraplus_lr_ratio
number neftune_noise_alpha -> train.neftune_noise_alpha: the noise shrinks with the square root of a row's
    tokens; padding counts, and recipec may pad differently
number z_loss_multiplier -> train.z_loss
number label_smoothing_factor -> train.label_smoothing: the Trainer adds up the means of a step's
    micro-batches; recipec takes one mean over the step's tokens
""")
"""Keys whose number a recipe has too: LoRA's if adapters are trained, the others with sft only."""
SINGLE = ("embed_tokens", "lm_head")
"""Modules of which a model has only one. PEFT matches other names against the end of every module's name."""
WHOLE = (
    "recipec keeps them in lora.dtype; PEFT keeps them in the base model's type, unless the tool casts them"
)
TIED = "the output head is the embedding: recipec trains one tensor, PEFT a copy for each module"
UNDECAYED = "Axolotl uses PEFT's optimizer for LoRA+, which has no weight decay"


def say_methods(keys: Keys, off: tuple[Any, ...] = OFF) -> Says:
    """State what the keys of METHODS become that are on in the file."""
    adapted = keys.ledger.value("lora.rank") is not None
    sft = keys.ledger.value("train.objective") in (None, "sft")
    for key in ("modules_to_save", "lora_modules_to_save", "additional_target"):
        if adapted and key not in keys.stated and keys.given(key) and keys.value(key) not in off:
            modules = keys.texts(key) or []
            names = [name.strip() for name in (modules.split(",") if isinstance(modules, str) else modules)]
            tied = _tied(keys) and "embed_tokens" in names
            patterns = [
                name if name in SINGLE else f".*{re.escape(name)}"
                for name in names
                if not (tied and name == "lm_head")
            ]
            patterns = list(dict.fromkeys([*(keys.ledger.value("lora.modules_to_save") or ()), *patterns]))
            apart = tied and not keys.flag("peft_ensure_weight_tying")
            yield keys.say(key, {"lora.modules_to_save": patterns}, f"{TIED}; {WHOLE}" if apart else WHOLE)
    for key in ("trainable_token_indices", "peft_trainable_token_indices"):
        if adapted and key not in keys.stated and keys.given(key) and keys.value(key) not in off:
            yield from adapters.say_tokens(keys, key)
    for row in METHODS:
        on = [key for key in row.keys if keys.given(key) and keys.value(key) not in off]
        if not on or keys.stated.intersection(on) or not (adapted if row.target.startswith("lora.") else sft):
            continue
        if row.target == "lora.loraplus_lr_ratio" and keys.tool == "Axolotl":
            sets = {row.target: keys.number(on[0]), "train.optimizer.weight_decay": 0.0}
            yield keys.same(on[0], sets, UNDECAYED)
        else:
            yield from keys.follow([replace(row, keys=dict.fromkeys(on, ()))])


def _model(keys: Keys) -> Model | None:
    return model_names.resolve(str(keys.ledger.value("model.id")), keys.source.path.parent).model


def grown(keys: Keys, tokens: int) -> int | None:
    """Return the rows of an embedding with room for new tokens, None if the model has rows to spare."""
    model = _model(keys)
    if model is None:
        return None
    rows = model.architecture.vocab_size
    used = known("tokens").get(tokenizer_of(model), rows)
    return padded(rows + tokens) if used + tokens > rows else None


def _tied(keys: Keys) -> bool:
    model = _model(keys)
    if model is None:
        return False
    sources = (s for p in model.family.parameters(model.architecture) for s in p.sources)
    return all(source.module != "lm_head" for source in sources)


FREE = "recipec's dpo and kto, like TRL's, compare with the model that training starts from"
FREELY = "--set reference_free=false; or `objective: cpo`, which needs no reference"


def say_start(keys: Keys, key: str, *, of_base: bool = False) -> Says:
    """State what becomes of a key that names an adapter to start from, if it names one and LoRA is trained.

    Args:
        of_base: whether the tool's reference is the model without the adapter.
    """
    value = keys.texts(key) if keys.given(key) and key not in keys.stated else None
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value or ())
    if len(names) != 1 or not names[0] or keys.ledger.value("lora.rank") is None:
        return
    objective = OBJECTIVES[keys.ledger.value("train.objective") or "sft"]
    if of_base and objective.refers(keys.ledger.value("train.loss_type") or next(iter(objective.losses))):
        note = "recipec's reference has a copy of the adapter; the tool's has none"
        yield keys.learned(key, (), note)
        return
    note = "the adapter must match what the recipe trains"
    if model_names.HUB_ID.fullmatch(names[0]):
        note = "recipec reads it as a folder; an adapter of the Hugging Face Hub is hf://OWNER/NAME"
    yield keys.say(key, {"lora.start_from": names[0].removeprefix("./")}, note)


SPARE = "new tokens take rows of the embedding that no token has"
GROWN = "new tokens take rows that model.vocab_size adds; a multiple of {multiple} divides over devices"


def say_tokens(keys: Keys, key: str, resizes: str = "") -> Says:
    """State what becomes of a key that lists new tokens.

    Args:
        resizes: the key of LLaMA-Factory that resizes the vocabulary. Adapters are then trained with the
            embedding and the output head, unless the file names other modules.
    """
    value = keys.texts(key) if keys.given(key) else None
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if names:
        rows = grown(keys, len(names))
        sets = {"model.add_tokens": dict.fromkeys(names), **({"model.vocab_size": rows} if rows else {})}
        yield keys.say(key, sets, GROWN.format(multiple=MULTIPLE) if rows else SPARE)
    else:
        yield keys.same(key, note="none")
    grows = resizes and (names or keys.flag(resizes)) and keys.ledger.value("lora.rank") is not None
    if grows and not keys.given("additional_target"):
        tied = _tied(keys)
        modules = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
        note = f"{keys.tool} trains them in a resized vocabulary; {f'{TIED}; ' if tied else ''}{WHOLE}"
        yield keys.default(
            "additional_target", ["embed_tokens", "lm_head"], {"lora.modules_to_save": modules}, note
        )
        yield keys.same(resizes, note="it trains the modules of additional_target")


def say_common(keys: Keys, tool: str, off: tuple[Any, ...] = OFF) -> Says:
    """State the tool's keys, as listed in data/dialects.json, that have no finding yet."""
    yield from say_methods(keys, off)
    if keys.given("reference_free") and keys.value("reference_free") not in off:
        yield keys.refuse("reference_free", E1163, FREE, FREELY)
    yield keys.same("reference_free", note="off")
    names = {name.rpartition(".")[2] for section in tools()[tool]["sections"].values() for name in section}
    for row in COMMON:
        yield from keys.follow([replace(row, keys={key: () for key in row.keys if key in names})], off)
