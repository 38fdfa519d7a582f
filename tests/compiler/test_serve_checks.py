"""Tests of a server's checks other than its flags: its weights, adapters, cache and settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from recipec.compiler.lower import Lowered
from recipec.compiler.lowering.pins import sets
from recipec.compiler.vllm.flags import version
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.language import Serve

Lower = Callable[..., Lowered]

SERVED = "serve={accelerator: v6e-8}"
ADAPTER = "serve.weights=adapter"
TORCHAX = "serve.env={MODEL_IMPL_TYPE: vllm}"
LLAMA = "model.id=meta-llama/Llama-3.1-8B-Instruct"
ELSEWHERE = "serve.model=gs://bucket/x"
SIZES = "[1, 1024, 1, 1024]"


@pytest.fixture
def found(lowered: Lower) -> Callable[..., dict[str, Diagnostic]]:
    """Return a function that gives a served recipe's diagnostics by code."""
    return lambda *sets: {d.code: d for d in lowered(SERVED, *sets).diagnostics}


Found = Callable[..., dict[str, Diagnostic]]


def test_serve_model_accepts_paths_and_addresses_without_spaces(found: Found) -> None:
    for model in ("./merged-fp8", "~/models/x", "gs://bucket/folder/x", "organization/name"):
        assert "E0642" not in found(f'serve.model="{model}"'), model


def test_default_image_is_the_release_of_the_pinned_version(found: Found) -> None:
    default = Serve.model_fields["image"].default
    assert default == f"vllm/vllm-tpu:v{sets()['serve']['vllm-tpu']}" == f"vllm/vllm-tpu:v{version()}"
    digest = "0123456789abcdef" * 4
    for image in (default, f"{default}@sha256:{digest}", f"eu-docker.pkg.dev/p/mirror/{default}"):
        assert not {"N0662", "W0613", "E0612"} & set(found(f"serve.image={image}")), image


@pytest.mark.parametrize(
    ("image", "code", "words"),
    [
        ("vllm/vllm-tpu:gemma4", "N0662", "has a version of vLLM that is not known"),
        ("vllm/vllm-tpu:v0.26.0", "N0662", "has vllm-tpu 0.26.0"),
        ("me/mine:v0.32.0", "N0662", "has a version of vLLM that is not known"),
        (f"vllm/vllm-tpu@sha256:{'0' * 64}", "N0662", "has a version of vLLM that is not known"),
        ("vllm/vllm-tpu:nightly", "W0613", "its version of vLLM is not known"),
        ("localhost:5000/vllm-tpu", "W0613", "without a tag it is latest"),
    ],
)
def test_version_of_another_image_is_reported_once(image: str, code: str, words: str, found: Found) -> None:
    reported = found(f"serve.image={image}")
    assert words in reported[code].message and "0.32.0" in reported[code].message
    assert len({"N0662", "W0613"} & set(reported)) == 1


@pytest.mark.parametrize(
    "model",
    [
        *("merged", "../x", "./a/../../x", "~someone/x", "s3://bucket/x", "gs://bucket/a b", "gs://"),
        *("gs://bucket/$(id)", "./x;reboot", "./a:b", "--flag", "a/b/c", "./x\\ny"),
    ],
)
def test_serve_model_refuses_invalid_locations(model: str, found: Found) -> None:
    assert "E0642" in found(f'serve.model="{model}"')


def test_suspicious_serve_model_gives_a_warning_or_note(found: Found) -> None:
    base = "serve.model=google/gemma-4-31B-it"
    assert "answers like the base model" in found(base)["W0643"].message
    assert "N0643" in found("serve.model=me/mine")
    served = (ADAPTER, TORCHAX)
    assert "would be applied twice" in found("serve.model=./merged", *served)["W0643"].message
    assert "is trained for" in found("serve.model=google/gemma-4-E4B-it", *served)["W0643"].message
    for quiet in ((base, *served), ("serve.model=./merged",), ("serve.model=gs://bucket/x", *served)):
        assert not {"W0643", "N0643", "E0642"} & set(found(*quiet)), quiet


def test_adapter_on_an_fp8_base_gives_a_warning_and_is_refused_on_v5e(found: Found) -> None:
    base = "model.id=mistralai/Ministral-3-8B-Instruct-2512"
    plain, merged, served = found(f"{base}-BF16", ADAPTER), found(base), found(base, ADAPTER)
    assert "N0820" in merged and "N0820" in served and "W0661" in served
    assert "N0820" not in plain and not {"W0661", "E0604"} & {
        *plain,
        *merged,
        *found(base, ADAPTER, ELSEWHERE),
    }
    assert "stored in FP8" in found(base, ADAPTER, "serve.accelerator=v5litepod-8")["E0604"].message


