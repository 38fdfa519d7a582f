"""What the backends TRL and TorchAX cannot do of a recipe, or do differently from train.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.wording import listing
from recipec.runtime.model.adapters import principal
from recipec.runtime.model.families.description import DecoderArchitecture
from recipec.runtime.model.families.family import text_config
from recipec.runtime.model.partition_rules import TOKENS
from recipec.runtime.training.objectives import OBJECTIVES, keeps_copy
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.language import Recipe
from recipec.spec.language.train import Train

UNTOLD = ("granitemoe", "granitemoehybrid")
"""Families whose model in transformers 5.12 does not return the logits of its routers."""

E0955 = Code(
    "E0955",
    "actions at evaluations with TorchAX",
    cause="The TorchAX backend has its own training loop. It evaluates, but it does not stop early, "
    "keep the best checkpoint or write samples.",
    cure="Remove the line, or build without `--backend torchax`.",
)

E0956 = Code(
    "E0956",
    "best checkpoint or samples with TRL",
    cause="train_trl.py keeps the newest checkpoints, as transformers' Trainer does, and writes no samples.",
    cure="Remove the line, or build without `--backend trl`.",
)

NOT_EVALUATED = {
    "torchax": (E0955, ("train.early_stopping", "train.generations", "checkpoint.keep_best")),
    "trl": (E0956, ("train.generations", "checkpoint.keep_best")),
}
"""Per backend, a diagnostic code and the settings that need evaluations which the backend does not do."""
REMOVE = "remove the line"


E0514 = Code(
    "E0514",
    "load-balancing loss is not defined for this model",
    cause="The loss spreads tokens over the experts of a softmax router, as transformers defines it. "
    "Models without experts have no router. transformers defines no such loss for Gemma 4 and for "
    "sigmoid routers such as GLM 4's and Llama 4's. TRL cannot compute it for models that do not "
    "return router logits.",
    cure="Remove `router_aux_loss_coef`, or build for another backend.",
)

E0920 = Code(
    "E0920",
    "an optimizer that a backend lacks",
    cause="Neither torch nor transformers has the optimizer Lion, or a Muon that uses Adam for "
    "parameters that are not matrices. TorchAX lacks Muon too.",
    cure="Write `name: adamw`, or build without that `--backend`.",
)

E0922 = Code(
    "E0922",
    "shared A with PEFT",
    cause="The recipe is built for TRL or TorchAX, which train PEFT's adapters. PEFT gives each "
    "projection its own A, and `kv: shared` uses one for key and value.",
    cure="Write `kv: independent`, or build without that `--backend`.",
)

E0923 = Code(
    "E0923",
    "int8 with TRL",
    cause="The recipe is built for TRL. int8 of bitsandbytes quantizes activations as well as weights.",
    cure="Write `quantization: nf4`, or build without `--backend trl`.",
)

W0924 = Code(
    "W0924",
    "adafactor with TRL",
    cause="transformers' Adafactor factors the second moments of every matrix. train.py factors only "
    "those of large ones.",
    cure="Nothing, if the two runs need not be the same. Otherwise write `name: adamw`.",
)

E0925 = Code(
    "E0925",
    "expert adapters with TRL",
    cause="train_trl.py adapts linear layers with PEFT, and experts are not linear layers but parameters.",
    cure="Use only projections in `lora.targets`, or build without `--backend trl`.",
)

W0926 = Code(
    "W0926",
    "quantized experts with TRL",
    cause="`quantization: nf4` also quantizes a model's experts. bitsandbytes keeps them in model.dtype, "
    "because it supports only linear layers. The baseline takes more memory and trains on a "
    "different base.",
    cure="Nothing, if the two runs need not be the same. Otherwise remove `quantization`.",
)

E0940 = Code(
    "E0940",
    "label smoothing, z-loss, eaft or asft with TRL",
    cause="They need the logits of the whole vocabulary. TRL's fused head returns only the "
    "log-probabilities of the targets.",
    cure="Write `0`, or `loss_type: nll` or `dft`, or build without `--backend trl`.",
)

E0950 = Code(
    "E0950",
    "initial adapters from quantized weights with another backend",
    cause="pissa and olora take the adapters' part out of a weight before it is quantized. In TRL's "
    "run, bitsandbytes quantizes whole weights while it loads them. TorchAX stores nf4 in other "
    "blocks than train.py, and has no LoftQ.",
    cure="Write `init: peft` or `quantization: null`, or build without that `--backend`.",
)

E0960 = Code(
    "E0960",
    "distillation with another backend",
    cause="train_trl.py and train_torchax.py have one model, and no teacher next to it.",
    cure="Write `objective: sft`, or build without that `--backend`.",
)


def _teacher(recipe: Recipe, backend: str) -> Iterator[Diagnostic]:
    if recipe.train.objective == "distill":
        yield _refusal(backend, E0960, " has no teacher", "train.objective", "objective: sft")


E0963 = Code(
    "E0963",
    "pictures with another backend",
    cause="train_torchax.py reads texts alone. In the larger Gemma 4 models of transformers 5.12, the tokens "
    "of a picture see each other in all layers. In train.py they do in layers with a sliding window only. "
    "TRL's fused head calls a decoder under a name that transformers' Llama 4 with pictures does not have.",
    cure="Remove `data.images`, or build without that `--backend`.",
)


def _pictures(program: Program, backend: str) -> Iterator[Diagnostic]:
    """Refuse pictures that a backend does not read, or not as train.py does."""
    vision, reason = program.architecture.vision, ""
    if program.recipe.data.images is None:
        return
    if backend == "torchax":
        reason = " reads no pictures"
    elif vision is not None and vision.within_window:
        reason = f": transformers 5.12 masks the pictures of this {vision.kind} otherwise than train.py"
    elif program.family.name == "llama4":
        reason = ": TRL's fused head computes no Llama 4 with pictures"
    if reason:
        yield _refusal(backend, E0963, reason, "data.images", REMOVE, at_key=True)


E0959 = Code(
    "E0959",
    "a new schedule with TRL",
    cause="`train.continue_from` continues a run of train.py. transformers' Trainer restores the "
    "schedule of its own checkpoint.",
    cure="Remove `train.continue_from`, or train without `--backend trl`.",
)


def check_trl(program: Program) -> Iterator[Diagnostic]:
    """Yield what TRL and PEFT cannot do of a recipe, or do differently from train.py."""
    recipe, refuse = program.recipe, partial(_refusal, "trl")
    optimizer, lora = recipe.train.optimizer.name, recipe.lora
    quantization = recipe.model.quantization
    yield from _teacher(recipe, "trl")
    yield from _pictures(program, "trl")
    if optimizer in ("lion", "muon"):
        which = "Lion" if optimizer == "lion" else "Muon with Adam for vectors and embeddings"
        reason = f": torch and transformers have no {which}"
        yield refuse(E0920, reason, "train.optimizer.name", "name: adamw")
    if recipe.train.continue_from is not None:
        yield refuse(E0959, " begins no new schedule in a run", "train.continue_from", REMOVE, at_key=True)
    if optimizer == "adafactor":
        yield Diagnostic(
            W0924,
            "with --backend trl, transformers' Adafactor factors the second moments of every matrix. "
            "train.py factors only those of matrices with 128 rows and columns or more",
            "train.optimizer.name",
            "name: adamw is the same in both",
        )
    if recipe.train.router_aux_loss_coef and program.family.name in UNTOLD:
        reason = f": transformers' {program.family.title} does not return router logits, which the "
        reason += "load-balancing loss needs"
        yield refuse(E0514, reason, "train.router_aux_loss_coef", REMOVE, at_key=True)
    for key, other in _of_all_logits(recipe.train):
        what = f"the loss {recipe.train.loss_type}" if key == "loss_type" else key
        reason = f": TRL's fused head returns only log-probabilities of targets, and {what} needs all logits"
        yield refuse(E0940, reason, f"train.{key}", f"{key}: {other}")
    if any(adapter.shared for adapter in program.adapters):
        yield refuse(E0922, SHARED, "lora.kv", "kv: independent")
    if parameters := [adapter.target.words[0] for adapter in program.adapters if adapter.target.parameter]:
        reason = f" adapts only linear layers, not parameters: {listing(dict.fromkeys(parameters))}"
        yield refuse(E0925, reason, "lora.targets", "targets without experts and router")
    if quantization in ("int8", "fp8"):
        reason = f": PEFT cannot train on weights in {quantization} as train.py does"
        if quantization == "int8" and recipe.model.quantized_matmul is None:
            reason = ": bitsandbytes' int8 also quantizes activations, and train.py quantizes only weights"
        yield refuse(E0923, reason, "model.quantization", "quantization: nf4, which is the same in both")
    if lora is not None and quantization == "nf4" and principal(lora.init):
        reason = f": bitsandbytes quantizes the base as it loads it, and init: {lora.init} is "
        yield refuse(E0950, f"{reason}computed from the base before", "lora.init", "init: peft")
    if quantization == "nf4" and program.architecture.routing[0]:
        yield Diagnostic(
            W0926,
            "--backend trl: bitsandbytes quantizes only linear layers. Experts, which transformers stores in "
            f"other parameters, stay in {recipe.model.dtype} there. train.py stores them in nf4",
            "model.quantization",
            "remove quantization to use the same base in both",
        )
    yield from _reinforced(program)
    yield from _of_both(program, "trl")


SHARED = ": PEFT gives k_proj and v_proj an A each, and kv: shared has one for both"


def _of_all_logits(train: Train) -> Iterator[tuple[str, str]]:
    """Yield the keys of `train` whose loss needs more than the targets' probabilities, and other values."""
    if train.objective != "sft":
        return
    if train.loss_type in ("eaft", "asft"):
        yield "loss_type", "nll or dft"
    for key in ("label_smoothing", "z_loss"):
        if getattr(train, key) and key in OBJECTIVES[train.objective].reads(train.loss_type):
            yield key, "0"


