"""The first values of adapters: drawn at random, or computed from the base's weights. Numpy only, float32.

Random values are the same for every backend, mesh and machine.

PiSSA, OLoRA and LoftQ compute them from the base's weights, here as in PEFT. With PiSSA (Meng et al. 2024)
B A is the principal part of a weight W, with OLoRA (Büyükakyüz 2024) the first columns and rows of its QR
decomposition; the rest, W - scale * B A, is frozen. With LoftQ (Li et al. 2023, one iteration) W is frozen in
its quantized form, and B A is the principal part of the quantization error. In all three cases training turns
the base's W into W + scale * (B A - B0 A0), where A0 and B0 are the first values: a plain adapter of twice
the rank. So A0 and B0 are kept next to a run's checkpoints.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from .adapters import Adapter, LoraSettings, Matrices

UNIFORM = {"peft": 1.0, "qwix": 6.0}
"""The square of the bound, times fan_in."""

Start = dict[str, Matrices]
"""A [rank, in], B [out, rank] and with DoRA the magnitudes [out] of each projection, by its name
("layers.0.self_attn.q_proj")."""


def initial_pair(adapter: Adapter, settings: LoraSettings, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first values of A and B, float32 of `a_shape` and `b_shape`; one of the two is zero.

    A is uniform within 1/sqrt(fan_in) as in PEFT (kaiming_uniform with a = sqrt(5)), uniform within
    sqrt(6/fan_in) as in Qwix (he_uniform), or normal with deviation 1/rank as PEFT's gaussian. fan_in is that
    of a single expert. With zero_a B is drawn instead, within 1/sqrt(rank). The values depend only on the
    seed and the projection's name, not on the mesh or on the other trained weights.
    """
    if settings.init == "zero_a":
        low, high, *_ = adapter.peft_shapes
        drawn = _uniform(random_for(seed, f"{adapter.name}.B"), high, adapter.rank**-0.5)
        a, b = replace(adapter, dora=False).from_peft((np.zeros(low, np.float32), drawn))
        return a, b
    fan_in = int(np.prod(adapter.a_shape[adapter.target.stacked : -1]))
    random = random_for(seed, adapter.lending.name)
    if settings.init == "gaussian":
        a = random.standard_normal(adapter.a_shape, dtype=np.float32) / np.float32(adapter.rank)
    else:
        a = _uniform(random, adapter.a_shape, np.sqrt(UNIFORM[settings.init] / fan_in))
    return a, np.zeros(adapter.b_shape, np.float32)


def initial_adapters(adapters: Sequence[Adapter], settings: LoraSettings, seed: int) -> Start:
    """Return A and B of each projection ("layers.0.self_attn.q_proj"), as in PEFT."""
    return {adapter.name: adapter.to_peft(*initial_pair(adapter, settings, seed)) for adapter in adapters}


def path_hash(path: str) -> int:
    """Hash a path to a number that is the same on every machine and Python version."""
    return zlib.crc32(path.encode())