def test_settings_that_prevent_serving_an_adapter_are_refused(found: Found) -> None:
    assert "MODEL_IMPL_TYPE: vllm" in (found(ADAPTER)["E0645"].help or "")
    taken = found(ADAPTER, TORCHAX)
    assert "N0647" in taken and not {"E0645", "E0646"} & set(taken)
    assert "E0644" in found(ADAPTER, TORCHAX, "merge.adapter=false")
    assert "E0644" in found(ADAPTER, TORCHAX, "lora=null", "merge.adapter=false")
    for key, words in (
        ("lora.modules_to_save=[norm]", "the modules of modules_to_save"),
        ("lora.modules_to_save=[embed_tokens]", "the modules of modules_to_save"),
        ("lora.trainable_tokens=[7]", "the rows of trainable_tokens"),
        ("lora={rank: 8, kind: dora, dropout: 0}", "the magnitudes of kind: dora"),
        ("model.vocab_size=262208", "the rows that model.vocab_size adds"),
    ):
        refused = found(ADAPTER, TORCHAX, key)
        assert words in refused["E0645"].message and "N0647" not in refused, key
    for key in ("lora={rank: 8, rslora: true}", "lora={rank: 8, init: pissa}", "serve.weights=merged"):
        assert "E0645" not in found(ADAPTER, TORCHAX, key), key
    replicas = ("serve.tensor_parallel_size=4", "serve.data_parallel_size=2")
    one = "serve.env={MODEL_IMPL_TYPE: vllm, TPU_MULTIPROCESS_DP: '0'}"
    assert "E0648" in found(ADAPTER, one, *replicas)
    assert "E0648" not in found(ADAPTER, TORCHAX, *replicas)
    assert "E0648" not in found(ADAPTER, one)
    options = "serve.extra_args={structured_outputs_config.backend: guidance}"
    assert "W0648" in found(one, options, *replicas) and "W0648" not in found(options, *replicas)


def test_serve_host_beyond_loopback_gives_a_note_about_the_api_key(found: Found) -> None:
    for host in ("127.0.0.1", "localhost", "'::1'", "127.8.8.8"):
        assert "N0633" not in found(f"serve.host={host}")
    for host in ("0.0.0.0", "'::'", "10.0.0.1", "tpu.example"):
        assert "VLLM_API_KEY" in found(f"serve.host={host}")["N0633"].message


def test_impossible_min_replicas_and_too_long_benchmark_prompts_are_found(found: Found) -> None:
    assert "E0639" in found("serve.autoscaling={min_replicas: 3}")
    assert "E0639" not in found("serve.autoscaling={min_replicas: 2}")
    long = found("benchmark={input_lengths: [512, 16384], output_length: 128}")["W0640"]
    assert (
        "prompts of 16,384 tokens with answers of 128" in long.message
        and long.path == "benchmark.input_lengths"
    )
    # One of the language's own lengths is enough.
    short = ("data.max_length=512", "serve.max_num_batched_tokens=512")
    assert "W0640" not in found("serve.max_model_len=2048", *short)
    assert "W0640" in found("serve.max_model_len=1000", *short)


def test_kv_cache_size_limits_max_model_len(found: Found) -> None:
    small = ("serve.tensor_parallel_size=4", "serve.data_parallel_size=2")
    none = found("serve.max_model_len=262144", *small)["E0634"]
    most = int(re.search(r"max_model_len: (\d+)", none.help or "")[1])  # type: ignore[index]
    assert "E0634" in found(f"serve.max_model_len={most + 1}", *small)
    assert "E0634" not in found(f"serve.max_model_len={most}", *small)
    by_hand = "serve.extra_args={num_gpu_blocks_override: 100000}"
    assert "E0634" not in found("serve.max_model_len=262144", *small, by_hand)


