"""Tests of the chunked loss against a plain computation, and against all logits at once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipec.runtime.model.forward import Head
from recipec.runtime.model.layers import attention_mask
from recipec.runtime.model.sharding import shard_rows, start_mesh
from recipec.runtime.settings import MeshSettings
from recipec.runtime.training import losses
from recipec.runtime.training.losses import token_logps
from tests import tiny
from tests.bench import step
from tests.runtime import training

NAMES = ("tokens", "positions", "segment_ids", "loss_mask", "norm")
WIDTH = 24


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use three positions a chunk: six chunks for 16 positions, of which two are padding."""
    monkeypatch.setattr(losses, "LOGITS_BYTES", 3 * 4 * training.ROWS * tiny.VOCAB)


def mesh_of(**axes: int) -> Any:
    return start_mesh(MeshSettings("cpu", 8, axes))


def reference(logits: np.ndarray, one: dict[str, Any]) -> float:
    total = 0.0
    for row in range(logits.shape[0]):
        for t in range(1, logits.shape[1]):
            same = one["segment_ids"][row, t] == one["segment_ids"][row, t - 1]
            if one["loss_mask"][row, t] and same:
                scores = logits[row, t - 1].astype(np.float64)
                total += np.log(np.exp(scores - scores.max()).sum()) + scores.max()
                total -= scores[one["tokens"][row, t]]
    return total / float(one["norm"])


def fake(hidden: Any, head: Any) -> SimpleNamespace:
    """Return the parts of a Forward that the loss needs."""
    return SimpleNamespace(hidden=lambda *_: hidden, head=lambda _: head, dealt=False)


def make_head(weight: Any, tied: bool = True, softcap: float | None = None) -> Any:
    return Head(weight, tied, softcap, np.float32)


def random(vocabulary: int = tiny.VOCAB, length: int = training.LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Return hidden states [B, T, D] and a head [V, D] whose logits have a spread of about 4."""
    generator = np.random.default_rng(0)
    hidden = generator.standard_normal((training.ROWS, length, WIDTH)).astype(np.float32)
    return hidden, (0.8 * generator.standard_normal((vocabulary, WIDTH))).astype(np.float32)


def full_loss(logits: Any, one: dict[str, Any]) -> Any:
    """Compute the loss from all logits, differentiated by jax: without a scan or a handwritten gradient."""
    targets = jnp.roll(one["tokens"], -1, axis=1)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=2)[..., 0]
    counted = one["loss_mask"][:, 1:] & (one["segment_ids"][:, 1:] == one["segment_ids"][:, :-1])
    return jnp.where(counted, nll[:, :-1], 0.0).sum() / one["norm"]


def chunked_loss(head: Any, hidden: Any, one: dict[str, Any]) -> Any:
    return losses.batch_loss(fake(hidden, head), None, one)


def largest(found: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest value, or absolute if all values are 0."""
    scale = np.abs(np.asarray(expected)).max() or 1.0
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max() / scale)


@pytest.mark.usefixtures("small_chunks")
def test_padded_and_packed_row_losses_match_reference() -> None:
    hidden, weight = random()
    for one in (training.batch(0), training.packed_batch()):
        expected = reference(hidden @ weight.T, one)
        found = float(jax.jit(lambda x, one=one: chunked_loss(make_head(weight), x, one))(hidden))
        assert abs(found - expected) < 1e-6 * expected


@pytest.mark.usefixtures("small_chunks")
def test_micro_batch_without_targets_has_zero_loss_and_gradient() -> None:
    one = training.batch(0)
    one["loss_mask"][:] = False
    hidden, weight = random()
    for norm in (0.0, 5.0):
        one["norm"] = np.float32(norm)
        value, gradient = jax.jit(jax.value_and_grad(lambda x: chunked_loss(make_head(weight), x, one)))(
            hidden
        )
        assert float(value) == 0.0
        assert not np.asarray(gradient).any()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = jnp.full((1, 1, 4096), 3.0, jnp.bfloat16)
    found = losses.token_nll(logits, jnp.zeros((1, 1), jnp.int32))
    assert found.dtype == jnp.float32
    assert abs(float(found[0, 0]) - np.log(4096)) < 1e-5


