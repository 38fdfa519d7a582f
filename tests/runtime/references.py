"""The results of transformers and of Tunix's models, for comparison."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch

from recipec.runtime.checkpoints.trained_weights import hugging_face
from recipec.runtime.model.adapters import PARTS
from recipec.runtime.model.families.towers import is_of_tower
from recipec.runtime.model.initial import path_hash
from recipec.runtime.model.lora import random_bits, row_salts
from recipec.runtime.sections import Log
from recipec.runtime.training.optimizers import faster_b
from tests.runtime import towers, training

CLIP = 0.5
"""The clipping norm of the training runs, which every gradient norm exceeds."""


def reference_logits(model: Any, one: dict[str, np.ndarray]) -> Any:
    """Return transformers' logits of right-padded rows, a torch tensor."""
    return reference(model, one).logits


def reference(model: Any, one: dict[str, np.ndarray], **options: Any) -> Any:
    """Return the output of transformers' model for right-padded rows."""
    tensors = {name: torch.tensor(value).long() for name, value in one.items() if value.ndim == 2}
    inputs = {
        "input_ids": tensors["tokens"],
        "attention_mask": (tensors["segment_ids"] > 0).long(),
        "position_ids": tensors["positions"],
        **(towers.arguments(model, one) if "patches" in one else {}),
    }
    return model(**inputs, use_cache=False, **options)


def torch_loss(model: Any, one: dict[str, Any]) -> Any:
    """Return transformers' loss of a micro-batch: the mean over its targets."""
    chosen = torch.log_softmax(reference_logits(model, one)[:, :-1].float(), -1)
    nll = -chosen.gather(-1, torch.tensor(one["tokens"][:, 1:]).long()[..., None])[..., 0]
    return (nll * torch.tensor(one["loss_mask"][:, 1:])).sum() / float(one["norm"])


def logits_apart(model: Any, built: Any, mesh: Any) -> tuple[float, float]:
    """Return the largest difference from transformers' logits, and the largest logit."""
    padded, packed = training.batch(0), training.packed_batch()
    with torch.no_grad():
        expected = reference_logits(model, padded).numpy()
    names = ("tokens", "positions", "segment_ids")
    both = {name: np.concatenate([padded[name], packed[name]]) for name in names}  # one program
    first, found = np.split(training.logits(built, mesh, both), 2)
    built.provider.check_used()
    real = padded["segment_ids"] > 0
    worst = np.abs(first - expected)[real].max()
    for row, segments in enumerate(packed["segment_ids"]):
        for segment in (1, 2):
            mine = segments == segment
            with torch.no_grad():
                alone = model(torch.tensor(packed["tokens"][row, mine])[None].long(), use_cache=False).logits
            worst = max(worst, np.abs(found[row, mine] - alone[0].numpy()).max())
    return float(worst), float(np.abs(expected[real]).max())


