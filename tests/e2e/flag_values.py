"""Flag values for vLLM's parser, and recipes that it refuses or accepts."""

from __future__ import annotations

from typing import Any

from recipec.compiler.checks.server_flags import KEYS

VALUES: list[Any] = [
    *(True, False, 0, 1, -3, 2.5, -0.5, 10**12, "x", "", "None", "none", "8k", "1.5k", "1.5K", "2M"),
    *("auto", "AUTO", "{", "{}", '{"a": 1}', "[1, 2]", '["a"]', "0,1", "0,x", "7", " 7", "1_000", "1e3"),
    *("nan", "-x", "--x", "true", {}, {"zzz": 1}, [], ["x"], [1, 2], ["1", "x"], ["-x"], ["-3"]),
    *([{"a": 1}], "eager", "lru", "FlashInfer"),
]

DOTTED: list[tuple[str, Any]] = [
    ("compilation_config.mode", 3),
    ("compilation-config.cudagraph_mode", "FULL"),
    ("compilation-config.use_inductor_graph_partition", True),
    ("compilation-config.compile_sizes", [1, 2]),
    ("compilation-config.zzz", 1),
    ("compilation-config.pass_config.zzz", True),
    ("additional_config.sharding", {"sharding_strategy": {}}),
    ("additional-config.anything.at.all", "1"),
    ("structured-outputs-config.backend", "xgrammar"),
    ("structured-outputs-config.backend", "nope"),
    ("seed.x", 1),
    ("enable-lora.x", True),
    ("hf-overrides.rope_scaling", {"factor": 2}),
    ("hf_overrides.negative", -1),
    ("hf_overrides.negative", "-x"),
]

STRICTER: list[tuple[str, Any]] = [
    ("scheduling_pol", "fcfs"),
    ("no_async_sched", True),
    ("long-prefill-token-threshold", False),
    ("host.name", "x"),
]
"""Values that only `recipe check` refuses.

They are beginnings of names (the third is one of --no-...-adaptive), and keys of a text.
"""

UNREADABLE = {"config", *KEYS}
"""Flags that are refused with any value: one reads a file, and the others are keys of the recipe."""

FOUR_HEADS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
    "bos_token_id": 2,
}

SMALL = """\
recipe: 1
name: small
model: {id: ./model}
mesh: {accelerator: v6e-8, axes: {fsdp: 8, tp: 1}}
lora: {rank: 8}
data: {train: [gs://bucket/train.jsonl], max_length: 512}
train: {global_batch_size: 8}
serve: {accelerator: v6e-8, tensor_parallel_size: 4, data_parallel_size: 2, max_model_len: 2048}
benchmark: {input_lengths: [512]}
"""

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "four heads on eight devices": (("serve.tensor_parallel_size=8", "serve.data_parallel_size=1"), "E0606"),
    "malformed JSON": (('serve.extra_args={additional_config: "{a}"}',), "E0625"),
    "unknown flag": (("serve.extra_args={gpu_memory_utilisation: 0.9}",), "E0623"),
    "a share above one": (("serve.extra_args={gpu_memory_utilization: 1.5}",), "E0625"),
    "fewer tokens than requests": (("serve.max_num_batched_tokens=32",), "E0605"),
    "an unknown key of a configuration": (("serve.extra_args={compilation_config: {zzz: 1}}",), "E0626"),
    "an option of another backend": (
        ("serve.extra_args={structured_outputs_config: {disable_any_whitespace: true}}",),
        "E0649",
    ),
    "adapters with replicas in one process": (
        ("serve.weights=adapter", "serve.env={MODEL_IMPL_TYPE: vllm, TPU_MULTIPROCESS_DP: '0'}"),
        "E0648",
    ),
}
"""Settings that vLLM refuses, and their codes in `recipe check`."""

ACCEPTED: dict[str, tuple[str, ...]] = {
    "two replicas": (),
    "an adapter with two replicas": ("serve.weights=adapter", "serve.env={MODEL_IMPL_TYPE: vllm}"),
    "flags of many types": (
        "serve.extra_args={async_scheduling: true, gpu_memory_utilization: 0.85, stream_interval: 4, "
        "allowed_origins: [x], additional_config: {a: 1}, structured_outputs_config.backend: guidance, "
        "compilation_config.mode: 0, kv_cache_memory_bytes: 8G, enable_log_requests: false}",
    ),
    "an unknown tool-call parser": ("serve.tool_call_parser=gema",),
}
"""Settings that vLLM accepts. `recipe check` refuses the last one: vLLM fails when it needs the parser."""
