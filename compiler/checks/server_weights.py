"""Check what is served, and to whom: the weights' origin, adapters, the address, replicas."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from recipec.compiler import catalog
from recipec.compiler.catalog import architecture_class
from recipec.compiler.checks.quantized import E0604
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.vllm import features
from recipec.compiler.vllm import flags as vllm
from recipec.compiler.vllm.weights import HUB_ID
from recipec.compiler.wording import listing, plural
from recipec.runtime.clients.hosts import is_loopback
from recipec.runtime.model.adapters import meant, principal
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import join

if TYPE_CHECKING:
    from recipec.spec.language import Recipe, Serve

FOLDER = re.compile(r"[\w./~@+=-]+")
"""Matches folders that shells, YAML, Docker and Kubernetes all read the same way."""

BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[\w.@+=-]+)*/?")

MODEL_FORMS = "./FOLDER, /FOLDER, gs://BUCKET/FOLDER, or ORGANIZATION/NAME on the Hugging Face hub"


E0639 = Code(
    "E0639",
    "minimum of replicas above the maximum",
    cause="autoscaling.min_replicas is above max_replicas.",
    cure="Swap the two values.",
)

W0660 = Code(
    "W0660",
    "model that vLLM does not have",
    cause="Neither tpu-inference nor vLLM has a model of the class that config.json names in "
    "`architectures`. vLLM runs such a checkpoint with transformers' model, or not at all "
    "(compiler/data/vllm_features.json has the classes and names the sources).",
    cure="Test the server before you rely on it, or leave the serve section out.",
)

E0663 = Code(
    "E0663",
    "the server would ignore the head",
    cause="config.json says that the output head is the embedding, but the files hold a head of other "
    "values (N0821). vLLM ignores the head of such a base, and answers otherwise than the trained "
    "model.",
    cure="Write `serve: {weights: merged}`, or set `tie_word_embeddings` to false in the base's config.json.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    recipe, serve = facts.recipe, facts.recipe.serve
    if serve is None:
        return
    if serve.model is not None:
        malformed = list(_malformed(serve.model))
        yield from malformed
        if not malformed:
            yield from _unlike(recipe, serve, serve.model)
    if facts.model is not None and features.implementation(facts.model.config) is None:
        yield Diagnostic(
            W0660,
            f"vLLM {vllm.version()} has no {architecture_class(facts.model.config)}, which the model's "
            "config.json names: it uses transformers' model instead, or does not start",
            "model.id",
            "test the server before you rely on it, or leave the serve section out",
        )
    if serve.weights == "adapter":
        yield from _adapter(facts, serve)
        if facts.model is not None and facts.model.own_head and serve.model in (None, recipe.model.id):
            yield Diagnostic(
                E0663,
                f"vLLM goes by tie_word_embeddings of config.json and ignores {facts.model.own_head} of "
                f"`{recipe.model.id}`, whose values are not the embedding's: its answers would be others",
                "serve.weights",
                "weights: merged, whose config.json says that there are two tensors",
            )
    yield from _address(serve)
    scaling = serve.autoscaling
    if scaling is not None and scaling.min_replicas > scaling.max_replicas:
        yield Diagnostic(
            E0639,
            f"min_replicas {scaling.min_replicas} is above max_replicas {scaling.max_replicas}",
            "serve.autoscaling.min_replicas",
            f"min_replicas: {scaling.max_replicas}, or max_replicas: {scaling.min_replicas}",
        )


E0642 = Code(
    "E0642",
    "malformed location of the weights",
    cause="serve.model is not a folder, gs:// address or Hugging Face id that every tool reads the same way.",
    cure="Use one of the forms that the message lists.",
)


def _malformed(model: str) -> Iterator[Diagnostic]:
    """Report what is wrong with `serve.model` as a folder, an address or an id."""
    where = "serve.model"
    if "://" in model:
        if not BUCKET.fullmatch(model) or "/../" in f"{model}/":
            yield Diagnostic(
                E0642, f"`{model}` is not a gs:// address of a folder", where, f"write {MODEL_FORMS}"
            )
    elif catalog.is_directory(model) or model.startswith("."):
        climbs = not model.startswith(("/", "~")) and ".." in model.split("/")
        if climbs:
            yield Diagnostic(
                E0642,
                f"`{model}` leaves the artifact's folder: a copy of the artifact would not find it",
                where,
                "remove the line, and name the folder with MODEL_DIR when you start the server; or write an "
                "absolute path",
            )
        elif not FOLDER.fullmatch(model) or (model.startswith("~") and not model.startswith("~/")):
            yield Diagnostic(
                E0642,
                f"shells and container engines do not all read the folder `{model}` the same way",
                where,
                "use only letters, digits and ._/@+=-",
            )
    elif not HUB_ID.fullmatch(model) or "/" not in model:
        yield Diagnostic(
            E0642,
            f"`{model}` is neither a folder nor a Hugging Face id",
            where,
            f"write {MODEL_FORMS}" + (f"; did you mean `./{model}`?" if FOLDER.fullmatch(model) else ""),
        )


N0643 = Code(
    "N0643",
    "merged weights on the hub",
    cause="serve.model is a Hugging Face id. Merging writes a folder, which you must upload there.",
    cure="Nothing, if it was uploaded. A folder starts with ./ or /.",
)

W0643 = Code(
    "W0643",
    "serve.model may name the wrong weights",
    cause="serve.model names the base although merged weights are served, or names weights that are "
    "not the adapter's base.",
    cure="Write `model: null`, which uses the weights that fit serve.weights.",
)


def _unlike(recipe: Recipe, serve: Serve, model: str) -> Iterator[Diagnostic]:
    """Report weights that probably do not match `serve.weights`."""
    where, hub = "serve.model", "://" not in model and not catalog.is_directory(model)
    if serve.weights == "merged" and model == recipe.model.id:
        yield Diagnostic(
            W0643,
            f"`{model}` is the model before training: without merged weights or an adapter the server "
            "answers like the base model",
            where,
            "model: null serves merge.output; or weights: adapter",
        )
    elif serve.weights == "merged" and hub:
        yield Diagnostic(
            N0643,
            f"the server loads `{model}` from the Hugging Face hub, so the merged weights must be there",
            where,
            f"change nothing if they were uploaded; a folder is written as ./{model}",
        )
    elif serve.weights == "adapter" and _folder(model) == _folder(recipe.merge.output):
        yield Diagnostic(
            W0643,
            f"`{model}` is the folder of the merged weights, which already contain the adapter: it would be "
            "applied twice",
            where,
            "model: null serves the adapter with its base; or weights: merged",
        )
    elif serve.weights == "adapter" and hub and model != recipe.model.id:
        yield Diagnostic(
            W0643,
            f"the adapter is trained for `{recipe.model.id}`, and would be applied to `{model}`",
            where,
            f"model: {recipe.model.id}",
        )


def _folder(path: str) -> str:
    return path.removeprefix("./").rstrip("/")


E0644 = Code(
    "E0644",
    "no adapter to serve",
    cause="serve.weights is adapter, but the recipe does not train or write one.",
    cure="Add a lora section and `merge.adapter: true`, or write `weights: merged`.",
)

E0645 = Code(
    "E0645",
    "adapter that cannot be served",
    cause="vLLM loads A and B of projections only. Its loader refuses modules that were trained whole "
    "(modules_to_save), rows of the embedding, DoRA, and on TPUs adapters of experts and routers. The "
    "JAX models of tpu-inference 0.32 have no code for LoRA at all, and the server ends during "
    "warm-up. vLLM's own models, which run on torchax, have it (compiler/data/vllm_features.json "
    "names the sources).",
    cure="Write `weights: merged`. For a model that tpu-inference runs with JAX, `MODEL_IMPL_TYPE: "
    "vllm` in serve.env also helps.",
)

E0646 = Code(
    "E0646",
    "rank too large for the server",
    cause="--max-lora-rank accepts a few sizes, and the recipe's largest rank, including "
    "rank_pattern, is above the largest of them.",
    cure="Use smaller ranks, or write `weights: merged`.",
)

N0647 = Code(
    "N0647",
    "adapter not tested on a TPU",
    cause="By its source code, vLLM's own model supports the adapter. This was tested on a CPU, not "
    "on a TPU.",
    cure="Run serve/smoke.sh against the server before you rely on it.",
)

E0648 = Code(
    "E0648",
    "adapter with several replicas in one process",
    cause="tpu-inference refuses LoRA if one process runs several replicas.",
    cure="Remove TPU_MULTIPROCESS_DP. `vllm serve` then runs each replica in its own process.",
)


def _adapter(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    """Report what vLLM refuses with `weights: adapter`, and what tpu-inference does not implement."""
    recipe, where = facts.recipe, "serve.weights"
    if recipe.lora is None or not recipe.merge.adapter:
        added = "lora: {rank: 16}" if recipe.lora is None else "merge: {adapter: true}"
        yield Diagnostic(
            E0644,
            "there is no adapter to serve: the recipe has no lora section"
            if recipe.lora is None
            else "there is no adapter to serve: merge.adapter is false",
            where,
            f"weights: merged, or add {added}",
        )
        return
    if features.max_lora_rank(recipe) is None:
        rank, largest = features.adapter_rank(recipe), features.lora_ranks()[-1]
        patterns = recipe.lora.rank_pattern
        rank_of_recipe = rank // 2 if principal(recipe.lora.init) else rank
        twice = "" if rank_of_recipe == rank else f", twice the recipe's with init: {recipe.lora.init}"
        widest = next((pattern for pattern, its in patterns.items() if its == rank_of_recipe), None)
        yield Diagnostic(
            E0646,
            f"the adapter has rank {rank}{twice}, and vLLM {vllm.version()} serves adapters up to rank "
            f"{largest}",
            join(("lora", "rank_pattern", widest)) if widest else "lora.rank",
            f"{widest or 'rank'}: {largest * rank_of_recipe // rank}, or serve: {{weights: merged}}",
        )
    if features.replicas_in_one_process(serve):
        yield Diagnostic(
            E0648,
            f"{features.ONE_PROCESS}: 0 runs {plural(serve.data_parallel_size, 'replica')} in one process, "
            "where tpu-inference refuses adapters",
            f"serve.env.{features.ONE_PROCESS}",
            "remove it",
            at_key=True,
        )
    if words := _not_served(facts):
        yield Diagnostic(
            E0645,
            f"vLLM {vllm.version()} on TPUs serves only A and B of projections, and the adapter also has "
            f"{listing(words)}",
            where,
            "weights: merged",
        )
        return
    if facts.model is None:
        return
    config, title = facts.model.config, facts.model.title
    if not features.takes_adapters(config):
        yield Diagnostic(
            E0645,
            f"vLLM {vllm.version()} does not serve adapters of {title}",
            where,
            "weights: merged",
        )
    elif features.runs_jax_model(config, serve):
        yield Diagnostic(
            E0645,
            f"tpu-inference {vllm.version()} runs {title} with its own JAX model, which does not support "
            "adapters: the server ends during warm-up",
            where,
            "weights: merged; or env: {MODEL_IMPL_TYPE: vllm} for vLLM's own model, which supports them and "
            "is untested on TPUs",
        )
    else:
        yield Diagnostic(
            N0647,
            f"by its source code, vLLM's own model of {title} on torchax supports the adapter; this was "
            "tested on a CPU, and not on a TPU",
            where,
            "run serve/smoke.sh against the server before you rely on it",
        )
        yield from _stored(facts, serve)


W0661 = Code(
    "W0661",
    "adapter on a quantized base",
    cause="The base's weights are stored quantized. Training reads them as bfloat16 and computes in "
    "bfloat16. The server loads them in their own format, and may quantize activations too.",
    cure="Use `weights: merged`, which serves the numbers that were trained. Or compare the answers first.",
)


def _stored(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    """Report a base whose weights the server computes with in another format than training."""
    base, where, chip = facts.recipe.model.id, "serve.weights", facts.serve_accelerator
    method = facts.model.stored if facts.model is not None and serve.model in (None, base) else None
    if method == "FP8" and chip is not None and not chip.fp8_matmul:
        yield Diagnostic(
            E0604,
            f"`{base}` is stored in FP8: {chip.generation} has no fp8, and vllm-tpu does not run fp8 weights "
            "on it",
            where,
            "weights: merged, or accelerator: v6e-8",
        )
    elif method is not None:
        yield Diagnostic(
            W0661,
            f"the server loads `{base}` in {method}, and the adapter is trained on its weights in bfloat16: "
            "activations in eight bits or other kernels change the answers",
            where,
            "weights: merged serves the numbers that were trained",
        )


def _not_served(facts: Facts) -> list[str]:
    """Return what the recipe trains that vLLM's loader of adapters refuses, or that is not on TPUs."""
    recipe, lora = facts.recipe, facts.recipe.lora
    if lora is None or recipe.serve is None:
        return []
    grown = recipe.model.vocab_size if recipe.serve.model in (None, recipe.model.id) else None
    sites = (target for target in facts.lora_targets if target.words and facts.within(target))
    adapted = [site.words[0] for site in sites if any(meant(t, site) for t in lora.targets)]
    others = {
        "the modules of modules_to_save": lora.modules_to_save,
        "the vision tower's adapters of lora.vision": lora.vision,
        "the rows of trainable_tokens": lora.trainable_tokens,
        "the magnitudes of kind: dora": lora.kind == "dora",
        "the rows that model.vocab_size adds to the embedding": grown,
    }
    return list(dict.fromkeys([*adapted, *(words for words, trained in others.items() if trained)]))


N0633 = Code(
    "N0633",
    "server accepts connections from other machines",
    cause="serve.host is not a loopback address. compose.yaml, serve.sh and k8s.yaml then refuse to "
    "start without VLLM_API_KEY.",
    cure="Set VLLM_API_KEY where the server runs, or write `host: 127.0.0.1`.",
)


def _address(serve: Serve) -> Iterator[Diagnostic]:
    if not is_loopback(serve.host):
        yield Diagnostic(
            N0633,
            f"the server listens on {serve.host}, which other machines can reach: it starts only with "
            "VLLM_API_KEY in its environment, and every client needs that key",
            "serve.host",
            "host: 127.0.0.1 needs no key; a key protects /v1, but not /health and /metrics",
        )
