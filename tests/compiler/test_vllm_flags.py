"""Tests of a server's flags: which values vLLM's catalog accepts, and their form on the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.vllm import flags as vllm
from recipec.compiler.vllm.container import container
from recipec.compiler.vllm.flags import problems
from recipec.spec.load import load

Codes = Callable[..., set[str]]

SERVED = "serve={accelerator: v6e-8}"


def said(name: str, value: Any) -> list[str]:
    return [problem.message for problem in problems(name, value)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("async_scheduling", True),
        ("no_async_scheduling", True),
        ("gpu_memory_utilization", 0.9),
        ("watermark", -0.5),
        ("kv_cache_memory_bytes", "8G"),
        ("uvicorn_log_level", "warning"),
        ("allowed_origins", ["https://example.com"]),
        ("served_model_name", ["a", "b"]),
        ("max_lora_rank", 64),
        ("hf_overrides", {"a": 1}),
        ("hf_overrides", "package.function"),
        ("compilation_config", {"mode": 3, "pass_config": {"fuse_norm_quant": True}}),
        ("compilation-config.cudagraph_mode", "FULL"),
        ("additional_config.any.thing", [1, 2]),
        ("structured_outputs_config.backend", "xgrammar"),
        ("moe_backend", "Flashinfer-TRTLLM"),
        ("hf_token", True),
        ("seed", None),
    ],
)
def test_values_accepted_by_vllm_give_no_problems(name: str, value: Any) -> None:
    assert said(name, value) == []


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("gpu_memory_utilisation", 0.9, "no flag --gpu-memory-utilisation"),
        ("seed", "x", "which is not a whole number"),
        ("seed", 1.5, "which is not a whole number"),
        ("seed", True, "takes a value"),
        ("seed", [1, 2], "takes one value, not a list"),
        ("async_scheduling", 1, "is a switch"),
        ("no_async_scheduling", False, "negates twice"),
        ("headless", False, "there is no --no-headless"),
        ("gpu_memory_utilization", "most", "which is not a number"),
        ("kv_cache_memory_bytes", "1.5K", "which is not a whole number, or one such as 8k"),
        ("uvicorn_log_level", "loud", "cannot be `loud`"),
        ("max_lora_rank", 12, "cannot be `12`"),
        ("lora_target_modules", [], "is an empty list"),
        ("lora_target_modules", ["-x"], "takes for another flag"),
        ("allowed_origins", "*", "which is not JSON"),
        ("hf_overrides", "{a}", "which is not JSON (Expecting property name"),
        ("hf_overrides", '{"a": ' + "[" * 100_000 + "}", "nested too deep"),
        ("compilation_config", "[1]", "which is not a mapping"),
        ("compilation_config", {"zzz": 1}, "no key `zzz`"),
        ("compilation_config", {"pass_config": {"zzz": 1}}, "no key `zzz`"),
        ("structured_outputs_config.backend", "nope", "cannot be `nope`"),
        ("seed.x", 1, "has no keys"),
        ("scheduling_pol", "fcfs", "is the beginning of --scheduling-policy"),
    ],
)
def test_values_refused_by_vllm_give_one_problem_with_the_reason(name: str, value: Any, part: str) -> None:
    messages = said(name, value)
    assert len(messages) == 1 and part in messages[0], messages


@pytest.mark.parametrize(
    ("name", "help"),
    [
        ("gpu_memory_utilisation", "did you mean `gpu_memory_utilization` or `device_memory_utilization`?"),
        ("disable_log_requests", "did you mean `no_enable_log_requests`?"),
        ("guided_decoding_backend", "did you mean `structured_outputs_config.backend`?"),
        ("pp", "did you mean `pipeline_parallel_size`?"),
        ("zzz", "`vllm serve --help=all` of vllm-tpu 0.32.0 lists them"),
    ],
)
def test_help_for_an_unknown_flag_suggests_known_flags(name: str, help: str) -> None:
    assert [problem.help for problem in problems(name, 1)] == [help]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_model_len", 8, ["--max-model-len", "8"]),
        ("enable_lora", True, ["--enable-lora"]),
        ("enable_lora", False, ["--no-enable-lora"]),
        ("seed", None, []),
        ("served_model_name", ["a", "b c"], ["--served-model-name", "a", "b c"]),
        # One word of JSON, not a word for each item.
        ("allowed_origins", ["*"], ["--allowed-origins", '["*"]']),
        ("hf_overrides", {"ä": 1}, ["--hf-overrides", '{"ä": 1}']),
        # Keys behind the dot keep their spelling, and a boolean is a value.
        ("compilation_config.use_x", True, ["--compilation-config.use_x", "true"]),
        ("compilation_config.sizes", [1, 2], ["--compilation-config.sizes", "[1, 2]"]),
        # vLLM first reads a key's value as JSON, so that a text that is JSON needs quotes.
        ("additional_config.x", "8k", ["--additional-config.x", '"8k"']),
        ("additional_config.x", "plain", ["--additional-config.x", "plain"]),
        ("watermark", -0.5, ["--watermark=-0.5"]),
        ("hf_overrides.x", -1, ["--hf-overrides.x=-1"]),
    ],
)
def test_flag_and_value_become_command_line_words(name: str, value: Any, words: list[str]) -> None:
    assert vllm.words(name, value) == words


RUNS_CODE = """
{trust_remote_code: true, middleware: json.loads, tool_parser_plugin: /x.py, reasoning_parser_plugin: x.py,
logits_processors: ['a:B'], worker_cls: a.B, worker-extension-cls: a.B, scheduler_cls: a.B,
distributed_executor_backend: a.B, log_config_file: l.json, hf_overrides: {a: {auto_map: {AutoConfig: x.Y}}},
kv_transfer_config.kv_connector_module_path: a, compilation_config.backend: os.system}
"""


def test_flags_that_run_code_are_refused(lowered: Any) -> None:
    found = lowered(SERVED, f"serve.extra_args={RUNS_CODE.replace(chr(10), ' ').strip()}").diagnostics
    assert sum(one.code == "E0629" for one in found) == 13


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("{api_key: [abc], hf_token: {a: b}, hf_overrides: '{\"auto_map\": {}}'}", {"E0703", "E0629"}),
        ("{allowed_local_media_path: /, reasoning_parser: gema4}", {"W0659", "E0631"}),
        ("{trust_request_chat_template: true, config: /etc/vllm.yaml}", {"W0659", "E0630"}),
        ("{compilation_config: {backend: os.system}, uds: /tmp/x}", {"E0629", "E0630"}),
        ("{no_disable_chunked_mm_input: true, tp: 4}", {"E0630", "E0616"}),
        ("{disable_chunked_mm_input: false, host: 0.0.0.0}", {"E0630", "E0616"}),
        ("{no_enable_prefix_caching: true, scheduling_pol: fcfs}", {"E0616", "E0624"}),
        ("{seed: 1, SEED: 2, max_num_batch: 1}", {"E0615", "E0616"}),
        ("{stream_interval: 1, stream-interval: 2, gpu_memory_utilization: 1.5}", {"E0627", "E0625"}),
        ("{async_scheduling: true, no_async_scheduling: true}", {"E0627"}),
        ("{compilation_config: {mode: 3}, compilation_config.mode: 0}", {"E0627"}),
        ("{compilation_config.mode: 3, compilation-config.mode: 0}", {"E0627"}),
        ("{device_memory_utilization: 0.9, gpu_memory_utilization: 0.8}", {"E0627"}),
        ("{structured_outputs_config.disable_any_whitespace: true}", {"E0649"}),
    ],
)
def test_forbidden_or_conflicting_flags_give_their_diagnostic(
    flags: str, expected: set[str], codes: Codes
) -> None:
    assert expected <= codes(SERVED, f"serve.extra_args={flags}")


@pytest.mark.parametrize(
    "flags",
    [
        "{compilation_config.mode: 3, compilation_config.cudagraph_mode: FULL}",
        "{no_trust_remote_code: true, trust_request_chat_template: false}",
        "{structured_outputs_config: {backend: guidance, disable_any_whitespace: true}}",
        # These are not secrets, despite their names.
        "{long_prefill_token_threshold: 1, return_tokens_as_token_ids: true, dbo_decode_token_threshold: 3}",
        "{allow_credentials: true, override_generation_config: {eos_token_id: 106}}",
        "{reasoning_parser: gemma4, distributed_executor_backend: mp, compilation_config.backend: eager}",
    ],
)
def test_allowed_flags_give_no_errors(flags: str, codes: Codes) -> None:
    found = codes(SERVED, f"serve.extra_args={flags}")
    assert not {c for c in found if c[0] == "E" or c == "W0659"}


CODE = {
    *("PYTHONPATH", "LD_PRELOAD", "PATH", "BASH_ENV", "VLLM_PLUGINS", "VLLM_ALLOW_INSECURE_SERIALIZATION"),
    *("TPU_LIBRARY_PATH", "HF_ENDPOINT", "https_proxy", "PJRT_NAMES_AND_LIBRARY_PATHS", "OPENSSL_CONF"),
    *("MOSAIC_GPU_RUNTIME_LIB_PATH", "VLLM_NCCL_SO_PATH", "CXX", "TORCH_ADDR2LINE_BINARY", "CUDA_HOME"),
    *("TRITON_PTXAS_PATH", "TORCHINDUCTOR_CACHE_DIR", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "SSL_CERT_FILE"),
    *("JAX_BACKEND_TARGET", "USE_JAX_PROFILER_SERVER", "MEGASCALE_DEBUG_PORT", "VLLM_LOOPBACK_IP"),
    *("VLLM_SERVER_DEV_MODE", "JAX_PROFILER_SERVER_PORT"),
}
"""Variables that JAX, libtpu, torch and vLLM read: libraries, commands, code, ports, other machines."""
ALLOWED = {"LIBTPU_INIT_ARGS", "XLA_FLAGS", "HF_HOME", "VLLM_XLA_CACHE_PATH", "MY_PATH", "MODEL_IMPL_TYPE"}


def test_env_variables_that_run_code_or_open_the_server_are_reported(lowered: Any) -> None:
    opens = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_LORA_RESOLVER_CACHE_DIR"}
    unknown = {"VLLM_LOGING_LEVEL", "VLLM_WHATEVER", "MODEL_IMPL_TYP"}
    given = ", ".join(f"{name}: '1'" for name in CODE | opens | unknown | ALLOWED)
    found: dict[str, set[str]] = {}
    for one in lowered(SERVED, f"serve.env={{{given}}}").diagnostics:
        found.setdefault(one.code, set()).add(one.path.removeprefix("serve.env."))
    assert (found["E0629"], found["W0659"]) == (CODE, opens)
    assert unknown == found["W0632"] - CODE - opens
    assert "W0659" not in {
        one.code for one in lowered(SERVED, "serve.env={VLLM_ALLOW_RUNTIME_LORA_UPDATING: '0'}").diagnostics
    }


def test_unknown_or_unfit_tool_call_parser_is_reported(codes: Codes) -> None:
    assert "E0631" in codes(SERVED, "serve.tool_call_parser=mine")
    # Known, but made for other markup.
    assert codes(SERVED, "serve.tool_call_parser=hermes") >= {"W0619"}


def test_every_flag_of_the_artifacts_is_valid_for_vllm(root: Path) -> None:
    several = "serve.data_parallel_size=2"
    sets: list[tuple[str, ...]] = [
        (),
        ("serve.tool_call_parser=gemma4", "serve.prefix_caching=false", "serve.quantization=fp8"),
        (
            "serve.weights=adapter",
            "serve.env={MODEL_IMPL_TYPE: vllm}",
            "serve.tensor_parallel_size=4",
            several,
        ),
        ("serve.model=google/gemma-4-31B-it", "model.revision=main", "serve.weights=adapter"),
    ]
    seen = set()
    for path in sorted((root / "recipes").glob("*-v*.yaml"))[::4]:
        for changes in sets:
            recipe = load(path, changes).recipe
            assert recipe is not None
            if recipe.serve is None:
                continue
            given = container(recipe, "gemma4").flags
            for words in given:
                name, _, value = words[0].removeprefix("--").partition("=")
                flag = vllm.find(name)
                assert flag is not None, words
                seen.add(flag.name)
                values: Any = [*words[1:], *([value] if value else [])]
                whole = True if not values else values if flag.many else values[0]
                assert said(name, whole) == [], words
    assert seen >= {"max-lora-rank", "lora-modules", "tool-call-parser", "host", "port", "data-parallel-size"}


def test_max_lora_rank_is_the_smallest_allowed_rank_that_fits(lowered: Any) -> None:
    torchax = "serve.env={MODEL_IMPL_TYPE: vllm}"
    base = (SERVED, torchax, "serve.weights=adapter")
    for rank, pattern, flag in ((8, 8, "8"), (9, 9, "16"), (8, 100, "128"), (300, 8, "320"), (512, 1, "512")):
        sets = (*base, f"lora.rank={rank}", f"lora.rank_pattern={{q_proj: {pattern}}}")
        program = lowered(*sets).program
        assert program is not None
        words = container(program.recipe, "gemma4").entrypoint
        assert words[words.index("--max-lora-rank") + 1] == flag
    assert "E0646" in {d.code for d in lowered(*base, "lora.rank=513").diagnostics}
    pattern = "lora.rank_pattern={q_proj: 600}"
    (found,) = [d for d in lowered(*base, pattern).diagnostics if d.code == "E0646"]
    assert (found.path, "rank 600" in found.message) == ("lora.rank_pattern.q_proj", True)


def test_flag_catalog_is_read_only_for_recipes_with_serve(root: Path) -> None:
    """Check without the packages that training needs."""
    check = (
        "import sys; from pathlib import Path; from recipec.spec.load import load; "
        "from recipec.compiler.lower import lower; "
        "from recipec.compiler.vllm.flags import catalog; "
        "lower(load(Path(sys.argv[1]))); print(catalog.cache_info().currsize, 'jax' in sys.modules)"
    )
    for name, reads in (("quickstart", 0), ("gemma4-31b-v5p8", 1)):
        path = root / "recipes" / f"{name}.yaml"
        done = subprocess.run([sys.executable, "-c", check, path], cwd=root, capture_output=True, text=True)
        assert done.stdout.split() == [str(reads), "False"], done.stderr


def test_help_for_a_double_negation_is_no_new_name_for_the_same_value() -> None:
    (found,) = problems("no_async_scheduling", False)
    assert found.help == "write `async_scheduling: true`"