@pytest.mark.parametrize(
    ("accelerator", "model", "help"),
    [
        ("v6e-8", "google/gemma-4-31B-it", "tensor_parallel_size: 4, data_parallel_size: 2"),
        (
            "v6e-1",
            "mistralai/Mistral-Small-24B-Instruct-2501",
            "tensor_parallel_size: 1, data_parallel_size: 1, quantization: fp8",
        ),
    ],
)
def test_sizes_for_too_large_weights_leave_memory_for_the_cache(
    accelerator: str, model: str, help: str, found: Found
) -> None:
    sets = (f"model.id={model}", f"serve.accelerator={accelerator}", "serve.max_num_seqs=1")
    assert found(*sets, "serve.tensor_parallel_size=1")["E0608"].help == help
    followed = [f"serve.{pair.replace(': ', '=')}" for pair in help.split(", ")]
    assert not {"E0608", "E0634"} & set(found(*sets, *followed))


def test_planning_continues_when_the_kv_cache_is_too_small(loaded: Any) -> None:
    from recipec.compiler.lower import lower

    small = ("serve.tensor_parallel_size=4", "serve.data_parallel_size=2")
    recipe = loaded(SERVED, "serve.max_model_len=262144", *small)
    assert lower(recipe).program is None and lower(recipe, planning=True).program is not None


def test_note_recommends_decode_block_sizes_with_an_estimate(found: Found) -> None:
    note = found()["N0635"]
    # As in the compiled step at 64 x 4096: 8.7 instead of 18.8 GB of each chip's cache.
    assert "64 sequences of 4,096 tokens" in note.message and "18.8 GB" in note.message
    assert "8.7 GB" in note.message and "an estimate, untested on hardware" in note.message
    assert note.help == f"decode_block_sizes: {SIZES}"
    for taken in (
        f"serve.decode_block_sizes={SIZES}",
        "serve.env={RPA_V3_DECODE_BLOCK_SIZES: '1,1024,1,1024'}",
    ):
        after = found(taken)
        assert not {"N0635", "W0637", "E0636"} & set(after), taken
    # Without windows, with nothing to skip, and with another kernel.
    assert "N0635" not in found(LLAMA)
    assert "N0635" not in found("benchmark={input_lengths: [1024]}")
    assert "N0635" not in found("serve.env={USE_BATCHED_RPA_KERNEL: '1'}")
    # A server that does not start has no estimates.
    assert not {"N0635", "N0607"} & set(found("serve.data_parallel_size=2"))


def test_decode_block_sizes_without_effect_give_a_warning(found: Found) -> None:
    blocks = f"serve.decode_block_sizes={SIZES}"
    assert "no layers with a sliding window" in found(LLAMA, blocks)["W0637"].message
    assert "are never skipped" in found(blocks, "serve.max_model_len=2047")["W0637"].message
    assert "W0637" not in found(blocks, "serve.max_model_len=2048")
    batched = "serve.env={USE_BATCHED_RPA_KERNEL: '1'}"
    assert "another kernel" in found(blocks, batched)["W0637"].message


@pytest.mark.parametrize(
    "sets",
    [
        "serve.decode_block_sizes=[1, 1000, 1, 1000]",
        "serve.decode_block_sizes=[1, 1024, 2, 1024]",
        "serve.env={RPA_V3_DECODE_BLOCK_SIZES: '1,1024,1,x'}",
    ],
)
def test_invalid_decode_block_sizes_are_errors(sets: str, found: Found) -> None:
    assert "E0636" in found(sets)


def test_note_states_the_memory_cost_of_fewer_kv_heads_than_devices(found: Found) -> None:
    # Gemma 4 31B at 8: storing the weights twice leaves less for all caches together.
    assert "N0607" not in found()
    small = ("model.id=google/gemma-4-E4B-it", "serve.max_model_len=8192")
    note = found(*small)["N0607"]
    # 20 local and 4 global layers store keys and values. Each device has one head of the two.
    before = 8 * (20 * 4 * 256 + 4 * 4 * 512) / 1024
    after = 2 * (20 * 4 * 256 + 4 * 4 * 512) / 1024
    assert f"{before:,.0f} KiB" in note.message and f"{after:,.0f} KiB at 2" in note.message
    figures = [int(n.replace(",", "")) for n in re.findall(r"\d+,\d+", note.help or "")]
    assert len(figures) == 2 and figures[0] > figures[1]
    assert "N0607" not in found(*small, "serve.tensor_parallel_size=2", "serve.data_parallel_size=4")


def test_chip_without_paged_attention_kernel_gives_a_warning(found: Found) -> None:
    assert "W0609" in found(
        "serve.accelerator=v4-8", "serve.tensor_parallel_size=4", "serve.kv_cache_dtype=auto"
    )
    assert "W0609" not in found("serve.accelerator=v5p-8", "serve.tensor_parallel_size=4")