@pytest.mark.parametrize(
    ("tp", "vocabulary", "tied", "softcap"),
    [(1, tiny.VOCAB, True, None), (2, tiny.VOCAB, False, 3.0), (2, 512, True, 3.0)],
)
def test_chunking_does_not_change_loss_or_gradients(
    tp: int, vocabulary: int, tied: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of(fsdp=8 // tp, tp=tp)
    length = training.LENGTH - 3
    hidden, weight = random(vocabulary, length)
    weight = weight if tied else weight.T.copy()
    one = training.packed_batch()
    one.update({name: one[name][:, :length] for name in NAMES if one[name].ndim})

    def full(hidden: Any, weight: Any, one: Any) -> Any:
        return full_loss(make_head(weight, tied, softcap).logits(hidden, weight), one)

    def chunked(hidden: Any, weight: Any, one: Any) -> Any:
        return chunked_loss(make_head(weight, tied, softcap), hidden, one)

    def gradients(function: Any, argnums: Any) -> Any:
        with mesh:
            placed = shard_rows({"hidden": hidden, **one}, mesh)
            states = placed.pop("hidden")
            return jax.jit(jax.value_and_grad(function, argnums))(states, weight, placed)

    with mesh:
        position = 4 * (training.ROWS // mesh.shape["fsdp"]) * vocabulary
        parts = mesh.shape["tp"] if vocabulary % mesh.shape["tp"] == 0 else 1
        monkeypatch.setattr(losses, "LOGITS_BYTES", 3 * position // parts)
        assert losses.Chunks.of(hidden.shape, vocabulary) == losses.Chunks(length, 5, 3, 1)
    expected, (hidden_gradient, weight_gradient) = gradients(full, (0, 1))
    for argnums in (0, (0, 1)):
        found, gradient = gradients(chunked, argnums)
        assert abs(float(found) - float(expected)) <= 1e-6 * float(expected)
        frozen = argnums == 0
        assert largest(gradient if frozen else gradient[0], hidden_gradient) < 2e-6
        if not frozen:
            assert largest(gradient[1], weight_gradient) < 2e-6


def test_chunks_fit_memory_limit_with_little_padding() -> None:
    with mesh_of(fsdp=4, tp=2) as mesh:
        rows, tp = 8 // mesh.shape["fsdp"], mesh.shape["tp"]
        for length, count in ((1, 1), (16, 1), (512, 8), (3072, 12), (4099, 17)):
            chunks = losses.Chunks.of((8, length, 64), 262_144)
            assert chunks.count == count
            assert chunks.size * rows * 262_144 // tp * 4 <= losses.LOGITS_BYTES
            assert 0 <= chunks.count * chunks.size - length < chunks.count
        # If tp does not divide the vocabulary, each device holds all of it.
        assert losses.Chunks.of((8, 4096, 64), 262_143).size * rows * 262_143 * 4 <= losses.LOGITS_BYTES


@pytest.mark.usefixtures("small_chunks")
def test_token_logps_and_gradients_match_reference() -> None:
    hidden, weight = random()
    one = training.packed_batch()
    one["segment_ids"][:, -3:] = 0
    weights = np.random.default_rng(1).standard_normal(one["tokens"].shape).astype(np.float32)
    ids = tuple(one[name] for name in ("tokens", "positions", "segment_ids"))
    segments = one["segment_ids"]
    inside = np.zeros(segments.shape, bool)
    inside[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)

    def logps(hidden: Any, weight: Any) -> Any:
        return token_logps(fake(hidden, make_head(weight, softcap=3.0)), None, *ids)

    def full(hidden: Any, weight: Any) -> Any:
        scores = jax.nn.log_softmax(make_head(weight, softcap=3.0).logits(hidden, weight))
        chosen = jnp.take_along_axis(scores, jnp.roll(one["tokens"], -1, axis=1)[..., None], axis=2)[..., 0]
        return jnp.where(inside, chosen, 0.0)

    found, expected = (jax.jit(function)(hidden, weight) for function in (logps, full))
    assert found.dtype == jnp.float32
    assert not np.asarray(found)[~inside].any()
    assert largest(found, expected) < 1e-6
    pairs = zip(
        *(
            jax.jit(jax.grad(lambda *a, f=f: (f(*a) * weights).sum(), (0, 1)))(hidden, weight)
            for f in (logps, full)
        ),
        strict=True,
    )
    assert max(largest(*pair) for pair in pairs) < 2e-6


def test_trained_head_gradient_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use 256 chunks: sums in bfloat16 would lose what a single product keeps."""
    hidden, weight = random(length=256)
    tokens = np.random.default_rng(2).integers(0, tiny.VOCAB, (training.ROWS, 256)).astype(np.int32)
    full = np.ones(tokens.shape, np.int32)
    one = {"tokens": tokens, "positions": full, "segment_ids": full, "loss_mask": full > 0, "norm": 1.0}

    def gradient(dtype: Any, budget: int) -> np.ndarray:
        monkeypatch.setattr(losses, "LOGITS_BYTES", budget)
        states, head = (jnp.bfloat16(x).astype(dtype) for x in (hidden, weight))
        function = jax.jit(jax.grad(lambda w: chunked_loss(make_head(w), states, one)))
        return np.asarray(function(head), np.float32)

    exact = gradient(jnp.float32, 2**30)
    whole, chunked = (np.abs(gradient(jnp.bfloat16, n) - exact).mean() for n in (2**30, 1))
    assert chunked < 1.5 * whole


@pytest.fixture(scope="module", params=["gemma2", "llama-untied"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Build a model on 4x2, and yield its mesh with it."""
    directory = tmp_path_factory.mktemp("model") / request.param
    name, _, untied = request.param.partition("-")
    options: dict[str, Any] = {"num_hidden_layers": 1}
    if name == "llama":
        options["tie_word_embeddings"] = not untied
    getattr(tiny, f"make_{name}")(directory, **options)
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield training.build(directory, {"fsdp": 4, "tp": 2}, remat="none")
    jax.config.update("jax_default_matmul_precision", before)


def test_head_gives_same_logits_as_tunix(built: Any) -> None:
    mesh, model = built
    graph, state = nnx.split(model.model)
    one = training.packed_batch()

    @jax.jit
    def forward(state: Any, one: Any) -> Any:
        merged = nnx.merge(graph, state)
        head = model.forward.head(merged)
        return head.logits(model.forward.hidden(merged, *(one[name] for name in NAMES[:3])), head.weight)

    with mesh:
        found = np.asarray(forward(state, shard_rows(one, mesh)))
    expected = training.logits(model, mesh, one)
    assert found.dtype == np.float32
    assert expected.std() > 0.5
    # If an axis shards the features, XLA may sum the two programs' products in another order.
    assert largest(found, expected) < 1e-6


@pytest.mark.e2e
def test_full_vocabulary_temporaries_are_at_most_a_quarter_of_tunix() -> None:
    found = step.measure_temporaries()
    assert found["tunix"] > 2 * 2**30
    assert found["recipec"] <= found["tunix"] / 4, found


def test_attention_mask_is_causal_within_each_sample() -> None:
    mask = np.asarray(attention_mask(jnp.array([[1, 1, 2, 2, 0]])))[0]
    expected = np.zeros((5, 5), bool)
    for query, keys in ((0, [0]), (1, [0, 1]), (2, [2]), (3, [2, 3])):
        expected[query, keys] = True
    assert np.array_equal(mask, expected)
