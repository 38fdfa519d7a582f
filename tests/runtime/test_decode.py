"""Compare cached generation with transformers' generate, and with the forward pass over whole rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from recipec.runtime.errors import UserError
from recipec.runtime.model import cache, slots_read
from recipec.runtime.model.decode import Completions, Generation, jit_generate, right_padded
from recipec.runtime.model.sampling import Sampling, choose, kept, salts_of
from recipec.runtime.training.rollout_layout import RolloutLayout
from tests import tiny
from tests.runtime import training
from tests.runtime.built_models import randomize
from tests.runtime.decoders import CASES, E2E, EVERY, LIMIT, make

pytestmark = pytest.mark.usefixtures("highest")

LENGTHS = (3, 12, 7, 9)
WIDTH = 12
MOST = 64
"""New tokens of a row: past every window and chunk."""
POSITIONS = {"max_position_embeddings": 128}
CHANGES: dict[str, dict[str, Any]] = {"glm_moe_dsa": {"index_topk": WIDTH + MOST}}
GEMMA: dict[str, Callable[..., Any]] = {
    "gemma2": tiny.make_gemma2,
    "gemma3": tiny.make_gemma3,
    "gemma4": partial(tiny.make_gemma4, multimodal=False),
    "gemma4-shared": partial(tiny.make_gemma4, multimodal=False, **tiny.GEMMA4_E2B),
    "gemma4-experts": partial(tiny.make_gemma4, multimodal=False, **tiny.GEMMA4_EXPERTS),
    "gemma4-unified": tiny.make_gemma4_unified,
}
ALWAYS = ("qwen3_next",)
"""In `make test`: layers with keys and values, and delta nets."""
OTHER_CACHES = (*E2E, "gpt_oss", "glm_moe_dsa", "lfm2", "gemma3", "gemma4-shared", "gemma4-experts")
"""In `make e2e`: families whose caches or layers differ most. `make nightly` has the others."""


def marked(case: str) -> Any:
    """Mark a case by the command that runs it."""
    if case in ALWAYS:
        return case
    return pytest.param(case, marks=pytest.mark.e2e if case in OTHER_CACHES else pytest.mark.nightly)


def made(case: str, folder: Path) -> Any:
    """Write a checkpoint and return transformers' model."""
    if case in GEMMA:
        return GEMMA[case](folder)
    return make(case, folder, **POSITIONS, **CHANGES.get(case, {}))


def prompts(lengths: tuple[int, ...] = LENGTHS, width: int = WIDTH) -> np.ndarray:
    """Return int32[B, P], padded on the right."""
    random = np.random.default_rng(0)
    tokens = np.zeros((len(lengths), width), np.int32)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = random.integers(3, 500, length)
    return tokens


def generated(
    built: Any,
    mesh: Any,
    batch: dict[str, np.ndarray],
    most: int = MOST,
    ends: tuple[int, ...] = (),
    **more: Any,
) -> Completions:
    """Return numpy arrays."""
    graph, trained, base = nnx.split(built.model, nnx.Param, ...)
    generation = Generation(most, ends or (tiny.VOCAB,), **more)
    with mesh:
        run = jit_generate(built.forward, lambda *parts: nnx.merge(graph, *parts), mesh, generation)
        return Completions(*map(np.asarray, run(trained, base, batch)))


def uncached(
    built: Any,
    mesh: Any,
    tokens: np.ndarray,
    lengths: tuple[int, ...],
    out: Completions,
    temperature: float = 1.0,
) -> tuple[np.ndarray, float]:
    """Return the log-probabilities [B, C] of completions by one forward pass over whole rows, and the largest
    logit."""
    rows = np.zeros((len(tokens), tokens.shape[1] + out.tokens.shape[1]), np.int32)
    for row, prompt, length, new in zip(rows, tokens, lengths, out.tokens, strict=True):
        row[:length], row[length : length + len(new)] = prompt[:length], new
    place = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int32), rows.shape)
    real = place < (np.array(lengths) + out.lengths)[:, None]
    one = {"tokens": rows, "positions": place, "segment_ids": real.astype(np.int32)}
    logits = training.logits(built, mesh, one) / temperature
    logps = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    found = np.zeros_like(out.logps)
    for i, length in enumerate(lengths):
        for c in range(out.lengths[i]):
            found[i, c] = logps[i, length - 1 + c, out.tokens[i, c]]
    return found, float(np.abs(logits).max())