def losses(folder: Path) -> dict[str, list[float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}


def split(built: Any) -> dict[str, tuple[np.ndarray, ...]]:
    """Return A, B and DoRA's magnitudes of each projection, and fully trained tensors."""
    arrays = training.adapters(built)
    out: dict[str, tuple[np.ndarray, ...]] = {}
    for adapter in built.adapters:
        out[adapter.name] = adapter.to_peft(*(arrays[path] for path, *_ in adapter.arrays))
    for parameter in built.whole:
        for number, source in enumerate(parameter.sources):
            part = arrays[parameter.path][parameter.place(number)]
            out[source.name.removeprefix("model.")] = (hugging_face(part, source),)
    return {name: tuple(part.copy() for part in parts) for name, parts in out.items()}


LORA = ("init", "kind", "loraplus_lr_ratio", "rank_pattern", "rslora", "start_from")
LORA += ("quantization", "modules_to_save", "trainable_tokens", "vocab_size", "qat", "images", "vision")
"""Fields of LoraSettings that `twenty_steps` takes, and that the model takes. If `qat` is given, the
reference rounds by itself."""
NF4 = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
"""Appendix E of the QLoRA paper (arXiv 2305.14314); bitsandbytes has the same table."""
PRINCIPAL = ("pissa", "olora")
"""Initial values that PEFT computes itself from the base's weights."""


@dataclass(frozen=True)
class Alike:
    """The largest differences between a training run and the same run by transformers and PEFT.

    Attributes:
        losses: of a step; of_loss is the largest loss.
        parameters: of A and B after the last step; moved is their largest change since the first step.
        gradients: of gradient norms, relative.
        adapted: the number of projections with LoRA.
    """

    losses: float
    of_loss: float
    parameters: float
    moved: float
    gradients: float
    adapted: int

    def __str__(self) -> str:
        return (
            f"losses differ by {self.losses:.1e} of {self.of_loss:.1f}, parameters by {self.parameters:.1e}, "
            f"which moved by {self.moved:.1e}, gradient norms by {self.gradients:.1e}"
        )


def twenty_steps(
    folder: Path,
    model: Any,
    axes: dict[str, int],
    run: Path,
    remat: str = "decoder",
    targets: tuple[str, ...] = training.TARGETS,
    **methods: Any,
) -> Alike:
    """Run 20 steps of 2 micro-batches by the runtime and by PEFT, from the same initial adapters.

    Args:
        folder: the checkpoint.
        model: transformers' model of it, to which PEFT adds its adapters.
        run: the folder for the runtime's run.
        methods: fields of TrainSettings, and the fields of LoraSettings in LORA; start_from names the adapter
            that both start with; clip is the clipping norm; teacher has the folder of a distillation's
            teacher, and transformers' model of it.
    """
    steps, accumulation, clip = 20, 2, methods.get("clip", CLIP)
    schedule = optax.linear_schedule(1e-3, 1e-4, steps)
    lora = {key: methods[key] for key in LORA if key in methods}
    principal = lora.get("init") in PRINCIPAL
    kept = {"kept": run} if principal else {}
    mesh, built = training.build(folder, axes, remat=remat, seed=3, targets=targets, **kept, **lora)
    if "vocab_size" in lora:
        grow(model, lora["vocab_size"])
    if "start_from" in methods:
        training.start_from(mesh, built, folder, run)
    start = split(built)
    links = [
        optax.clip_by_global_norm(clip),
        optax.adamw(schedule, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01),
    ]
    links += [faster_b(methods["loraplus_lr_ratio"])] if "loraplus_lr_ratio" in methods else []
    chain = optax.chain(*links)
    with mesh:
        options = {"log": Log(every=20), "every_steps": 20}
        options |= {key: value for key, value in methods.items() if key not in (*lora, "clip")}
        if "teacher" in methods:
            teacher = training.build(options.pop("teacher")[0], axes, full=True)[1]
            built = replace(built, teacher=teacher)
        trainer = training.trainer(built, mesh, run, chain, accumulation, **options)
        training.fit(trainer, run, steps, schedule, accumulation)
    found, moved = losses(run), split(built)
    parameters = [a.target.parameter for a in built.adapters if a.target.parameter]
    expected, norms, end = peft_steps(
        model,
        start,
        steps,
        accumulation,
        lambda step: float(schedule(step)),
        (targets, parameters),
        **methods,
    )
    assert max(norms) > clip, "clipping takes part"

    def apart(one: Any, other: Any) -> float:
        pairs = (pair for name in end for pair in zip(one[name], other[name], strict=True))
        return max(float(np.abs(left - right).max()) for left, right in pairs)

    return Alike(
        losses=float(np.abs(np.array(found["loss"]) - expected).max()),
        of_loss=max(expected),
        parameters=apart(moved, end),
        moved=apart(moved, start),
        gradients=float(np.abs(np.array(found["grad_norm"]) / norms - 1).max()),
        adapted=len(start),
    )


def wrap(model: Any, names: Sequence[str], parameters: Sequence[str], **options: Any) -> Any:
    """Add PEFT's adapters of rank 4 to transformers' model.

    Args:
        names: regular expressions of the projections' names.
        parameters: names of parameters within a layer.
        options: arguments of LoraConfig; vision also adapts the tower and its projector.
    """
    import peft
    from peft.utils import transformers_weight_conversion as conversion

    multimodal = any("language_model." in name for name, _ in model.named_modules())
    inner = r"language_model\..*layers\." if multimodal else r"(?:layers|h)\.\d+\."
    inner = r"model\." if options.pop("vision", False) else inner
    pattern = re.compile(rf".*{inner}.*\.({'|'.join(names)})")
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and pattern.fullmatch(name)
    ]
    # PEFT always takes these names for experts. As parameters, they are used unchanged.
    kind = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    taken = conversion._MOE_TARGET_MODULE_MAPPING.get(kind, {})
    wrong = [name for name in linear if name.rpartition(".")[2] in taken]
    return peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=0.0,
            **options,
            target_modules=sorted({*linear} - {*wrong}),
            target_parameters=[*(f"{name}.weight" for name in wrong), *parameters] or None,
        ),
    )


