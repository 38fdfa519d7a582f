"""Test a server of the merged miniature: its token times, and whether its tokens are the miniature's.

The probe holds the machine's devices until it ends. So it saves the merged miniature with its greedy answers.
Then the artifact's server is started on it, and a second call of probe.py queries it, without JAX.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..clients.answers import ServedModel, first_difference
from ..clients.client import Client
from ..errors import UserError
from ..merging.verify import logits
from ..model.loading import build
from ..settings import ModelSettings
from ..weights.checkpoint import HFCheckpoint
from .compare_numbers import reference_mesh
from .probe_results import LOCK, VERSION, digest_of, table

ANSWERS = "answers.json"
LENGTHS, NEW = (3, 9, 20, 33), 16
"""Number of tokens of each prompt, and of each answer."""
TIE = 0.25
"""The lead of the most likely token, relative to the root mean square of all logits, below which bfloat16 or
an fp8 cache may choose another token. No server was tried on a TPU."""


def keep(folder: Path, model: ModelSettings, digest: str) -> None:
    """Write a tokenizer and greedy answers (from one CPU device in float32) next to merged weights.

    Args:
        folder: the merged miniature's folder.
        digest: digest of the recipe.
    """
    base, mesh = HFCheckpoint.open(folder), reference_mesh({"fsdp": 1, "tp": 1})
    vocabulary, random = base.architecture.vocab_size, np.random.default_rng(1)
    _write_tokenizer(folder, vocabulary)
    shape = (len(LENGTHS), max(LENGTHS) + NEW)
    places, ends = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape), np.array(LENGTHS)
    tokens = random.integers(3, vocabulary, shape).astype(np.int32)
    prompts = [tokens[row, :end].tolist() for row, end in enumerate(LENGTHS)]
    leads: list[list[float]] = [[] for _ in LENGTHS]
    with jax.default_device(mesh.local_devices[0]), jax.default_matmul_precision("highest"):
        plain = replace(model.unquantized, dtype="float32", attention="dot", remat="none")
        built = build(base, plain, None, mesh, (), 0)
        for _ in range(NEW):
            valid = (places < ends[:, None]).astype(np.int32)
            rows = {"tokens": tokens * valid, "positions": places * valid, "segment_ids": valid}
            last = logits(built, rows, mesh)[np.cumsum(ends) - 1]
            best, second = np.sort(last)[:, :-3:-1].T
            for row, lead in enumerate((best - second) / np.sqrt(np.mean(last**2, axis=1))):
                leads[row].append(round(float(lead), 4))
                tokens[row, ends[row]] = last[row].argmax()
            ends = ends + 1
    answers = [
        {
            "prompt": prompt,
            "tokens": tokens[row, len(prompt) : len(prompt) + NEW].tolist(),
            "leads": leads[row],
        }
        for row, prompt in enumerate(prompts)
    ]
    text = json.dumps({"recipe": digest, "answers": answers}, indent=1)
    (folder / ANSWERS).write_text(f"{text}\n", encoding="utf-8")


def ask(url: str, name: str, kept: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Query a server; return its figures, and a sentence for each answer that is not the miniature's.

    Args:
        name: the served name of the model.
        kept: ANSWERS; None if it serves another model, which is only timed.

    Raises:
        UserError: it does not answer.
    """
    model = ServedModel(Client(url), name, chat=False)
    fixed = [{"prompt": list(range(5, 5 + length))} for length in LENGTHS]
    same, problems, firsts, paces = 0, [], [], []
    for number, request in enumerate(kept["answers"] if kept else fixed, 1):
        body = {"model": name, "prompt": request["prompt"], "max_tokens": NEW, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        if number == 1:
            model.streamed(body)  # compiling or loading at the first request is not measured
        came = model.streamed(body)
        firsts.append(came.first)
        paces += [1 / came.rate] if came.rate else []
        if not kept:
            continue
        at = first_difference(came.tokens or [], request["tokens"])
        same += at is None
        lead = 1.0 if at is None or at >= len(request["leads"]) else request["leads"][at]
        if at is not None and lead > TIE:
            problems.append(
                f"the server's answer {number} differs from the merged miniature's at token {at + 1}, which "
                f"leads by {lead:.2f} there (allowed {TIE})"
            )
    times = {"first_token_seconds": statistics.median(firsts)}
    times |= {"token_seconds": statistics.median(paces)} if paces else {}
    return times | ({"answers": len(kept["answers"]), "same": same} if kept else {}), problems


def hold(artifact: Path, file: Path, url: str, folder: Path | None) -> int:
    """Query a server, print the result, and add it to probe.json.

    Args:
        file: probe.json; it need not exist.
        folder: folder of the served merged miniature; None for any other model.

    Returns:
        The exit status: 1 if an answer is not the miniature's.
    """
    lock = json.loads((artifact / LOCK).read_text(encoding="utf-8"))
    digest, kept = digest_of(lock), None
    if folder is not None:
        kept = _read(folder / ANSWERS)
        if "answers" not in kept:
            raise UserError(f"{folder} holds no merged miniature", "probe.py --merged DIR keeps it there")
        if kept.get("recipe") != digest:
            raise UserError(f"{folder} holds the miniature of another recipe", "probe.py --merged DIR")
    times, problems = ask(url, lock["recipe"]["name"], kept)
    told = _read(file)
    if told.get("recipe") != digest:
        told = {
            "probe": VERSION,
            "date": datetime.now(UTC).date().isoformat(),
            "recipe": digest,
        }
    told["problems"] = [
        old for old in told.get("problems", []) if not old.startswith("the server's")
    ] + problems
    file.write_text(json.dumps(told | {"server": times}, indent=1) + "\n", encoding="utf-8")
    taken = (("to the first token", "first_token_seconds"), ("of a token", "token_seconds"))
    rows = [(f"ms {words}", "-", f"{1e3 * times[key]:.2f}") for words, key in taken if key in times]
    compared = f"{times['same']} the same" if kept else "not compared: --merged DIR names the miniature"
    rows.append(("greedy answers", str(times.get("answers", "-")), compared))
    print(table(rows))
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with a word per token, for servers that do not start without a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0")).save(
        str(folder / "tokenizer.json")
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