def reference(model: Any, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Return the tokens that transformers' generate adds to a prompt, and the logits that it chose from."""
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": MOST, "pad_token_id": 0, "return_dict_in_generate": True}
    found = model.generate(torch.tensor([prompt]), output_logits=True, **options)
    return found.sequences[0, len(prompt) :].tolist(), torch.cat(found.logits).numpy()


@pytest.mark.parametrize("case", map(marked, (*CASES, *GEMMA)))
def test_greedy_tokens_match_transformers_generate(
    case: str, tmp_path: Path, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete prompts of unlike lengths, reading 36, 60 and 76 slots; compare the log-probabilities too."""
    monkeypatch.setattr(slots_read, "BLOCK", 24)
    model = made(case, tmp_path)
    mesh, built = training.build(tmp_path, {"fsdp": 1}, full=True)
    tokens = prompts()
    out = generated(built, mesh, right_padded(tokens, LENGTHS))
    apart, largest = 0.0, 0.0
    for row, length in enumerate(LENGTHS):
        expected, logits = reference(model, tokens[row, :length].tolist())
        assert out.tokens[row].tolist() == expected
        logps = torch.log_softmax(torch.tensor(logits), -1).numpy()[np.arange(MOST), expected]
        apart = max(apart, float(np.abs(out.logps[row] - logps).max()))
        largest = max(largest, float(np.abs(logits).max()))
    record_property("logps", apart / largest)
    print(f"\n{case}: log-probabilities differ by {apart:.1e}, logits are up to {largest:.1f}")
    assert apart <= LIMIT * largest


@pytest.mark.parametrize(
    ("filled", "reach", "read"),
    [
        (5, None, (0, 6)),
        (6, None, (0, 6)),
        (7, None, (0, 9)),
        (10, None, (0, 10)),
        (9, 4, (5, 9)),
        (7, 7, (0, 7)),
    ],
)
def test_attention_reads_filled_slots_within_its_window(
    filled: int, reach: int | None, read: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten slots, three are the prompt's, and later ones are read in blocks of three."""
    assert slots_read.sizes_read(256, 256 + 4096) == tuple(range(768, 4353, 512))
    monkeypatch.setattr(slots_read, "BLOCK", 3)
    later = cache.Cache(jnp.zeros((1, 10)), jnp.int32(filled - 1), jnp.zeros(1), [], 3)
    numbers = jnp.arange(10)

    def compute(numbers: Any, turned: Any) -> Any:
        assert turned.shape == (2, len(numbers))
        return jnp.stack([numbers[0], numbers[-1] + 1])

    assert tuple(later.with_filled(reach, compute, (numbers, 0), (jnp.ones((2, 10)), 1)).tolist()) == read


def test_left_padded_prompts_have_the_completions_of_right_padded_ones(tmp_path: Path) -> None:
    """Complete each prompt twice in one batch, of a model with attention, Mamba 2 and convolutions."""
    make("falcon_h1", tmp_path, **POSITIONS)
    mesh, built = training.build(tmp_path, {"fsdp": 1}, full=True)
    batch = right_padded(prompts(), LENGTHS)
    for name in ("tokens", "segment_ids"):
        rows = zip(batch[name], LENGTHS, strict=True)
        left = [np.roll(row, WIDTH - length) for row, length in rows]
        batch[name] = np.concatenate([batch[name], left])
    out = generated(built, mesh, {**batch, "salts": np.zeros(8, np.uint32)}, most=16)
    assert out.tokens[:4].tolist() == out.tokens[4:].tolist()
    assert np.abs(out.logps[:4] - out.logps[4:]).max() <= 1e-5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny.make_llama(folder)
    return folder


DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01)
ENDS = tuple(range(0, tiny.VOCAB, 9))


def test_sampled_tokens_depend_on_no_batch_and_rows_that_ended_stay_ended(llama: Path) -> None:
    """Draw two samples of each prompt. Divide the batch, and change the order of its rows. One is empty."""
    mesh, built = training.build(llama, {"fsdp": 1}, full=True)
    numbers = np.repeat(np.arange(4), 2)
    lengths = np.array(LENGTHS)[numbers]
    lengths[6] = 0
    batch = right_padded(prompts()[numbers], lengths, salts_of(7, numbers, np.tile(np.arange(2), 4)))
    options: dict[str, Any] = {"most": 16, "sampling": DRAWN, "ends": ENDS}
    out = generated(built, mesh, batch, **options)
    order = np.array([5, 2, 6, 0])
    some = generated(built, mesh, {name: value[order] for name, value in batch.items()}, **options)
    assert some.tokens.tolist() == out.tokens[order].tolist()
    assert some.lengths.tolist() == out.lengths[order].tolist()
    assert out.tokens[4].tolist() != out.tokens[5].tolist(), "two samples of a prompt"
    assert out.lengths[6] == 0 and not out.ended[6]
    assert len({*out.lengths.tolist()}) > 3 and {*out.ended.tolist()} == {True, False}
    for tokens, logps, length, ended in zip(out.tokens, out.logps, out.lengths, out.ended, strict=True):
        assert not {*tokens[: length - 1].tolist()} & {*ENDS} or not length
        assert ended == (length > 0 and int(tokens[length - 1]) in ENDS) and (ended or length in (0, 16))
        assert not tokens[length:].any() and not logps[length:].any() and logps[:length].all()
    expected, largest = uncached(built, mesh, batch["tokens"], tuple(lengths), out, DRAWN.temperature)
    assert np.abs(out.logps - expected).max() <= LIMIT * largest


def test_another_seed_prompt_sample_or_position_draws_other_tokens() -> None:
    """Count draws against their probabilities, and check that log-probabilities count the temperature."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    count = np.arange(4096, dtype=np.int32)
    zeros = np.zeros_like(count)

    @partial(jax.jit, static_argnums=(0, 1))
    def draw(seed: int, temperature: float, prompts: Any, samples: Any, numbers: Any) -> Any:
        def row(salt: Any, number: Any) -> Any:
            return choose(temperature * logits[None], Sampling(temperature), salt[None], number)

        tokens, logps = jax.vmap(row)(salts_of(seed, prompts, samples), numbers)
        return tokens[:, 0], logps[:, 0]

    draws = {
        "prompts": draw(0, 2.0, count, zeros, zeros),
        "samples": draw(0, 1.0, zeros, count, zeros),
        "positions": draw(0, 1.0, zeros, zeros, count),
        "seeds": draw(1, 1.0, count, zeros, zeros),
    }
    for name, (tokens, logps) in draws.items():
        shares = np.bincount(tokens, minlength=4) / len(count)
        assert np.abs(shares - np.exp(logits)).max() < 0.03, name
        assert np.allclose(logps, logits[np.asarray(tokens)], atol=1e-6), name
    for one, other in itertools.combinations(draws.values(), 2):
        assert (one[0] != other[0]).mean() > 0.5


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7, top_k=5),
        Sampling(1.3, top_p=0.6),
        Sampling(1.0, min_p=0.2),
        Sampling(0.9, top_k=9, top_p=0.8, min_p=0.15),
        Sampling(1.0, top_p=1e-4),
    ],
    ids=["top-k", "top-p", "min-p", "all", "one"],
)
def test_same_tokens_are_left_out_as_in_transformers(sampling: Sampling) -> None:
    logits = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32) * 2
    warpers = [transformers.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(transformers.MinPLogitsWarper(sampling.min_p))
    expected = torch.tensor(logits)
    for warper in warpers:
        expected = warper(None, expected)
    found = kept(jnp.asarray(logits) / sampling.temperature, sampling)
    assert np.isinf(found).any()
    assert np.allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"top_k": -1}])
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no such sampling"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_prompts_longer_than_the_indexer_are_refused(tmp_path: Path) -> None:
    make("glm_moe_dsa", tmp_path, num_hidden_layers=1, indexer_types=["full"])
    mesh, built = training.build(tmp_path, {"fsdp": 1}, full=True)
    with pytest.raises(UserError, match="have up to 38 tokens, and GLM 5 is computed here for at most 37"):
        generated(built, mesh, right_padded(prompts(), LENGTHS), most=26)


LAYOUTS = {
    "8x1": ({"fsdp": 8, "tp": 1}, {"fsdp": 8, "tp": 1}),
    "4x2": ({"fsdp": 4, "tp": 2}, {"fsdp": 4, "tp": 2}),
    "8x1-tp8": ({"fsdp": 8, "tp": 1}, {"fsdp": 1, "tp": 8}),
    "4x2-tp8": ({"fsdp": 4, "tp": 2}, {"fsdp": 1, "tp": 8}),
}
"""The mesh of the training step, and that of the rollouts."""
SHARDED = ("llama-untied", "gemma4-shared", "gpt_oss", "llama4", "qwen3_next", "falcon_h1", "jamba", "lfm2")
PAIRS = set(zip(SHARDED, itertools.cycle(LAYOUTS)))
"""In `make e2e`: every case in one layout, and every layout. `make nightly` has the whole product."""


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        case
        if case == ("llama-untied", "4x2-tp8")
        else pytest.param(*case, marks=pytest.mark.e2e if case in PAIRS else pytest.mark.nightly)
        for case in itertools.product(SHARDED, LAYOUTS)
    ],
)
def test_rollouts_have_the_log_probabilities_of_a_whole_pass_on_the_training_mesh(
    case: str, layout: str, tmp_path: Path
) -> None:
    """Generate with adapters, four samples of each prompt, in the layout of the step or in another one."""
    axes, rollout = LAYOUTS[layout]
    made(case, tmp_path)
    mesh, built = training.build(tmp_path, axes, targets=EVERY)
    randomize(built, scale=0.05)
    graph, trained, base = nnx.split(built.model, nnx.LoRAParam, ...)
    numbers = np.arange(16) % 4
    lengths = tuple(np.array(LENGTHS)[numbers].tolist())
    tokens = prompts()[numbers]
    batch = right_padded(tokens, lengths, salts_of(1, numbers, np.arange(16) // 4))
    rollouts = RolloutLayout(built, mesh, rollout)
    run = rollouts.jit_generate(lambda *parts: nnx.merge(graph, *parts), Generation(24, ENDS, Sampling(0.9)))
    placed = rollouts.place(base)
    out = Completions(*map(np.asarray, run(rollouts.place(trained), placed, batch)))
    built.provider.check_used()
    expected, largest = uncached(built, mesh, tokens, lengths, out, 0.9)
    apart = np.abs(out.logps - expected).max()
    print(f"\n{case} {layout}: log-probabilities differ by {apart:.1e}, logits are up to {largest:.1f}")
    assert apart <= LIMIT * largest
    weights = jax.tree.leaves(placed)
    assert all(dict(weight.sharding.mesh.shape) == rollout for weight in weights)
    assert (weights[0] is jax.tree.leaves(base)[0]) == (axes == rollout), "copied only into another layout"


def test_axes_of_another_number_of_devices_are_refused(llama: Path) -> None:
    mesh, built = training.build(llama, {"fsdp": 2, "tp": 2})
    with pytest.raises(UserError, match="need 8 devices, the mesh has 4"):
        RolloutLayout(built, mesh, {"tp": 8})


@pytest.mark.e2e
@pytest.mark.parametrize("axes", [{"fsdp": 4, "tp": 2}, {"fsdp": 1, "cp": 2, "tp": 2}], ids=["fsdp", "cp"])
@pytest.mark.parametrize("case", ["gemma4-shared", "llama4"])
def test_prompts_by_splash_attention_have_the_completions_of_plain_attention(
    case: str, axes: dict[str, int], tmp_path: Path
) -> None:
    """Fill the cache in the order in which cp's devices hold the tokens of a row."""
    made(case, tmp_path)
    mesh, built = training.build(tmp_path, axes, full=True)
    plain = generated(built, mesh, right_padded(prompts(), LENGTHS), most=24)
    settings = replace(built.forward.settings, attention="splash")
    built = replace(built, forward=replace(built.forward, settings=settings))
    out = generated(built, mesh, right_padded(prompts(), LENGTHS), most=24)
    assert out.tokens.tolist() == plain.tokens.tolist()
    assert np.abs(out.logps - plain.logps).max() <= 1e-4


@pytest.mark.e2e
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantized_base_generates_in_another_layout(quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    tiny.make_llama(tmp_path, **sizes)
    mesh, built = training.build(tmp_path, {"fsdp": 8, "tp": 1}, quantization=quantization)
    graph, trained, base = nnx.split(built.model, nnx.LoRAParam, ...)
    batch = right_padded(np.tile(prompts(), (2, 1)), LENGTHS * 2)
    outs = []
    for rollout in ({"fsdp": 8, "tp": 1}, {"fsdp": 2, "tp": 4}):
        rollouts = RolloutLayout(built, mesh, rollout)
        run = rollouts.jit_generate(lambda *parts: nnx.merge(graph, *parts), Generation(8, ENDS))
        outs.append(run(rollouts.place(trained), rollouts.place(base), batch))
    assert outs[0].tokens.tolist() == outs[1].tokens.tolist()
    assert np.abs(outs[0].logps - outs[1].logps).max() <= 1e-4