def reference_nf4(weight: np.ndarray) -> np.ndarray:
    """Return bitsandbytes' values of a weight [out, in], in blocks of 64 of the flattened tensor."""
    blocks = weight.reshape(-1, 64).astype(np.float64)
    scale = np.abs(blocks).max(1, keepdims=True)
    codes = np.abs((blocks / scale)[..., None] - np.array(NF4)).argmin(-1)
    return (np.array(NF4)[codes] * scale).reshape(weight.shape)


def store_in_nf4(layers: Any) -> None:
    """Replace the linear weights of transformers' layers by the numbers that nf4 stores."""
    with torch.no_grad():
        for module in layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(torch.tensor(reference_nf4(module.weight.numpy())))


def grow(model: Any, rows: int) -> None:
    """Add rows to the embedding and the head of transformers' model, each the mean of the existing rows."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    own = [embedding, *([] if head.weight is embedding.weight else [head])]
    means = [module.weight.double().mean(0) for module in own]
    count = len(embedding.weight)
    model.resize_token_embeddings(rows, mean_resizing=False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    with torch.no_grad():
        for module, mean in zip((embedding, head), means, strict=False):
            assert len(module.weight) == rows
            module.weight[count:] = mean.to(module.weight.dtype)


def save_adapter(model: Any, folder: Path, names: Sequence[str], **options: Any) -> None:
    """Write a PEFT adapter in which every value differs from its initial one; the model stays unchanged.

    Args:
        names, options: as for `wrap`.
    """
    wrapped = wrap(model, names, (), **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(folder)
    wrapped.unload()


@contextmanager
def noise(model: Any, alpha: float | None, index: np.ndarray) -> Iterator[None]:
    """Apply transformers' NEFTune to a micro-batch, with the runtime's random bits instead of torch's."""

    def hook(module: Any, given: Any, output: Any) -> Any:
        bound = alpha / (output.size(1) * output.size(2)) ** 0.5
        salts = row_salts(0, jnp.int32(index), training.ROWS) ^ jnp.uint32(path_hash("embed_tokens"))
        bits = np.asarray(random_bits(salts, tuple(output.shape)))
        return output + torch.tensor((bits / 2.0**31 - 1) * bound, dtype=output.dtype)

    if alpha is None:
        yield
        return
    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def divergence(distill: Any, logits: Any, teacher: Any, one: dict[str, Any]) -> Any:
    """Return the divergence of TRL's GKDTrainer at each token but the last, a torch tensor [B, T - 1]."""
    from trl.experimental.gkd import GKDTrainer

    with torch.no_grad():
        other = reference(teacher, one).logits[:, :-1].float()
    rows = min(logits.shape[-1], other.shape[-1])
    pair = logits[..., :rows], other[..., :rows]
    return GKDTrainer.generalized_jsd_loss(
        *pair, beta=distill.beta, temperature=distill.temperature, reduction="none"
    ).sum(-1)


