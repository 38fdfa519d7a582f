"""Check the model: settings without effect, data types, quantization, attention and new tokens."""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler import catalog
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.wording import listing
from recipec.runtime.data.tokenizer import padded
from recipec.runtime.model.selection import trained_whole
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic

GROWTH = {"FP8": "twice", "MXFP4": "almost four times"}
"""Bytes of a weight in bfloat16, compared with the methods that are read."""

W0805 = Code(
    "W0805",
    "dropout of the model is not applied",
    cause="config.json asks for dropout within the model during training (attention_dropout and "
    "others), or for noise (router_jitter_noise). recipec does not apply it. Other libraries do.",
    cure="Use `lora.dropout` for dropout of the adapters' inputs.",
)

W0806 = Code(
    "W0806",
    "model key without effect",
    cause="A directory has no revisions, and attention dot has no blocks.",
    cure="Remove it.",
)

W0807 = Code(
    "W0807",
    "float32 on a TPU",
    cause="In float32, weights take twice the memory, and the TPU computes at a fraction of its "
    "bfloat16 rate. Tunix computes in float32 by default; artifacts always state the type.",
    cure="Write `model.dtype: bfloat16`.",
)

N0820 = Code(
    "N0820",
    "weights are read as bfloat16",
    cause="The checkpoint stores weights in FP8 with `weight_scale_inv`, or gpt-oss's experts in "
    "MXFP4. train.py and merge.py read them as the bfloat16 numbers that they represent, as "
    "transformers does with `dequantize=True`. The merged checkpoint has bfloat16 weights and no "
    "`quantization_config`.",
    cure="Nothing, if there is room. An unquantized original has more exact numbers. "
    "`merge.quantization` writes merged weights in eight bits.",
)

