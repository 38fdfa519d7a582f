"""Flags and environment variables of the server: those that vLLM has, and none that a key sets already."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from compiler.facts import Facts
from compiler.serving import blocks, features
from compiler.serving import flags as vllm
from compiler.wording import listing
from spec.diagnostics import Diagnostic
from spec.paths import join

if TYPE_CHECKING:
    from spec.language import Serve

KEYS = {
    "tensor-parallel-size": "serve.tensor_parallel_size",
    "tp": "serve.tensor_parallel_size",
    "data-parallel-size": "serve.data_parallel_size",
    "dp": "serve.data_parallel_size",
    "model": "serve.model",
    "served-model-name": "name",
    "enable-lora": "serve.weights",
    "lora-modules": "serve.weights",
    "max-lora-rank": "serve.weights",
    "max-model-len": "serve.max_model_len",
    "max-num-seqs": "serve.max_num_seqs",
    "max-num-batched-tokens": "serve.max_num_batched_tokens",
    "kv-cache-dtype": "serve.kv_cache_dtype",
    "quantization": "serve.quantization",
    "enable-prefix-caching": "serve.prefix_caching",
    "enable-auto-tool-choice": "serve.tool_call_parser",
    "tool-call-parser": "serve.tool_call_parser",
    "host": "serve.host",
    "port": "serve.port",
}
"""Flags of `vllm serve` that a key of the recipe sets."""

SECRETS = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
"""Flags that hold a secret, and the environment variable that the server reads it from."""

MISPLACED = {
    "config": "a file of further flags would be read that is not part of the artifact",
    "headless": "a server without an endpoint answers no health check",
    "grpc": "the health check, the client scripts and the load balancer speak HTTP",
    "uds": "host and port would be ignored, and the health check with them",
    "ssl-keyfile": "the health check and the client scripts speak plain HTTP",
    "ssl-certfile": "the health check and the client scripts speak plain HTTP",
    "root-path": "the health check and the client scripts ask for /health and /v1",
}
"""Flags that the rest of the artifact does not go with, and why."""

NEEDED: dict[str, dict[str, str]] = {
    "gemma4": {
        "disable-chunked-mm-input": "tpu-inference runs no multimodal model that takes images in chunks"
    }
}
"""By family: switches that the artifact sets, and why they cannot be switched off."""

PARSERS = {"gemma4": "gemma4"}
"""The tool-call parser made for a family's markup."""

CODES = {"unknown": "E0623", "abbreviated": "E0624", "value": "E0625", "key": "E0626"}

NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*(\.[A-Za-z0-9_-]+)*"

CLOSE = 0.85
"""How alike two names of environment variables are when one is taken for a misspelling of the other."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    serve = facts.recipe.serve
    if serve is None:
        return
    yield from _flags(serve, facts.model.family.name if facts.model else "")
    yield from _environment(serve)
    yield from _parsers(facts, serve)
    yield from _structured_outputs(serve)


def _flags(serve: Serve, family: str) -> Iterator[Diagnostic]:
    seen: dict[str, str] = {}
    for name, value in serve.extra_args.items():
        where = join(("serve", "extra_args", name))
        flag = vllm.dashed(name)
        if not re.fullmatch(NAME, flag):
            plain = re.sub(r"[^a-z0-9.-]+", "-", flag.lower()).strip("-.")
            yield Diagnostic(
                "E0615",
                f"`{name}` is not the name of a flag: names have no leading dashes and are in lower case",
                where,
                f"did you mean `{plain}`?" if plain else "write for example disable_chunked_mm_input: true",
            )
            continue
        known = vllm.find(flag.partition(".")[0])
        own = known.name if known else flag
        if (key := _set_by_key(flag, own)) is not None:
            yield Diagnostic(
                "E0616",
                f"`{name}` is what {key} sets: the flag would be given twice",
                where,
                f"set {key}",
            )
        elif own in SECRETS:
            # Plain values have been refused by their name, while the recipe was read.
            if isinstance(value, list | dict):
                yield Diagnostic(
                    "E0628",
                    f"`{name}` holds a secret, which would be written into the artifact and be seen in the "
                    "list of processes",
                    where,
                    f"remove it, and set {SECRETS[own]} in the environment where the server runs",
                )
        elif own == "trust-remote-code" and value is True and flag == own:
            yield Diagnostic(
                "E0629",
                f"`{name}` runs code that came with the weights: untrusted model code is off",
                where,
                "leave it out: vLLM has code of its own for the models that can be fine-tuned here",
            )
        elif own in NEEDED.get(family, {}) and (value is False or flag != own):
            yield Diagnostic("E0630", f"`{name}`: {NEEDED[family][own]}", where, "leave it out")
        elif own in MISPLACED and value not in (None, False):
            yield Diagnostic("E0630", f"`{name}`: {MISPLACED[own]}", where, "leave it out")
        else:
            yield from _checked(name, value, where)
        whole = own + flag.removeprefix(flag.partition(".")[0])
        again = next((other for path, other in seen.items() if _overlap(path, whole)), None)
        if again is not None:
            yield Diagnostic(
                "E0627",
                f"`{name}` and `{again}` set the same, and vLLM takes one of them alone",
                where,
                "keep one of the two",
            )
        seen.setdefault(whole, name)


def _set_by_key(flag: str, own: str) -> str | None:
    """The key that sets a flag, also where vLLM would take the flag's name for the beginning of it."""
    if flag in KEYS or own in KEYS:
        return KEYS.get(flag) or KEYS[own]
    stands_for = vllm.abbreviated(flag)
    return KEYS.get(stands_for[0].name) if len(stands_for) == 1 else None


