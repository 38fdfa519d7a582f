"""Check merged weights in eight bits: what vLLM-TPU loads, by model family and chip.

The table shows what tpu-inference 0.32.0 does. Its JAX models (Gemma 4, Qwen 3) load channel-wise fp8 and
refuse int8. Its Qwen 2 loads fp8 and fails in the first forward pass. Its Llama reads no scales. Gemma 2 and
3 use vLLM's own models on torchax, as every model does with MODEL_IMPL_TYPE=vllm; those load both formats.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler.catalog import facts_of
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.vllm.features import runs_jax_model
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

E0604 = Code(
    "E0604",
    "no fp8 weights",
    cause="This chip generation has no fp8. fp8 models do not run on v5e (tpu-inference issue 1262). "
    "With `weights: adapter`, the base is served as it is published, which may be in FP8.",
    cure="Write `quantization: null` in serve or merge, or `weights: merged`, or use v6e or tpu7x.",
)

E0620 = Code(
    "E0620",
    "quantized twice",
    cause="merge.quantization writes weights that name their own quantization. vLLM refuses a second "
    "one from a flag.",
    cure="Use only one of serve.quantization and merge.quantization.",
)

E0621 = Code(
    "E0621",
    "quantized weights that the server cannot run",
    cause="tpu-inference's JAX model of the family does not run this format. It does not implement "
    "int8, and some of its models do not read scales.",
    cure="Use the format that the message names, `quantization: null`, or vLLM's own model with "
    "MODEL_IMPL_TYPE.",
)

N0622 = Code(
    "N0622",
    "quantized weights that are untested",
    cause="The server runs vLLM's own model on torchax. Its source code supports the format, but it "
    "was not tested.",
    cure="Run serve/smoke.sh against the server before you rely on it.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    recipe, accelerator = facts.recipe, facts.serve_accelerator
    serve, kind = recipe.serve, recipe.merge.quantization
    if serve is None or kind is None or serve.weights != "merged":
        return
    where = "merge.quantization"
    if serve.quantization is not None:
        yield Diagnostic(
            E0620,
            f"the merged weights are already {kind}, and vLLM refuses --quantization {serve.quantization} "
            "with them",
            "serve.quantization",
            "quantization: null",
        )
    if kind == "fp8" and accelerator is not None and not accelerator.fp8_matmul:
        yield Diagnostic(
            E0604,
            f"quantization fp8: {accelerator.generation} has no fp8, and vllm-tpu does not run fp8 weights "
            "on it",
            where,
            "quantization: null, or serve: {accelerator: v6e-8}",
        )
    if facts.model is None:
        return
    title = facts.model.title
    formats = facts_of(facts.model.family.name).served.eight_bit
    if not runs_jax_model(facts.model.config, serve):
        yield Diagnostic(
            N0622,
            f"vllm-tpu runs {title} with vLLM's own model on torchax, which supports {kind} weights by its "
            "source code; this was not tested",
            where,
            "run serve/smoke.sh against the server before you rely on it",
        )
    elif kind not in formats:
        ways = [f"quantization: {formats[0]}"] if formats else ["quantization: null"]
        yield Diagnostic(
            E0621,
            f"vllm-tpu's own model of {title} does not run {kind} weights",
            where,
            f"{ways[0]}; or serve: {{env: {{MODEL_IMPL_TYPE: vllm}}}} for vLLM's own model, untested",
        )