N0821 = Code(
    "N0821",
    "the head is a tensor of its own",
    cause="config.json says `tie_word_embeddings: true`, but the files hold an output head whose "
    "values differ from the embedding's. transformers then does not tie the two, and neither do "
    "train.py and merge.py. vLLM goes by config.json alone and would ignore the head, so the merged "
    "config.json says `tie_word_embeddings: false`.",
    cure="Nothing, if the head is meant. Otherwise remove it from the files; the embedding is then the head.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    section = facts.recipe.model
    if catalog.is_directory(section.id) and section.revision is not None:
        yield Diagnostic(
            W0806,
            f"model.revision has no effect: `{section.id}` is a directory",
            "model.revision",
            "remove it, or write the Hugging Face id as model.id",
        )
    if section.dtype == "float32" and facts.accelerator is not None and facts.accelerator.platform == "tpu":
        yield Diagnostic(
            W0807,
            "the base weights are stored and computed in float32: this takes twice the memory of bfloat16, "
            "and the TPU computes at a fraction of its bfloat16 rate",
            "model.dtype",
            "dtype: bfloat16; adapters and optimizer state stay float32 (lora.dtype)",
        )
    if facts.model is not None and (method := facts.model.stored) is not None:
        yield Diagnostic(
            N0820,
            f"`{section.id}` is stored in {method}: its weights are trained and merged as bfloat16, which "
            f"takes {GROWTH[method]} the bytes in memory and on disk",
            "model.id",
            "change nothing, or use the model's unquantized original if it is published; merge.quantization "
            "writes eight bits again",
        )
    if facts.model is not None and (head := facts.model.own_head) is not None:
        yield Diagnostic(
            N0821,
            f"{head} of `{section.id}` has other values than the embedding, although its config.json says "
            "that the embedding is the head: both are used, as in transformers",
            "model.id",
            "change nothing; or remove the tensor from the files, and the embedding is the head",
        )
    yield from _quantization(facts)
    yield from _attention(facts)
    yield from _length(facts)
    yield from _positions(facts)
    yield from _tokens(facts)
    left_out = getattr(facts.model.architecture, "dropout", ()) if facts.model else ()
    if left_out:
        asked = listing(f"{key} {rate:g}" for key, rate in left_out)
        yield Diagnostic(
            W0805,
            f"`{section.id}` is trained without the dropout or noise in its config.json: {asked}",
            "model.id",
            "use lora.dropout for dropout of the adapters' inputs",
        )


E0324 = Code(
    "E0324",
    "no tokenizer for the new tokens",
    cause="model.add_tokens changes the tokenizer files of the checkpoint, which merge.py writes with "
    "the merged weights. Another tokenizer is not changed, and a served adapter has no tokenizer of "
    "its own.",
    cure="Remove `model.tokenizer`, or write `serve: {weights: merged}`.",
)

W0325 = Code(
    "W0325",
    "embeddings of new tokens are not trained",
    cause="A new token starts with an embedding row that was never trained, or with the mean of the "
    "other rows if `model.vocab_size` added it. Adapters of projections do not change it.",
    cure="Write `lora: {modules_to_save: [embed_tokens, lm_head]}`.",
)


def _tokens(facts: Facts) -> Iterator[Diagnostic]:
    """Check new tokens: whether the tokenizer can get them, and whether their embeddings are trained."""
    recipe = facts.recipe
    if recipe.model.vocab_size is not None:
        yield from _rows(facts)
    if not recipe.model.add_tokens:
        return
    place = "model.add_tokens"
    yield from _room(facts)
    if recipe.model.tokenizer is not None:
        message = "add_tokens changes the checkpoint's own tokenizer, but model.tokenizer names another"
        yield Diagnostic(E0324, message, place, "remove model.tokenizer")
    if recipe.serve is not None and recipe.serve.weights == "adapter":
        message = "a server with an adapter uses the base's tokenizer, which lacks the new tokens"
        yield Diagnostic(E0324, message, place, "weights: merged in serve")
    lora = recipe.lora
    if facts.model is not None and facts.lora is not None and lora is not None:
        trained = {s.module for p in trained_whole(facts.defaults, facts.lora) for s in p.sources}
        there = {s.module for p in facts.defaults for s in p.sources}
        names = facts.model.family.names
        missing = [name for name in (names.embedding, names.head) if name in there - trained]
        unnamed = [token for token in recipe.model.add_tokens if token not in lora.trainable_tokens]
        if lora.trainable_tokens and not (
            unnamed and all(isinstance(token, str) for token in lora.trainable_tokens)
        ):
            missing = [name for name in missing if name != names.embedding]  # a number may be a new token's
        if missing:
            begun = "begin" if recipe.model.vocab_size else "are in the checkpoint"
            message = (
                f"the rows of the new tokens in {listing(missing)} are not trained: they stay as they {begun}"
            )
            yield Diagnostic(
                W0325, message, place, f"modules_to_save: {flow([*lora.modules_to_save, *missing])} in lora"
            )


W0141 = Code(
    "W0141",
    "rows that no token has",
    cause="`model.vocab_size` adds rows, and neither `model.add_tokens` nor `model.tokenizer` adds a "
    "token for them. They take memory, and a share of each softmax.",
    cure="Add `model.add_tokens`, or remove `vocab_size`.",
)


def _rows(facts: Facts) -> Iterator[Diagnostic]:
    """Check added rows: whether a token may use them, and which servers can serve them."""
    recipe, place = facts.recipe, "model.vocab_size"
    if not recipe.model.add_tokens and recipe.model.tokenizer is None:
        message = "no token has the rows that vocab_size adds: the tokenizer is the checkpoint's"
        yield Diagnostic(W0141, message, place, "add_tokens: {TEXT: null}, or remove the line")
    if recipe.serve is not None and recipe.serve.weights == "adapter" and not recipe.model.add_tokens:
        message = "the server of an adapter has the base's embedding, without the new rows"
        yield Diagnostic(E0324, message, place, "weights: merged in serve")


E0143 = Code(
    "E0143",
    "new tokens without a row",
    cause="The tokenizer next to the recipe has a token for each row of the embedding, or nearly so. "
    "If the checkpoint is not next to the recipe, train.py checks it and reports the same.",
    cure="Use the `vocab_size` in the help, or name reserved tokens that the new ones replace.",
)


def _room(facts: Facts) -> Iterator[Diagnostic]:
    """Check that the embedding has a row for each new token, if the tokenizer is next to the recipe."""
    recipe, model = facts.recipe, facts.model
    wanted = sum(place is None for place in recipe.model.add_tokens.values())
    ids = facts.token_ids
    if not wanted or model is None or ids is None:
        return
    needed, rows = max(ids.values(), default=-1) + 1 + wanted, model.architecture.vocab_size
    if needed > rows:
        yield Diagnostic(
            E0143,
            f"the new tokens would take the rows until {needed:,}, and the embedding has {rows:,}",
            "model.add_tokens",
            f"vocab_size: {padded(needed)} in model adds rows",
        )


E0819 = Code(
    "E0819",
    "samples too long for sparse attention",
    cause="A token of this model sees the tokens that an indexer chooses, as many as config.json's "
    "index_topk. train.py computes dense attention, which is the same only in samples of at most "
    "that many tokens.",
    cure="Use a data.max_length of at most that many tokens.",
)


def _length(facts: Facts) -> Iterator[Diagnostic]:
    """Check that no sample is longer than the tokens that sparse attention lets a token see."""
    model, length = facts.model, facts.recipe.data.max_length
    longest = None if model is None else getattr(model.architecture, "longest", None)
    if model is not None and longest is not None and length > longest:
        yield Diagnostic(
            E0819,
            f"the sparse attention of {model.title} is computed as dense attention, which is the same in "
            f"samples of at most {longest:,} tokens, and max_length is {length:,}",
            "data.max_length",
            f"max_length: {longest}",
        )


W0822 = Code(
    "W0822",
    "samples longer than the model's positions",
    cause="max_length is above the positions in the model's config.json, with its rope scaling "
    "counted as vLLM counts it. The model does not know later positions, and vLLM refuses such "
    "requests.",
    cure="Use the max_length that the message names, or a checkpoint whose config.json scales its positions.",
)


def _positions(facts: Facts) -> Iterator[Diagnostic]:
    """Check that the model has a position for each token of a sample."""
    model, most, length = facts.model, facts.positions, facts.recipe.data.max_length
    if facts.recipe.train.grpo is not None:
        return  # compiler.checks.reinforcement reports the lengths of prompts and completions
    if model is not None and most is not None and length > most:
        yield Diagnostic(
            W0822,
            f"max_length is {length:,}, and {model.title} has {most:,} positions: it does not know the "
            "positions of longer samples, and vLLM serves none of them",
            "data.max_length",
            f"max_length: {most}",
        )


E0903 = Code(
    "E0903",
    "splash attention on a CPU",
    cause="The accelerator is a CPU, and splash attention is a TPU kernel.",
    cure="Write `attention: dot`.",
)


def _attention(facts: Facts) -> Iterator[Diagnostic]:
    recipe, accelerator = facts.recipe, facts.accelerator
    if recipe.model.attention != "splash":
        if recipe.model.attention == "dot" and recipe.model.attention_block is not None:
            message = "model.attention_block has no effect: attention dot has no blocks"
            cpu = accelerator is not None and accelerator.platform == "cpu"
            help = "remove it" if cpu else "attention: splash, or remove it"
            yield Diagnostic(W0806, message, "model.attention_block", help)
        return
    if accelerator is not None and accelerator.platform != "tpu":
        yield Diagnostic(
            E0903,
            f"splash attention is a TPU kernel, and {accelerator.name} is a CPU",
            "model.attention",
            "attention: dot",
        )


E0327 = Code(
    "E0327",
    "quantized base without adapters",
    cause="`model.quantization` stores weights that stay frozen in fewer bits, and adapters are trained on "
    "them. Without `lora`, the weights themselves are trained.",
    cure="Add a `lora` section, or remove `quantization`.",
)

E0318 = Code(
    "E0318",
    "eight-bit products without eight-bit weights",
    cause="`quantized_matmul` multiplies weights that are stored in eight bits, and `quantization` does not "
    "store them so.",
    cure="Write `quantization: int8`, or `fp8` on TPU7x; or remove `quantized_matmul`.",
)

E0319 = Code(
    "E0319",
    "eight-bit products are not faster",
    cause="On this chip, products of that type are not faster than bfloat16 products. Activations "
    "would be rounded without any gain.",
    cure="Write `quantization: int8` on v5e, v5p and v6e, or `fp8` on TPU7x; or remove `quantized_matmul`.",
)

E0320 = Code(
    "E0320",
    "eight-bit products with experts",
    cause="The products of experts are always computed in model.dtype, even if the weights are stored "
    "in eight bits.",
    cure="Remove `quantized_matmul`.",
)


def _quantization(facts: Facts) -> Iterator[Diagnostic]:
    """Check that quantized weights are frozen. Check 8-bit products: they need 8-bit weights and a chip on
    which they are faster, and exclude experts."""
    section, accelerator = facts.recipe.model, facts.accelerator
    kind, passes = section.quantization, section.quantized_matmul
    if kind is not None and facts.recipe.lora is None:
        yield Diagnostic(
            E0327,
            f"a base in {kind} is for adapters: without lora the weights themselves are trained, in "
            f"{section.dtype}",
            "model.quantization",
            "quantization: null; or a section lora: {rank: 16}",
        )
    if passes is None:
        return
    place, off = "model.quantized_matmul", "quantized_matmul: null"
    if kind in (None, "nf4"):
        eight = "" if facts.recipe.lora is None else "quantization: int8, or fp8 on TPU7x; "
        yield Diagnostic(
            E0318,
            f"quantized_matmul: {passes} needs weights in eight bits, and they are "
            + ("not quantized" if kind is None else "in nf4"),
            place,
            f"{eight}{off} computes in model.dtype",
        )
    elif accelerator is not None and accelerator.platform == "tpu" and kind != accelerator.eight_bits:
        known = accelerator.eight_bits
        yield Diagnostic(
            E0319,
            f"{accelerator.generation} multiplies {kind} no faster than bfloat16: activations would be "
            "rounded without any gain",
            place,
            f"quantization: {known}; or {off}" if known else off,
        )
    if facts.model is not None and facts.model.architecture.routing[0]:
        yield Diagnostic(
            E0320,
            f"most products of {facts.model.title} are those of its experts, which are not computed in "
            "eight bits",
            place,
            off,
        )