E0933 = Code(
    "E0933",
    "experts with TorchAX",
    cause="transformers' expert layers select rows depending on the data, which jax cannot compile.",
    cure="Use a dense model, or the backend tunix.",
)

N0935 = Code(
    "N0935",
    "sharding rules with TorchAX",
    cause="The rules name train.py's arrays. Hugging Face's tensors join some dimensions of these arrays "
    "into one, which is split like the first of them.",
    cure="Nothing, if this is intended.",
)

N0936 = Code(
    "N0936",
    "Adafactor with TorchAX",
    cause="Adafactor keeps sums over an array's two largest dimensions, and Hugging Face's arrays "
    "have other shapes than train.py's.",
    cure="Nothing, if the two runs need not be the same. Otherwise write `name: adamw`.",
)

E0938 = Code(
    "E0938",
    "eight-bit products with TorchAX",
    cause="The TorchAX backend computes with the dequantized numbers, in model.dtype.",
    cure="Remove `quantized_matmul`, or build without `--backend torchax`.",
)

E0939 = Code(
    "E0939",
    "split rows with TorchAX",
    cause="The TorchAX backend computes attention as transformers does, with all tokens of a row on "
    "one device.",
    cure="Give the devices of cp to fsdp, or build without `--backend torchax`.",
)

