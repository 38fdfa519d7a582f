"""Entries of the catalog: their sizes against Tunix's configs, and against what is published."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
from typing import Any

import pytest

from recipec.compiler import catalog
from recipec.compiler.catalog import quantized_checkpoints
from recipec.runtime.model.families import FAMILIES, Architecture, Family
from recipec.runtime.model.families.decoder_family import DecoderArchitecture, DecoderFamily
from recipec.runtime.model.families.family import FULL, SLIDING

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ENTRIES = {name: entry for name, entry in catalog.entries().items() if "unsupported" not in entry}
CLASSMETHODS = {
    "google/gemma-4-E2B": "gemma4_e2b",
    "google/gemma-4-E4B": "gemma4_e4b",
    "google/gemma-4-26B-A4B": "gemma4_26b_a4b",
    "google/gemma-4-31B": "gemma4_31b",
    "google/gemma-3-270m": "gemma3_270m",
    "google/gemma-3-1b-pt": "gemma3_1b_pt",
    "google/gemma-3-4b-pt": "gemma3_4b_pt",
    "google/gemma-3-12b-pt": "gemma3_12b_pt",
    "google/gemma-3-27b-pt": "gemma3_27b_pt",
}
"""The base models that Tunix has a ModelConfig of; a tuned one has its base's sizes (tested below)."""
DENSE_CLASSMETHODS = {
    "meta-llama/Meta-Llama-3-8B": "llama3p1_8b",
    "meta-llama/Llama-3.1-8B": "llama3p1_8b",
    "meta-llama/Llama-3.1-70B": "llama3p1_70b",
    "meta-llama/Llama-3.2-1B": "llama3p2_1b",
    "meta-llama/Llama-3.2-3B": "llama3p2_3b",
    "Qwen/Qwen2.5-0.5B": "qwen2p5_0p5b",
    "Qwen/Qwen2.5-1.5B": "qwen2p5_1p5b",
    "Qwen/Qwen2.5-3B": "qwen2p5_3b",
    "Qwen/Qwen2.5-7B": "qwen2p5_7b",
    "Qwen/Qwen3-0.6B": "qwen3_0p6b",
    "Qwen/Qwen3-1.7B": "qwen3_1p7b",
    "Qwen/Qwen3-4B": "qwen3_4b",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen3_4b_instruct_2507",
    "Qwen/Qwen3-8B": "qwen3_8b",
    "Qwen/Qwen3-14B": "qwen3_14b",
    "Qwen/Qwen3-32B": "qwen3_32b",
}
"""Models of our own decoder that Tunix has a ModelConfig of, one for each size."""
PUBLISHED = {
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen/Qwen3-Coder-Next": 79_674_391_296,
    "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16": 3_973_556_832,
    "openai/gpt-oss-120b": 116_829_156_672,
    "mistral-community/Mixtral-8x22B-v0.1": 140_620_634_112,
    "allenai/OLMoE-1B-7B-0125-Instruct": 6_919_161_856,
    "ibm-granite/granite-3.1-3b-a800m-base": 3_298_788_864,
    "ibm-granite/granite-4.0-micro": 3_402_836_480,
    "ibm-granite/granite-4.0-h-tiny": 6_939_037_248,
    "ai21labs/Jamba-v0.1": 51_570_323_328,
    "LiquidAI/LFM2-2.6B": 2_569_272_320,
    "Qwen/Qwen3.5-122B-A10B": 122_111_526_912,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-4-12B": 11_959_730_224 - 52_379_904,  # without the tensors for images and sound
    "ibm-granite/granite-3.1-2b-base": 2_533_531_648,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "bigcode/starcoder2-15b": 15_957_889_024,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "ByteDance-Seed/Seed-OSS-36B-Base": 36_151_104_512,
    "zai-org/glm-4-9b-chat-hf": 9_399_951_360,
    "baidu/ERNIE-4.5-0.3B-PT": 360_748_032,
    "allenai/OLMo-1B-hf": 1_176_764_416,
    "deepseek-ai/DeepSeek-V2.5": 235_741_434_880,
    "CohereLabs/c4ai-command-a-03-2025": 111_057_580_032,
    "EleutherAI/pythia-12b": 11_846_072_320,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "microsoft/phi-2": 2_779_683_840,
    "stabilityai/stablelm-2-1_6b": 1_644_515_328,
    "swiss-ai/Apertus-8B-Instruct-2509": 8_053_338_240,
    "tiiuae/Falcon-H1-7B-Instruct": 7_585_654_880,
    "tiiuae/falcon-7b": 7_217_189_760 - 65_024 * 4544,  # the checkpoint stores the tied head again
}
"""Parameters of published checkpoints of each kind, as Hugging Face counts them."""
GEMMA2: dict[str, tuple[str, dict[str, int]] | None] = {
    "google/gemma-2-2b": ("gemma2_2b", {"num_embed": 256_000}),
    "google/gemma-2-9b": ("gemma2_9b", {"num_embed": 256_000, "hidden_dim": 14_336}),
    "google/gemma-2-27b": None,
}
"""Gemma 2's base models: the name of Tunix's ModelConfig, and where the published checkpoints differ from
it (128 rows of its embedding are padding; its 9B has the widths of gate and up together). It has no 27B."""
IMAGE_ROWS = 64
"""Rows that Gemma 3's published multimodal checkpoints have after the 262,144 of Tunix's ModelConfig."""


