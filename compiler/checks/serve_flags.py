"""Flags of the server: those that vLLM has, and none that a key sets already."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from compiler.facts import Facts
from compiler.families import FAMILIES, Served
from compiler.serving import features
from compiler.serving import flags as vllm
from compiler.serving.flags import abbreviated, problems
from compiler.wording import listing
from spec.diagnostics import Diagnostic
from spec.paths import join, split

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

CODE = {
    "code-revision": "names a revision of code that comes with the weights",
    "distributed-executor-backend": "imports a class by its name",
    "io-processor-plugin": "loads a plugin",
    "log-config-file": "reads a file that names classes to import",
    "logits-processors": "imports classes by their names",
    "middleware": "imports a class by its name, which sees every request",
    "model-class-overrides": "imports classes by their names",
    "reasoning-parser-plugin": "runs a Python file",
    "scheduler-cls": "imports a class by its name",
    "tool-parser-plugin": "runs a Python file",
    "trust-remote-code": "runs code that came with the weights: untrusted model code is off",
    "worker-cls": "imports a class by its name",
    "worker-extension-cls": "imports a class by its name",
}
"""Flags by which the server runs code that is not vLLM's."""

KNOWN_EXECUTORS = ("ray", "mp", "uni", "external_launcher")
"""Values of --distributed-executor-backend that are no class's."""

CODE_KEYS = (
    *("auto_map", "ec_connector_module_path", "inductor_passes", "kv_connector_module_path"),
    *("reasoning_parser_plugin", "trust_remote_code"),
)
"""Keys of configurations, at any depth, that name code."""

OPEN_FLAGS = {
    "allowed-local-media-path": "lets a request read the files below that folder of the server",
    "allowed-media-domains": "lets a request have the server fetch from those addresses",
    "enable-log-requests": "writes every prompt into the log",
    "enable-log-outputs": "writes every answer into the log",
    "enable-prompt-embeds": "lets a request bring tensors, which are unpickled with checks alone",
    "enable-mm-embeds": "lets a request bring tensors, which are unpickled with checks alone",
    "enable-tokenizer-info-endpoint": "adds a route that asks for no key",
    "enable-sleep-mode": "lets the server's own routes put it to sleep",
    "kv-events-config": "publishes on a port of its own, which asks for no key",
    "otlp-traces-endpoint": "sends traces of requests to that address",
    "profiler-config": "adds /start_profile, which asks for no key and writes to the server's disk",
    "tool-server": "lets answers call the tools of other servers",
    "trust-request-chat-template": "lets a request bring a chat template, which is a program",
    "trust-request-mm-kwargs": "lets a request set how its media are processed",
}
"""Flags by which whoever reaches the server may do more than ask the model."""

CODES = {"unknown": "E0623", "abbreviated": "E0624", "value": "E0625", "key": "E0626"}

NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*(\.[A-Za-z0-9_-]+)*"


def check(facts: Facts) -> Iterator[Diagnostic]:
    serve = facts.recipe.serve
    if serve is None:
        return
    yield from _flags(serve, FAMILIES[facts.model.family.name].served.switches if facts.model else {})
    yield from _parsers(facts, serve)
    yield from _structured_outputs(serve)