E0941 = Code(
    "E0941",
    "embedding noise with TorchAX",
    cause="The TorchAX backend runs transformers' embedding without changes.",
    cure="Write `neftune_noise_alpha: null`, or build without `--backend torchax`.",
)

E0942 = Code(
    "E0942",
    "DoRA with TorchAX",
    cause="The TorchAX backend adds A and B to transformers' projections, and does not scale their outputs.",
    cure="Write `kind: lora`, or build without `--backend torchax`.",
)

E0943 = Code(
    "E0943",
    "modules_to_save or trainable_tokens with another backend",
    cause="With TRL, recipec trains only adapters and rows of the embedding; with TorchAX, only adapters.",
    cure="Write `modules_to_save: []` or `trainable_tokens: []`, or build without that `--backend`.",
)

E0944 = Code(
    "E0944",
    "train.trainable_modules with another backend",
    cause="The TorchAX backend trains all weights, or adapters.",
    cure="Remove `train.trainable_modules`, or build without `--backend torchax`.",
)

E0949 = Code(
    "E0949",
    "decoder of another name with TorchAX",
    cause="The TorchAX backend calls the decoder that transformers' classes hold as `model`. Older "
    "classes, such as GPT-NeoX's, hold it under another name.",
    cure="Build without `--backend torchax`.",
)


