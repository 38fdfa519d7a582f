"""Tests of the catalog of vLLM's flags, and of `recipe check`, against vllm-tpu's own parser.

No TPU is needed. The tests install the serving environment in build/ if it is missing (7 GB, some minutes).
One process parses all command lines, which takes one to three minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import catalog
from recipec.compiler.catalog import architecture_class, class_name
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from recipec.compiler.plan.server_step import environment as serve_environment
from recipec.compiler.plan.server_step.compile import config_of
from recipec.compiler.roofline.server_memory import DTYPES
from recipec.compiler.vllm import blocks, features
from recipec.compiler.vllm import flags as vllm
from recipec.compiler.vllm.container import container
from recipec.compiler.vllm.flags import RENAMED, problems
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.peft.peft_names import UNCHANGED_BASE, refused_parts
from recipec.spec.language import Serve
from recipec.spec.load import load
from tests.e2e.flag_values import ACCEPTED, DOTTED, FOUR_HEADS, REFUSED, SMALL, STRICTER, UNREADABLE, VALUES

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent
SECONDS = 1800

VISION = {"model_type": "gemma4_vision", "default_output_length": 280}


@dataclass(frozen=True)
class Answers:
    """The results of the parser's process.

    Attributes:
        lines: "" or a refusal, by name and JSON value.
        engines: by case.
        blocks, pages: by case, in the order of `_shapes`.
        features: facts from the sources.
        adapters: "" or a refusal, in the order of ADAPTERS.
        seconds: for the command lines and for the configurations.
    """

    lines: Mapping[tuple[str, str], str]
    engines: Mapping[str, Mapping[str, Any]]
    blocks: list[int]
    pages: list[int]
    features: Mapping[str, Any]
    adapters: list[str]
    seconds: tuple[float, float]


@pytest.fixture(scope="module")
def python(root: Path) -> Iterator[Path]:
    """Return the Python of the serving environment in build/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(serve_environment.VARIABLE, str(root / "build" / "serve-0.32.0"))
        yield serve_environment.make(print)


def of_another_jax() -> dict[str, str]:
    """Return an environment for a process whose jax does not know all XLA flags of this process."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


@pytest.fixture(scope="module")
def served(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lowered]:
    """Lower every recipe that serves, and also with its adapter next to the base if it has one."""
    found: dict[str, Lowered] = {}
    for path in sorted((root / "recipes").glob("*.yaml")):
        recipe = load(path).recipe
        if recipe is None or recipe.serve is None:
            continue
        found[path.stem] = lower(load(path))
        if recipe.lora is None:
            continue
        env = {**recipe.serve.env, "MODEL_IMPL_TYPE": "vllm"}
        sets = [f"serve.env={json.dumps(env)}", "serve.weights=adapter"]
        found[f"{path.stem}, adapter"] = lower(load(path, sets))
    assert len(found) >= 6
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Lowered]:
    folder = tmp_path_factory.mktemp("small")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(FOUR_HEADS))
    write_tokenizer(folder / "model", "llama")
    (folder / "small.yaml").write_text(SMALL)
    return lambda *sets: lower(load(folder / "small.yaml", sets))


@pytest.fixture(scope="module")
def answers(
    python: Path,
    served: dict[str, Lowered],
    small: Callable[..., Lowered],
    tmp_path_factory: pytest.TempPathFactory,
) -> Answers:
    """Run all checks of the parser in one process."""
    folder = tmp_path_factory.mktemp("parser")
    engines = {name: engine(folder, _program(found)) for name, found in served.items()}
    model = folder / "small"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(FOUR_HEADS))
    write_tokenizer(model, "llama")
    for name, sets in [*((n, s) for n, (s, _) in REFUSED.items()), *ACCEPTED.items()]:
        engines[name] = small_engine(model, small, sets)
    asked = {
        "lines": [vllm.words(name, value) for name, value in samples()],
        "engines": list(engines.values()),
        "blocks": shapes(),
        "pages": shapes(),
        "architectures": ARCHITECTURES,
        "adapters": [{**ADAPTER, **changes} for changes in ADAPTERS],
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    command = [python, HERE / "vllm_parser.py", folder / "asked.json", folder / "answers.json"]
    done = subprocess.run(command, text=True, stderr=subprocess.PIPE, timeout=SECONDS, env=of_another_jax())
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads((folder / "answers.json").read_text())
    names = [(name, json.dumps(value)) for name, value in samples()]
    return Answers(
        lines=dict(zip(names, got["lines"], strict=True)),
        engines=dict(zip(engines, got["engines"], strict=True)),
        blocks=got["blocks"],
        pages=got["pages"],
        features=got["features"],
        adapters=got["adapters"],
        seconds=(got["lines_seconds"], got["engines_seconds"]),
    )


ADAPTER = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
ADAPTERS: tuple[dict[str, Any], ...] = (
    {},
    *({"use_rslora": True}, {"rank_pattern": {"q_proj": 16}}, {"alpha_pattern": {"q_proj": 4}}),
    *({"use_dora": True}, {"lora_bias": True}, {"bias": "all"}, {"layer_replication": [[0, 2]]}),
    *({"modules_to_save": ["embed_tokens"]}, {"modules_to_save": ["model.norm"]}, {"modules_to_save": []}),
    *({"alora_invocation_tokens": [1, 2]}, {"use_bdlora": {"nblocks": 2}}, {"use_qalora": True}),
    *({"init_lora_weights": init} for init in (True, False, "pissa", "pissa_niter_4", "olora", "loftq")),
    *({"init_lora_weights": init} for init in ("corda", *UNCHANGED_BASE)),
)
"""Changes of an adapter_config.json. trainable_token_indices is missing: the loader refuses its tensors."""

ARCHITECTURES = sorted(
    {f"{class_name({'model_type': family.model_types[-1]})}ForCausalLM" for family in FAMILIES.values()}
    | {architecture_class(entry["config"]) for entry in catalog.entries().values() if "config" in entry}
    | {*features.features()["models"]["jax"]}
)
"""The classes in config.json of the families' checkpoints, and those that tpu-inference implements."""