def peft_steps(
    model: Any,
    start: dict[str, tuple[np.ndarray, ...]],
    steps: int,
    accumulation: int,
    rate: Callable[[int], float],
    adapted: tuple[Sequence[str], Sequence[str]] = (training.TARGETS, ()),
    **methods: Any,
) -> tuple[list[float], list[float], dict[str, tuple[np.ndarray, ...]]]:
    """Run the same by transformers and PEFT, and return losses, gradient norms and final adapters.

    Args:
        adapted: regular expressions of the projections' names, and names of parameters within a layer.
    """
    whole = [*methods.get("modules_to_save", ())] or None
    dora = methods.get("kind") == "dora"
    principal = methods.get("init") in PRINCIPAL
    signs: dict[str, np.ndarray] = {}
    options = {"init_lora_weights": methods["init"]} if principal else {}
    options |= {key: methods[key] for key in ("rank_pattern",) if key in methods}
    options |= {"use_rslora": True} if methods.get("rslora") else {}
    options |= {"use_dora": dora, "modules_to_save": whole, "ensure_weight_tying": bool(whole)}
    options |= {"trainable_token_indices": [*methods.get("trainable_tokens", ())] or None}
    options |= {"vision": methods.get("vision", False)}
    if adapter := methods.get("start_from"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    else:
        model = wrap(model, *adapted, **options)
    weights = {}
    for name, module in model.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            own = name.removeprefix("base_model.model.model.").replace(".base_layer", "")
            if not is_of_tower(own):
                own = re.sub(r".*?\b(?=(layers|h)\.\d)", "", own)
            if hasattr(module, "parameter_name"):
                own = f"{own}.{module.parameter_name}".removesuffix(".weight")
            weights |= {
                f"{own}.lora_{letter}": getattr(module, f"lora_{letter}")["default"].weight for letter in "AB"
            }
            for magnitude in getattr(module, "lora_magnitude_vector", {}).values():
                weights[f"{own}.lora_magnitude"] = magnitude.weight
    start = {name: parts for name, parts in start.items() if len(parts) > 1}
    assert len(weights) == sum(map(len, start.values())), "PEFT adapts what Tunix adapts"
    with torch.no_grad():
        for name, parts in start.items():
            if principal:  # PEFT's own start; its singular vectors may have the opposite sign
                a, b = (weights[f"{name}.lora_{which}"].numpy() for which in "AB")
                signs[name] = np.sign((a * parts[0]).sum(1))
                assert np.abs(b @ a - parts[1] @ parts[0]).max() <= 1e-4 * np.abs(b @ a).max()
                continue
            for which, value in zip(PARTS, parts, strict=False):
                if adapter:
                    assert np.array_equal(weights[f"{name}.lora_{which}"].numpy(), value)
                elif which == "magnitude":  # PEFT's own
                    assert np.allclose(weights[f"{name}.lora_{which}"].numpy(), value, rtol=1e-6)
                else:
                    weights[f"{name}.lora_{which}"].copy_(torch.tensor(value))
    balance = methods.get("router_aux_loss_coef", 0.0)
    smoothing, z_loss = methods.get("label_smoothing", 0.0), methods.get("z_loss", 0.0)
    of_a = [p for name, p in weights.items() if name.endswith("lora_A")]
    others = [p for name, p in weights.items() if not name.endswith("lora_A")]
    groups = [{"params": of_a}, {"params": others}]
    own = re.compile(r"\.(modules_to_save|trainable_tokens_delta)\.")
    saved = {name: p for name, p in model.named_parameters() if own.search(name)}
    groups[0]["params"] += saved.values()
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    found, norms = [], []
    for step in range(steps):
        for group, ratio in zip(
            optimizer.param_groups, (1, methods.get("loraplus_lr_ratio", 1)), strict=True
        ):
            group["lr"] = rate(step) * ratio
        optimizer.zero_grad()
        total = 0.0
        for part in range(accumulation):
            one = training.batch(step * accumulation + part, accumulation)
            with noise(model, methods.get("neftune_noise_alpha"), one["index"]):
                computed = reference(model, one, **({"output_router_logits": True} if balance else {}))
            logits = computed.logits[:, :-1].float()
            chosen = torch.log_softmax(logits, -1)
            targets = torch.tensor(one["tokens"][:, 1:]).long()
            nll = -chosen.gather(-1, targets[..., None])[..., 0]
            nll = (1 - smoothing) * nll - smoothing * chosen.mean(-1)  # transformers' LabelSmoother
            nll = nll + z_loss * torch.logsumexp(logits, -1) ** 2
            if "teacher" in methods:
                nll = divergence(methods["distill"], logits, methods["teacher"][1], one)
            loss = (nll * torch.tensor(one["loss_mask"][:, 1:])).sum() / float(one["norm"]) / accumulation
            if balance:
                loss = loss + balance * computed.aux_loss / accumulation
            loss.backward()
            total += float(loss)
        clipped = [*weights.values(), *saved.values()]
        norms.append(float(torch.nn.utils.clip_grad_norm_(clipped, methods.get("clip", CLIP))))
        optimizer.step()
        found.append(total)
    end = {
        name: tuple(weights[f"{name}.lora_{PARTS[i]}"].detach().numpy() for i in range(len(parts)))
        for name, parts in start.items()
    }
    for name, sign in signs.items():
        a, b, *magnitude = end[name]
        end[name] = a * sign[:, None], b * sign, *magnitude
    for name, parameter in saved.items():
        called = re.sub(r"(\.modules_to_save)?\.default", "", name).removeprefix("base_model.model.")
        values = parameter.detach().numpy()
        if "trainable_tokens_delta" in name:  # an adapter may have another order
            numbers = model.get_input_embeddings().token_adapter.token_indices["default"]
            values = values[[numbers.index(token) for token in methods["trainable_tokens"]]]
        end[called.removeprefix("model.")] = (values,)
    return found, norms, end