def check_torchax(program: Program) -> Iterator[Diagnostic]:
    """Yield what TorchAX cannot do of a recipe, or does differently from train.py."""
    recipe, lora, refuse = program.recipe, program.lora, partial(_refusal, "torchax")
    yield from _teacher(recipe, "torchax")
    yield from _pictures(program, "torchax")
    if recipe.train.objective == "grpo":
        reason = " learns from no rewards of the model's own completions"
        yield refuse(E0962, reason, "train.objective", "objective: sft")
    if recipe.train.optimizer.name == "muon":
        reason = ": train.py's Muon knows only its own arrays"
        yield refuse(E0920, reason, "train.optimizer.name", "name: adamw")
    if lora is not None and lora.kv == "shared":
        yield refuse(E0922, SHARED, "lora.kv", "kv: independent")
    if recipe.model.quantized_matmul:
        reason = " always multiplies in model.dtype"
        yield refuse(E0938, reason, "model.quantized_matmul", "quantized_matmul: null")
    if lora is not None and lora.kind != "lora":
        reason = " trains only A and B, without DoRA's magnitudes"
        yield refuse(E0942, reason, "lora.kind", "kind: lora")
    if lora is not None and lora.trainable_tokens:
        reason = " trains only adapters, and no rows of the embedding"
        yield refuse(E0943, reason, "lora.trainable_tokens", "trainable_tokens: []")
    if lora is not None and lora.init == "loftq":
        reason = " stores nf4 in its own blocks, for which LoftQ is not computed"
        yield refuse(E0950, reason, "lora.init", "init: peft")
    if recipe.train.neftune_noise_alpha is not None:
        reason, change = " adds no noise to transformers' embeddings", "neftune_noise_alpha: null"
        yield refuse(E0941, reason, "train.neftune_noise_alpha", change)
    if TOKENS in recipe.mesh.axes:
        reason = f": cp={recipe.mesh.axes[TOKENS]} splits the tokens of a row, and transformers' attention "
        yield refuse(E0939, f"{reason}needs whole rows", "mesh.axes.cp")
    if "model." not in program.family.prefixes:
        reason = f" does not compute {program.family.title}: its decoder has another name in transformers"
        yield refuse(E0949, reason, "model.id")
    if experts := program.architecture.routing[0]:
        reason = f": jax does not compile transformers' layers of {experts} experts"
        yield refuse(E0933, reason, "model.id")
    if recipe.train.trainable_modules:
        yield refuse(
            E0944, " trains all weights, or adapters", "train.trainable_modules", REMOVE, at_key=True
        )
    if recipe.sharding.rules and program.family.tunix:
        yield Diagnostic(
            N0935,
            "the rules name train.py's arrays. Hugging Face's tensors join some dimensions of these arrays "
            "into one, which the TorchAX backend splits like the first of them",
            "sharding.rules",
        )
    if recipe.train.optimizer.name == "adafactor":
        yield Diagnostic(
            N0936,
            "the TorchAX backend's Adafactor factors the matrix of each projection. In train.py a "
            "projection is an array of up to four dimensions, and the steps differ a little",
            "train.optimizer.name",
        )
    yield from _of_both(program, "torchax")