def samples() -> list[tuple[str, Any]]:
    """Return flags with values: a few values for every flag, and all values for one flag of each kind."""
    out: list[tuple[str, Any]] = []
    kinds = set()
    for flag in {flag.name: flag for flag in vllm.flags().values()}.values():
        if flag.name in UNREADABLE:
            continue
        kind = (flag.type, flag.nargs, flag.optional, flag.negated, bool(flag.choices))
        few = [True, False, "x", 1, ["1"], *flag.choices[:1]]
        values = few if kind in kinds else [*VALUES, *flag.choices, *(word.upper() for word in flag.choices)]
        kinds.add(kind)
        out += [(flag.name, value) for value in values]
        if flag.negated:
            out += [(f"no_{flag.name}", value) for value in (True, "x")]
        out += [(alias, 1) for alias in flag.aliases]
        if flag.type == "object":
            out += [(f"{flag.name}.zzz", 1), (flag.name, {"zzz": 1})]
    out += [*DOTTED, *STRICTER]
    out += [(name, 1) for name in (*RENAMED, "gpu_memory_utilisation", "enable-zzz", "q")]
    return out


def stricter() -> list[tuple[str, Any]]:
    """Return values that only `recipe check` refuses.

    They include an empty list for a flag with an optional value, where the command line has only the flag.
    """
    switches = [flag.name for flag in vllm.flags().values() if flag.type == "switch" or flag.nargs == "?"]
    return [*STRICTER, *((name, []) for name in switches)]


def shapes() -> list[dict[str, Any]]:
    """Return key/value heads per device, with the other factors of the sizes of pages and blocks."""
    return [
        {
            "version": version,
            "number_bytes": number_bytes,
            "query_heads": 8 * heads,
            "heads": heads,
            "head_dim": head_dim,
            "max_model_len": length,
            "sequences": sequences,
            "page": blocks.page_tokens(sized(length, sequences)),
        }
        for version in (5, 6, 7)
        for number_bytes in (1, 2)
        for heads in (1, 2, 3, 8)
        for head_dim in (128, 256)
        for length, sequences in ((600, 64), (4096, 64), (16384, 64), (131072, 512))
    ]


def sized(max_model_len: int, max_num_seqs: int) -> Any:
    """Make a `serve` section with these sizes."""
    return Serve(max_model_len=max_model_len, max_num_seqs=max_num_seqs)


def _program(found: Lowered) -> Program:
    assert found.program is not None, [d.message for d in found.diagnostics if d.severity == "error"]
    return found.program