def random_for(seed: int, name: str) -> np.random.Generator:
    """Return a generator of random numbers that depend only on the seed and a name."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, path_hash(name)])))


def _uniform(random: np.random.Generator, shape: Sequence[int], bound: float) -> np.ndarray:
    return (random.random(shape, dtype=np.float32) * 2.0 - 1.0) * np.float32(bound)


def first_values(settings: LoraSettings, name: str, weight: np.ndarray, seed: int) -> Matrices:
    """Return a projection's first A and B, rounded to settings.dtype, and with DoRA magnitudes, in float32.

    Args:
        name: of the projection.
        weight: [out, in] to factor as scale * B A: the base's, or with LoftQ the quantization error.
        seed: of the run, for `pissa_niter_N`.
    """
    weight, rank, scale = weight.astype(np.float32), settings.rank_of(name), settings.scale_of(name)
    if settings.init == "olora":
        # The first columns of Q depend only on W's first columns. PEFT does not divide by the scale here.
        high = np.linalg.qr(weight[:, :rank])[0]
        low = high.T @ weight
    else:
        _, _, iterations = settings.init.partition("_niter_")
        if iterations:
            u, s, v = svd_lowrank(weight, rank, int(iterations), random_for(seed, f"{name}.svd"))
        else:
            u, s, v = largest(weight, rank)
        root = np.sqrt(s / np.float32(scale))
        low, high = root[:, None] * v, u * root
    dtype = ml_dtypes.bfloat16 if settings.dtype == "bfloat16" else np.float32
    pair = (np.ascontiguousarray(part).astype(dtype).astype(np.float32) for part in (low, high))
    # The lengths of W's own columns: of the frozen weight plus scale * B A, as in PEFT.
    return *pair, *([np.linalg.norm(weight, axis=1)] if settings.kind == "dora" else [])


def largest(weight: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return U [out, rank], S [rank] and V^T [rank, in] of the largest singular values.

    Computed from the eigenvectors of W W^T or W^T W in float64, which take 16 bytes for each number of that
    matrix. This takes an eighth of the time of LAPACK's SVD, and is at least as exact as the SVD in float32.
    """
    if len(weight) > weight.shape[1]:
        v, s, u = largest(weight.T, rank)
        return u.T, s, v.T
    gram = np.zeros((len(weight), len(weight)))
    for first in range(0, weight.shape[1], 4096):
        part = weight[:, first : first + 4096].astype(np.float64)
        gram += part @ part.T
    values, vectors = np.linalg.eigh(gram)
    u = vectors[:, : -rank - 1 : -1].astype(np.float32)
    s = np.sqrt(np.maximum(values[: -rank - 1 : -1], 0)).astype(np.float32)
    return u, s, (u.T @ weight) / np.maximum(s, np.finfo(np.float32).tiny)[:, None]


def svd_lowrank(
    weight: np.ndarray, rank: int, iterations: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute U [out, rank], S [rank] and V^T [rank, in] by subspace iteration, as torch.svd_lowrank (Halko
    et al. 2009, algorithms 4.4 and 5.1), without oversampling."""
    if len(weight) < weight.shape[1]:
        v, s, u = svd_lowrank(weight.T, rank, iterations, random)
        return u.T, s, v.T
    basis = np.linalg.qr(weight @ random.standard_normal((weight.shape[1], rank), dtype=np.float32))[0]
    for _ in range(iterations):
        basis = np.linalg.qr(weight @ np.linalg.qr(weight.T @ basis)[0])[0]
    u, s, v = np.linalg.svd(basis.T @ weight, full_matrices=False)
    return basis @ u, s, v


def plain(settings: LoraSettings) -> LoraSettings:
    """Return the settings of adapters of twice the rank whose products are scaled like these."""
    factor = math.sqrt(2) if settings.rslora else 2
    return replace(
        settings,
        init="peft",
        rank=2 * settings.rank,
        alpha=factor * settings.alpha,
        rank_pattern={key: 2 * value for key, value in settings.rank_pattern.items()},
        alpha_pattern={key: factor * value for key, value in settings.alpha_pattern.items()},
    )


def joined(values: Mapping[str, Matrices], initial: Mapping[str, Matrices]) -> Start:
    """Return the trained values as `plain` adapters of the base itself: [A; A0] and [B, -B0].

    As PEFT's `subtract_mutated_init`, but by module, so that ranks and alphas may differ with rsLoRA too.

    Args:
        values: A, B and with DoRA the magnitudes, by projection.
        initial: the first values of the same.
    """
    out: Start = {}
    for name, (a, b, *magnitude) in values.items():
        a0, b0 = (part.astype(a.dtype) for part in initial[name][:2])
        out[name] = np.concatenate((a, a0)), np.concatenate((b, -b0), axis=1), *magnitude
    return out


def halved(values: Mapping[str, Matrices]) -> tuple[Start, Start]:
    """Invert `joined`: return the trained values and the first values."""
    trained: Start = {}
    initial: Start = {}
    for name, (a, b, *magnitude) in values.items():
        rank = len(a) // 2
        trained[name] = a[:rank], b[:, :rank], *magnitude
        initial[name] = a[rank:], -b[:, rank:]
    return trained, initial