def model_of(name: str) -> tuple[Family, Architecture]:
    entry = ENTRIES[name]
    family = FAMILIES[entry["family"]]
    return family, family.architecture(entry["config"])


@pytest.mark.parametrize("name", [*CLASSMETHODS, *(name for name, known in GEMMA2.items() if known)])
def test_gemma_sizes_equal_the_tunix_config(name: str) -> None:
    family, a = model_of(name)
    assert isinstance(a, DecoderArchitecture)
    folder = {"gemma2": "gemma"}.get(family.name, family.name)
    known = importlib.import_module(f"tunix.models.{folder}.model")
    method, changed = GEMMA2.get(name) or (CLASSMETHODS.get(name, ""), {})
    theirs = getattr(known.ModelConfig, method)()
    if ENTRIES[name]["config"]["model_type"] == "gemma3":
        changed = {"num_embed": theirs.num_embed + IMAGE_ROWS}
    ours: dict[str, Any] = {
        "num_layers": a.num_layers,
        "num_embed": a.vocab_size,
        "embed_dim": a.hidden_size,
        "hidden_dim": a.intermediate_size,
        "num_heads": a.num_heads,
        "num_kv_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "sliding_window_size": a.sliding_window,
    }
    if family.name in ("gemma2", "gemma4"):
        ours["final_logit_softcap"] = a.logit_softcap
    if family.name == "gemma2":
        ours["attn_logits_soft_cap"] = a.score_softcap
    else:
        ropes = dict(a.ropes)
        ours["local_base_frequency"] = ropes[SLIDING].theta
        ours["global_base_frequency"] = ropes[FULL].theta
    if family.name == "gemma3":
        ours["global_scale_factor"] = ropes[FULL].factor
    if family.name == "gemma4":
        assert a.full_heads is not None
        ours["global_key_size"] = a.full_heads.head_dim
        ours["k_eq_v_global"] = a.k_eq_v
        ours["global_rope_proportion"] = ropes[FULL].share
        ours["per_layer_input_dim"] = a.per_layer_input
        assert a.full_heads.kv_heads == (theirs.num_global_kv_heads or theirs.num_kv_heads)
        assert a.kv_shared_layers == round(theirs.frac_shared_layers * theirs.num_layers)
        assert (a.wide_mlp or a.intermediate_size) == (
            theirs.override_kv_shared_ffw_hidden or theirs.hidden_dim
        )
        assert a.routing == (theirs.num_experts or 0, theirs.num_experts_per_tok or 0)
        assert theirs.expert_dim == (None if a.experts is None else a.experts.size)
    expected = {key: changed.get(key, getattr(theirs, key)) for key in ours}
    assert ours == expected
    kinds = {FULL: "GLOBAL", SLIDING: "LOCAL_SLIDING"}
    pattern = getattr(theirs, "attention_pattern", None) or getattr(theirs, "attention_types", ())
    if pattern:
        repeated = [pattern[i % len(pattern)].name for i in range(a.num_layers)]
        assert repeated == [kinds[kind] for kind in a.layer_types]


@pytest.mark.parametrize("name", DENSE_CLASSMETHODS)
def test_dense_model_sizes_equal_the_tunix_config(name: str) -> None:
    """Computed by our own decoder; Tunix's ModelConfig knows the sizes from another hand."""
    family, a = model_of(name)
    assert isinstance(a, DecoderArchitecture)
    folder = {"llama": "llama3"}.get(family.name, family.name)
    known = importlib.import_module(f"tunix.models.{folder}.model").ModelConfig
    theirs = getattr(known, DENSE_CLASSMETHODS[name])()
    ours = {
        "num_layers": a.num_layers,
        "vocab_size": a.vocab_size,
        "embed_dim": a.hidden_size,
        "hidden_dim": a.intermediate_size,
        "num_heads": a.num_heads,
        "num_kv_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "norm_eps": a.norm.eps,
    }
    assert ours == {key: getattr(theirs, key) for key in ours}
    assert a.tied == getattr(theirs, "use_tied_embedding", getattr(theirs, "weight_tying", None))