E0937 = Code(
    "E0937",
    "packed rows that transformers treats as one sample",
    cause="transformers' gated delta nets, Mamba mixers and short convolutions in torch ignore sample "
    "borders within a row. A sample would start from the state of the sample before it. Llama 4's "
    "chunks and its query scaling count from the first token of a row. train.py starts each sample "
    "anew.",
    cure="Write `data.packing: false`, or build without that `--backend`.",
)

E0957 = Code(
    "E0957",
    "state that transformers carries wrongly",
    cause="transformers 5.12's torch code of Nemotron-H sums over the wrong axis when it carries the "
    "state of a Mamba mixer from one chunk of tokens to the next. Its GPU kernels and train.py do "
    "not.",
    cure="Write a `data.max_length` of at most the model's chunk_size, or build without the `--backend`.",
)

E0958 = Code(
    "E0958",
    "quantization-aware training with another backend",
    cause="Only Tunix's train.py computes with rounded weights and activations.",
    cure="Remove `qat`, or build without that `--backend`.",
)

E0970 = Code(
    "E0970",
    "start_from as a reference with another backend",
    cause="The objective compares with the model that training starts from. With `lora.start_from`, "
    "that is a copy of the adapter. Only train.py keeps such a copy: the other backends compare "
    "with the base without adapters, or with a second model.",
    cure="Use another objective, remove `start_from`, or build without that `--backend`.",
)

E0971 = Code(
    "E0971",
    "rows that another backend does not add",
    cause="`model.vocab_size` adds rows to the embedding and the head as train.py reads them. TRL and "
    "TorchAX train the checkpoint with its own rows, and no embedding in addition to adapters.",
    cure="Remove `vocab_size` and let `model.add_tokens` replace reserved tokens, or build without "
    "that `--backend`.",
)


E0962 = Code(
    "E0962",
    "reinforcement learning with another backend",
    cause="train_torchax.py reads answers from the data. TRL's GRPOTrainer has no loss rloo, no ratio of a "
    "whole completion and no k1 as its KL divergence, and it draws no groups again. train_trl.py does not "
    "evaluate held-out prompts.",
    cure="Use the value of the help, or build without that `--backend`.",
)

W0965 = Code(
    "W0965",
    "bnpo with TRL",
    cause="TRL averages bnpo over the tokens of a micro-batch, and train.py over those of a step.",
    cure="Write `loss: dapo`, which is the same in both, or give a step one micro-batch.",
)


def _reinforced(program: Program) -> Iterator[Diagnostic]:
    """Yield what TRL's GRPOTrainer cannot do, or does differently."""
    recipe, refuse = program.recipe, partial(_refusal, "trl", E0962)
    grpo = recipe.train.grpo
    if recipe.train.objective != "grpo" or grpo is None:
        return
    if grpo.loss == "rloo" or grpo.ratio == "sequence_product":
        key, change = ("loss", "loss: grpo") if grpo.loss == "rloo" else ("ratio", "ratio: sequence")
        yield refuse(" has no ratio of a whole completion", f"train.grpo.{key}", change)
    if grpo.beta and grpo.kl == "k1":
        yield refuse(" estimates the KL divergence with k3 only", "train.grpo.kl", "kl: k3")
    if grpo.dynamic_sampling:
        path, change = "train.grpo.dynamic_sampling", "dynamic_sampling: 0"
        yield refuse(" does not draw groups again", path, change)
    for path in ("data.eval", "data.eval_fraction"):
        if attrgetter(path)(recipe):
            yield refuse(" does not evaluate held-out prompts", path, REMOVE, at_key=True)
    if grpo.loss == "bnpo" and program.accumulation_steps > 1:
        yield Diagnostic(
            W0965,
            "--backend trl: TRL averages bnpo over the tokens of a micro-batch, and train.py over those of a "
            "step",
            "train.grpo.loss",
            "loss: dapo is the same in both",
        )