def _flags(serve: Serve, needed: Mapping[str, str]) -> Iterator[Diagnostic]:
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
                at_key=True,
            )
            continue
        known = vllm.find(flag.partition(".")[0])
        own = known.name if known else flag
        if (key := _set_by_key(flag, own)) is not None:
            yield Diagnostic(
                "E0616",
                f"`{name}` is what {key} sets: the flag would be given twice",
                where,
                f"remove it, and set {key}",
                at_key=True,
            )
        elif runs := _runs_code(own, flag, value):
            yield Diagnostic(
                "E0629",
                f"`{name}` {runs}",
                where,
                "remove it: vLLM has code of its own for the models that can be fine-tuned here",
                at_key=True,
            )
        elif own in needed and (value is False or flag != own):
            yield Diagnostic("E0630", f"`{name}`: {needed[own]}", where, "remove it", at_key=True)
        elif own in MISPLACED and value not in (None, False):
            yield Diagnostic("E0630", f"`{name}`: {MISPLACED[own]}", where, "remove it", at_key=True)
        else:
            if own in OPEN_FLAGS and flag != f"no-{own}" and value not in (None, False, ""):
                yield Diagnostic("W0659", f"`{name}` {OPEN_FLAGS[own]}", where, "remove it", at_key=True)
            yield from _checked(name, value, where)
        whole = own + flag.removeprefix(flag.partition(".")[0])
        again = next((other for path, other in seen.items() if _overlap(path, whole)), None)
        if again is not None:
            yield Diagnostic(
                "E0627",
                f"`{name}` and `{again}` set the same, and vLLM takes one of them alone",
                where,
                "remove one of the two",
                at_key=True,
            )
        seen.setdefault(whole, name)


def _runs_code(own: str, flag: str, value: Any) -> str | None:
    """What code a flag has the server run, None where it has none."""
    if value in (None, False, "") or flag == f"no-{own}":
        return None
    if own == "distributed-executor-backend" and value in KNOWN_EXECUTORS:
        return None
    if own in CODE:
        return CODE[own]
    keys = {*_keys(value), *flag.split(".")[1:]}
    if named := next((key for key in CODE_KEYS if key in keys), None):
        return f"names code by `{named}`"
    given = value.get("backend") if isinstance(value, dict) else value if flag.endswith(".backend") else None
    if own == "compilation-config" and isinstance(given, str) and "." in given:
        return f"imports `{given}`"
    return None


def _keys(value: Any) -> Iterator[str]:
    """The keys of a configuration at any depth, in text that is JSON too."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(item)


def _set_by_key(flag: str, own: str) -> str | None:
    """The key that sets a flag, also where vLLM would take the flag's name for the beginning of it."""
    if flag in KEYS or own in KEYS:
        return KEYS.get(flag) or KEYS[own]
    stands_for = abbreviated(flag)
    return KEYS.get(stands_for[0].name) if len(stands_for) == 1 else None


def _overlap(one: str, other: str) -> bool:
    """Whether two flags set the same: they are one, or one is a key of the other's configuration."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _checked(name: str, value: Any, where: str) -> Iterator[Diagnostic]:
    for problem in problems(name, value):
        inner = join((*split(where), *problem.keys))
        yield Diagnostic(CODES[problem.kind], problem.message, inner, problem.help, at_key=problem.at_key)


def _parsers(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    given = vllm.by_flag(serve.extra_args)
    reasoning = given.get("reasoning-parser")
    asked = [
        ("tool-call", "tool_parsers", serve.tool_call_parser, "serve.tool_call_parser"),
        ("reasoning", "reasoning_parsers", reasoning, _argument(serve, "reasoning-parser")),
    ]
    for what, registered, parser, where in asked:
        if not isinstance(parser, str) or parser.lower() in ("", "none"):
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
    served = FAMILIES[facts.model.family.name].served if facts.model else Served()
    expected, parser = served.tool_call_parser, serve.tool_call_parser
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
                f"backend: {backends[0]}"
                if split(places[option])[-1] == option
                else f"structured-outputs-config.backend: {backends[0]}",
            )
    if given and features.replicas_in_one_process(serve):
        yield Diagnostic(
            "W0648",
            f"{features.ONE_PROCESS}: 0 runs the replicas in one process, where tpu-inference "
            f"{vllm.version()} does not support structured outputs",
            f"serve.env.{features.ONE_PROCESS}",
            "remove it",
            at_key=True,
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
            inside = () if key else ((option,) for option in found)
            places |= {option: join(("serve", "extra_args", name)) for option in found}
            places |= {one: join(("serve", "extra_args", name, one)) for (one,) in inside}
    return values, places


def _argument(serve: Serve, flag: str) -> str:
    """The place of a flag in the recipe."""
    name = next((name for name in serve.extra_args if vllm.dashed(name) == flag), flag)
    return join(("serve", "extra_args", name))