def engine(folder: Path, program: Program) -> dict[str, Any]:
    """Return the artifact's command line for a folder with the model's config.json and a tokenizer."""
    model = folder / program.name
    if not model.exists():
        model.mkdir()
        config = config_of(program)
        if program.family.name == "gemma4" and "text_config" in config:
            # The published checkpoint's layout. The catalog omits its vision tower.
            config |= {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": VISION}
        (model / "config.json").write_text(json.dumps(config))
        write_tokenizer(model, program.family.name)
    made = container(program.recipe, program.family.name)
    words = [str(model), *made.entrypoint[3:]]
    return {"words": words, "environment": {**made.environment, "HF_HUB_OFFLINE": "1"}}


def small_engine(model: Path, small: Callable[..., Lowered], sets: tuple[str, ...]) -> dict[str, Any]:
    """Return a command line of the small recipe, even if `recipe check` refuses the recipe."""
    base = _program(small())
    recipe = load(base.source, sets).recipe
    assert recipe is not None
    made = container(recipe, base.family.name)
    return {
        "words": [str(model), *made.entrypoint[3:]],
        "environment": {**made.environment, "HF_HUB_OFFLINE": "1"},
    }


def test_flag_catalog_matches_the_installed_vllm(python: Path, root: Path) -> None:
    script = root / "scripts" / "vllm_flags.py"
    done = subprocess.run(
        [python, script], text=True, capture_output=True, timeout=SECONDS, env=of_another_jax()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    committed = vllm.DATA.read_text(encoding="utf-8")
    hint = "run: build/serve-0.32.0/bin/python scripts/vllm_flags.py > compiler/data/vllm.json"
    assert done.stdout == committed, hint
    assert vllm.catalog()["packages"] == features.features()["packages"]


def test_vllm_configures_every_recipe_server_as_written(answers: Answers, served: dict[str, Lowered]) -> None:
    for name, found in served.items():
        recipe, made = _program(found).recipe, answers.engines[name]
        serve = recipe.serve
        assert serve is not None and made["refused"] is None, (name, made)
        assert made["tensor_parallel"] == serve.tensor_parallel_size
        assert made["data_parallel"] == serve.data_parallel_size
        assert made["max_model_len"] == serve.max_model_len
        assert made["max_num_seqs"] == serve.max_num_seqs
        assert made["max_num_batched_tokens"] == serve.max_num_batched_tokens
        assert made["cache_dtype"] == serve.kv_cache_dtype
        assert made["prefix_caching"] == serve.prefix_caching
        assert made["page"] == blocks.page_tokens(serve)
        assert (made["host"], made["port"]) == (serve.host, serve.port)
        assert made["trust_remote_code"] is False
        adapter = serve.weights == "adapter"
        assert made["served"] == f"{recipe.name}-base" if adapter else recipe.name
        assert made["lora"] == (features.max_lora_rank(recipe) if adapter else None)
        assert made["lora_modules"] == ([[recipe.name, "/adapter"]] if adapter else [])
    print(f"{len(answers.engines)} configurations in {answers.seconds[1]:.0f} s")


@pytest.mark.parametrize("name", REFUSED)
def test_recipe_check_reports_an_error_where_vllm_refuses(
    name: str, answers: Answers, small: Callable[..., Lowered]
) -> None:
    sets, code = REFUSED[name]
    print(name, "-", answers.engines[name]["refused"])
    assert answers.engines[name]["refused"]
    assert code in {d.code for d in small(*sets).diagnostics}


@pytest.mark.parametrize("name", ACCEPTED)
def test_recipe_check_reports_no_error_where_vllm_accepts(
    name: str, answers: Answers, small: Callable[..., Lowered]
) -> None:
    assert answers.engines[name]["refused"] is None
    errors = {d.code for d in small(*ACCEPTED[name]).diagnostics if d.severity == "error"}
    assert errors == ({"E0631"} if name == "an unknown tool-call parser" else set())


def test_recipe_check_and_vllm_parser_agree_on_flag_values(answers: Answers) -> None:
    differing, refused = [], 0
    for name, value in samples():
        ours = [problem.message for problem in problems(name, value)]
        theirs = answers.lines[(name, json.dumps(value))]
        refused += bool(theirs)
        if bool(ours) != bool(theirs) and (name, value) not in stricter():
            differing.append((name, value, ours, theirs))
    for name, value in STRICTER:
        assert answers.lines[(name, json.dumps(value))] == "" and list(problems(name, value))
    print(f"{len(answers.lines)} flags with values, {refused} refused, in {answers.seconds[0]:.0f} s")
    assert refused > 500 and len(answers.lines) - refused > 500
    assert not differing, "\n".join(map(str, differing[:60]))


def test_page_and_block_sizes_match_the_attention_kernel(answers: Answers) -> None:
    for shape, page, block in zip(shapes(), answers.pages, answers.blocks, strict=True):
        serve = sized(shape["max_model_len"], shape["sequences"])
        assert blocks.page_tokens(serve) == page, shape
        sizes = (shape["heads"], shape["head_dim"], shape["number_bytes"])
        assert blocks.default_block(serve, *sizes) == block, shape
    assert {number_bytes for _, number_bytes in DTYPES.values()} == {1, 2}


def test_feature_catalog_matches_the_vllm_sources(answers: Answers) -> None:
    known, found = features.features(), answers.features
    ways = {name: features.implementation({"architectures": [name]}) for name in ARCHITECTURES}
    assert found["models"] == ways
    adapted = {name: features.takes_adapters({"architectures": [name]}) for name, way in ways.items() if way}
    assert found["adapters"] == adapted
    assert found["jax_adapters"] is known["adapters"]["jax_models"] is False
    assert found["refused_in_one_process"] is not known["adapters"]["single_process_data_parallel"]
    fields = {"use_rslora", "rank_pattern", "alpha_pattern"}
    assert fields <= set(found["adapter_fields"])
    structured = known["structured_outputs"]
    assert structured["backends"] == sorted(["auto", *found["backends"]])
    assert found["structured_in_one_process"] is structured["single_process_data_parallel"] is False


def test_adapters_are_refused_where_vllm_refuses_them(answers: Answers) -> None:
    for changes, refusal in zip(ADAPTERS, answers.adapters, strict=True):
        assert bool(refused_parts({**ADAPTER, **changes})) == bool(refusal), (changes, refusal)
    assert 5 < sum(map(bool, answers.adapters)) < len(ADAPTERS)