def test_decoder_entries_match_the_size_and_chat_word_in_their_name() -> None:
    """To a quarter; and what is called a chat model is one, what is called a base is none. Names, shapes and
    defaults are held against transformers in test_families.py. A number of experts, and of active parameters,
    is no size."""
    totals: dict[str, int] = {}
    for name, entry in ENTRIES.items():
        family, a = model_of(name)
        if not isinstance(a, DecoderArchitecture):
            continue
        words = re.sub(r"(?<=\d)_(?=\d)", ".", name.lower())  # stablelm-2-1_6b
        if sizes := re.findall(r"(?<![\d.xae])([\d.]+)([bm])(?![a-z]|-\d+e)", words):
            config = json.dumps(entry["config"], sort_keys=True)
            if config not in totals:
                totals[config] = sum(math.prod(p.shape) for p in family.parameters(a))
            total = totals[config]
            number, letter = sizes[-1]
            unit = {"b": 1e9, "m": 1e6}[letter]
            assert total / unit == pytest.approx(float(number), rel=0.25, abs=0.7), name
        if re.search(r"instruct|chat|-it$|think|reasoning|distill", words):
            assert entry["chat"] is True, name
        elif words.endswith("base"):
            assert entry["chat"] is not True, name


def test_every_architecture_can_be_written_as_json_in_a_lock() -> None:
    """JSON has no infinity: recipe.lock.json is written without it."""
    for name in {entry["family"]: name for name, entry in ENTRIES.items()}.values():
        json.dumps(dataclasses.asdict(model_of(name)[1]), allow_nan=False)


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    family, architecture = model_of(name)
    assert sum(math.prod(p.shape) for p in family.parameters(architecture)) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama 3.1 8B"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "Qwen 2.5 Coder 7B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen 3 4B Instruct 2507"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen 3 Coder 30B-A3B"),
        ("unsloth/gpt-oss-120b-BF16", "gpt-oss 120B"),
        ("ibm-granite/granite-3.1-3b-a800m-base", "Granite 3.1 3B-A800M"),
        ("mistralai/Mistral-7B-v0.3", "Mistral 7B v0.3"),
        ("microsoft/phi-1_5", "Phi 1.5"),
        ("mistralai/Ministral-3-3B-Instruct-2512-BF16", "Ministral 3 3B Instruct 2512"),
    ],
)
def test_catalog_ids_have_readable_titles(model: str, title: str) -> None:
    assert model in ENTRIES
    assert catalog.title(model) == title


def test_every_gemma_entry_has_a_tested_base_model() -> None:
    """A tuned model is its base with another chat flag, so that the tests above cover it. Tunix has all but
    Gemma 4 12B, whose published size is known."""
    gemma = {name: entry for name, entry in ENTRIES.items() if name.startswith("google/gemma-")}
    gemma = {name: entry for name, entry in gemma.items() if entry["family"] != "gemma1"}
    assert {*CLASSMETHODS, *GEMMA2} <= gemma.keys()
    for name, entry in gemma.items():
        base = name.removesuffix("-it")
        base = base if base in ENTRIES else f"{base}-pt"
        assert base in CLASSMETHODS or base in GEMMA2 or base in PUBLISHED
        assert entry["config"] == ENTRIES[base]["config"]
        assert entry["chat"] is name.endswith("-it")


def test_fp8_weights_are_assumed_only_for_the_publishers_id(tmp_path) -> None:
    """Another publisher's copy may have plain weights: its name tells nothing."""
    stored = {name for name in ENTRIES if quantized_checkpoints.by_config(ENTRIES[name]["config"])}
    assert {name.partition("/")[0] for name in stored} == {"mistralai", "MiniMaxAI", "deepseek-ai"}
    for name in stored:
        assert quantized_checkpoints.by_config(catalog.find(name, tmp_path).config) == "FP8"
    copy = catalog.find("unsloth/Ministral-3-3B-Instruct-2512", tmp_path)
    assert quantized_checkpoints.by_config(copy.config) is None
    assert copy.architecture == catalog.find("mistralai/Ministral-3-3B-Base-2512", tmp_path).architecture


def test_every_decoder_family_has_a_planned_or_shipped_model() -> None:
    from scripts import families

    decoders = {name for name, family in FAMILIES.items() if isinstance(family, DecoderFamily)}
    assert {*families.PLANNED, *families.SHIPPED} == decoders
    assert not families.PLANNED.keys() & families.SHIPPED


def test_models_page_matches_models_json() -> None:
    from scripts import families

    assert families.page(families.read()) == families.PAGE.read_text(encoding="utf-8")