def _of_both(program: Program, backend: str) -> Iterator[Diagnostic]:
    """Yield what neither backend can do."""
    recipe, lora, refuse = program.recipe, program.lora, partial(_refusal, backend)
    if lora is not None and lora.modules_to_save:
        reason = " trains only adapters, and no other modules"
        yield refuse(E0943, reason, "lora.modules_to_save", "modules_to_save: []")
    if recipe.train.qat is not None:
        reason = " does not round weights and activations during training"
        yield refuse(E0958, reason, "train.qat", "qat: null", at_key=True)
    if lora is not None and lora.start_from is not None and keeps_copy(recipe.train, lora):
        reason = (
            f" compares with the base, and {recipe.train.objective} here with the adapter that it starts "
        )
        yield refuse(E0970, f"{reason}from", "lora.start_from", REMOVE)
    if recipe.model.vocab_size is not None:
        yield refuse(E0971, " adds no rows to the embedding", "model.vocab_size", REMOVE)
    code, paths = NOT_EVALUATED[backend]
    for path in (path for path in paths if attrgetter(path)(recipe)):
        yield refuse(code, f" has no {path.rpartition('.')[2]}", path, REMOVE, at_key=True)
    chunk = program.family.chunk_in_torch
    chunk = chunk and (text_config(program.config).get("chunk_size") or chunk)
    if chunk and program.architecture.stateful and recipe.data.max_length > chunk:
        reason = f": transformers' torch code of {program.family.title} carries the state of a Mamba mixer "
        yield refuse(
            E0957, f"{reason}wrongly beyond {chunk} tokens", "data.max_length", f"max_length: {chunk}"
        )
    if recipe.data.packing and (why := _carried(program)):
        yield refuse(E0937, f": transformers' {why}", "data.packing", "packing: false")


def _carried(program: Program) -> str:
    """Return the part of a model whose state transformers carries across samples of a row, or ""."""
    a, length = program.architecture, program.recipe.data.max_length
    if a.stateful:
        kinds = {"delta": "gated delta nets", "conv": "short convolutions"}
        what = next((kinds[kind] for kind in kinds if getattr(a, kind, None)), "Mamba mixers")
        return f"{what} in torch ignore the borders between samples of a row"
    if not isinstance(a, DecoderArchitecture):
        return ""
    if a.chunk is not None and a.chunk < length:
        return f"chunks of {a.chunk:,} tokens start at a row's first token, not at each sample's"
    if a.query_growth is not None and a.query_growth.unturned and a.query_growth.length <= length:
        return "query scaling follows the position in the row, not in the sample"
    return ""


def _refusal(
    backend: str, code: Code, reason: str, path: str, change: str = "", at_key: bool = False
) -> Diagnostic:
    """Return the refusal of a recipe by a backend.

    Args:
        reason: what follows the backend's flag in the message.
        change: what to write instead; "" for nothing.
    """
    without = f"build without --backend {backend}"
    help = f"{change}, or {without}" if change else without
    return Diagnostic(code, f"--backend {backend}{reason}", path, help, at_key=at_key)


CHECKS = {Backend.TRL: check_trl, Backend.TORCHAX: check_torchax}
"""The checks of the backends besides Tunix."""


E0945 = Code(
    "E0945",
    "model that only TorchAX trains",
    cause="No family describes the model, so Tunix does not have it. Only transformers' own model can "
    "be trained.",
    cure="Use `recipe build --backend torchax`, and `--backend torchax` with other commands.",
)


def diagnosed(program: Program, backends: Sequence[Backend]) -> list[Diagnostic]:
    """Return what the backends cannot do of a recipe, or do differently; without positions in its file."""
    if not program.family.tunix and set(backends) != {Backend.TORCHAX}:
        message = f"no family describes `{program.recipe.model.id}`: only the TorchAX backend can train it"
        return [
            Diagnostic(
                E0945,
                message,
                "model.id",
                "recipe build --backend torchax, without other backends; also with other commands",
            )
        ]
    return [
        diagnostic for backend in backends if backend in CHECKS for diagnostic in CHECKS[backend](program)
    ]