def _overlap(one: str, other: str) -> bool:
    """Whether two flags set the same: they are one, or one is a key of the other's configuration."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _checked(name: str, value: Any, where: str) -> Iterator[Diagnostic]:
    for problem in vllm.problems(name, value):
        yield Diagnostic(CODES[problem.kind], problem.message, where, problem.help)


def _environment(serve: Serve) -> Iterator[Diagnostic]:
    for name, value in serve.env.items():
        where = join(("serve", "env", name))
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Diagnostic(
                "E0618",
                f"`{name}` is not the name of an environment variable",
                where,
                "use letters, digits and underscores",
            )
        elif not value.isprintable():
            yield Diagnostic(
                "E0618",
                f"`{name}` holds a line break or another control character, which no Dockerfile can set",
                where,
                "write it on one line",
            )
        elif name == blocks.VARIABLE and serve.decode_block_sizes is not None:
            yield Diagnostic(
                "E0638",
                f"`{name}` is what serve.decode_block_sizes sets: it would be given twice",
                where,
                "keep serve.decode_block_sizes",
            )
        elif said := _misspelt(name):
            yield Diagnostic("W0632", *said[:1], where, said[1])


def _misspelt(name: str) -> tuple[str, str | None] | None:
    """What to say of a variable that neither vLLM nor tpu-inference reads, if it looks like one of theirs."""
    own, tpu = (vllm.catalogue()["environment"][which] for which in ("vllm", "tpu_inference"))
    if name in own or name in tpu:
        return None
    close = difflib.get_close_matches(name, [*own, *tpu], 1, CLOSE)
    if not close and not name.startswith("VLLM_"):
        return None
    who = "vLLM" if name.startswith("VLLM_") else "tpu-inference"
    said = f"did you mean `{close[0]}`?" if close else "remove it, or check its name"
    return f"{who} {vllm.version()} reads no variable `{name}`, and passes over it without a word", said


def _parsers(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    given = {vllm.dashed(name): value for name, value in serve.extra_args.items()}
    reasoning = given.get("reasoning-parser")
    asked = [
        ("tool-call", "tool_parsers", serve.tool_call_parser, "serve.tool_call_parser", "tool-parser-plugin"),
        ("reasoning", "reasoning_parsers", reasoning, _argument(serve, "reasoning-parser"), None),
    ]
    for what, registered, parser, where, plugin in asked:
        plugins = (plugin or "reasoning-parser-plugin",)
        if not isinstance(parser, str) or parser.lower() in ("", "none") or any(map(given.get, plugins)):
            continue
        known = vllm.catalogue()[registered]
        if parser not in known:
            close = difflib.get_close_matches(parser, known, 3, 0.5)
            said = f"did you mean {listing((f'`{one}`' for one in close), 'or')}?" if close else None
            yield Diagnostic(
                "E0631",
                f"vLLM {vllm.version()} has no {what} parser `{parser}`",
                where,
                said or f"it has {listing(known)}",
            )
    family = facts.model.family.name if facts.model else ""
    expected, parser = PARSERS.get(family), serve.tool_call_parser
    if parser in vllm.catalogue()["tool_parsers"] and expected not in (None, parser):
        yield Diagnostic(
            "W0619",
            f"tool_call_parser `{parser}` is not the one for this model's markup; vLLM accepts any name and "
            "finds no tool calls",
            "serve.tool_call_parser",
            f"tool_call_parser: {expected}",
        )


def _structured_outputs(serve: Serve) -> Iterator[Diagnostic]:
    """Options of one backend that another is asked for, which vLLM refuses when it starts."""
    known = features.features()["structured_outputs"]
    given, places = _configuration(serve, "structured-outputs-config")
    backend = given.get("backend", "auto")
    for option, backends in known["options"].items():
        if given.get(option) is True and backend not in backends:
            yield Diagnostic(
                "E0649",
                f"{option} is for the {listing(backends, 'or')} backend of structured outputs, and the "
                f"backend is {backend}: vLLM refuses it",
                places[option],
                f"structured-outputs-config.backend: {backends[0]}",
            )
    if given and features.replicas_in_one_process(serve):
        yield Diagnostic(
            "W0648",
            f"{features.ONE_PROCESS}: 0 runs the replicas in one process, where tpu-inference "
            f"{vllm.version()} "
            "does not support structured outputs",
            next(iter(places.values())),
            f"remove {features.ONE_PROCESS} from serve.env",
        )


def _configuration(serve: Serve, flag: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys of a configuration, as a mapping or by dotted flags, and the place of each in the recipe."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, value in serve.extra_args.items():
        head, _, key = vllm.dashed(name).partition(".")
        if head == flag:
            found = value if not key and isinstance(value, dict) else {key: value} if key else {}
            values |= found
            places |= dict.fromkeys(found, join(("serve", "extra_args", name)))
    return values, places


def _argument(serve: Serve, flag: str) -> str:
    """The place of a flag in the recipe."""
    name = next((name for name in serve.extra_args if vllm.dashed(name) == flag), flag)
    return join(("serve", "extra_args", name))
