"""Check flags of the server, and variables of its environment.

A flag must exist in vLLM and must not be set by a key of the recipe. A variable must be one that the server
reads, and must not open the server to others.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from recipec.compiler.catalog import Served, facts_of
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.vllm import blocks, features
from recipec.compiler.vllm import flags as vllm
from recipec.compiler.vllm.flags import abbreviated, problems
from recipec.compiler.wording import listing
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import join, split

if TYPE_CHECKING:
    from recipec.spec.language import Serve


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
    "config": "the server would read more flags from a file that is not part of the artifact",
    "headless": "a server without an endpoint answers no health check",
    "grpc": "the health check, the client scripts and the load balancer use HTTP",
    "uds": "host and port would be ignored, and the health check would fail",
    "ssl-keyfile": "the health check and the client scripts use plain HTTP",
    "ssl-certfile": "the health check and the client scripts use plain HTTP",
    "root-path": "the health check and the client scripts use /health and /v1",
}
"""Flags that do not work with the rest of the artifact, and why."""

CODE = {
    "code-revision": "names a revision of the code in the weights' repository",
    "distributed-executor-backend": "imports a class by its name",
    "io-processor-plugin": "loads a plugin",
    "log-config-file": "reads a file that names classes to import",
    "logits-processors": "imports classes by their names",
    "middleware": "imports a class by its name, and that class sees every request",
    "model-class-overrides": "imports classes by their names",
    "reasoning-parser-plugin": "runs a Python file",
    "scheduler-cls": "imports a class by its name",
    "tool-parser-plugin": "runs a Python file",
    "trust-remote-code": "runs code from the weights' repository: untrusted model code is off",
    "worker-cls": "imports a class by its name",
    "worker-extension-cls": "imports a class by its name",
}
"""Flags by which the server runs code from outside vLLM."""

KNOWN_EXECUTORS = ("ray", "mp", "uni", "external_launcher")
"""Values of --distributed-executor-backend that do not name a class."""

CODE_KEYS = (
    *("auto_map", "ec_connector_module_path", "inductor_passes", "kv_connector_module_path"),
    *("reasoning_parser_plugin", "trust_remote_code"),
)
"""Keys of configurations, at any depth, that name code."""

OPEN_FLAGS = {
    "allowed-local-media-path": "lets a request read files below that folder of the server",
    "allowed-media-domains": "lets a request make the server fetch from those addresses",
    "enable-log-requests": "writes every prompt into the log",
    "enable-log-outputs": "writes every answer into the log",
    "enable-prompt-embeds": "lets a request send tensors, which are unpickled with only some checks",
    "enable-mm-embeds": "lets a request send tensors, which are unpickled with only some checks",
    "enable-tokenizer-info-endpoint": "adds a route that needs no key",
    "enable-sleep-mode": "lets requests to the server's own routes put it to sleep",
    "kv-events-config": "publishes on a separate port, which needs no key",
    "otlp-traces-endpoint": "sends traces of requests to that address",
    "profiler-config": "adds /start_profile, which needs no key and writes to the server's disk",
    "tool-server": "lets answers call the tools of other servers",
    "trust-request-chat-template": "lets a request send a chat template, which is a program",
    "trust-request-mm-kwargs": "lets a request choose how its media are processed",
}
"""Flags that let clients do more than ask the model, or that expose what they ask."""


E0623 = Code(
    "E0623",
    "unknown flag",
    cause="`vllm serve` of the pinned version has no such flag. The flags come from its own parser "
    "(compiler/data/vllm.json). The version in an image cannot be read from its tag.",
    cure="Use the flag that the message suggests, or remove it.",
)

E0624 = Code(
    "E0624",
    "abbreviated flag",
    cause="vLLM's parser accepts the beginning of a flag's name, as long as no other flag begins the "
    "same way.",
    cure="Write the full name.",
)

E0625 = Code(
    "E0625",
    "value that vLLM refuses",
    cause="The flag has another type, accepts only a few words, or takes one value, or none, instead "
    "of several.",
    cure="Use a value as the message says. true and false give --NAME and --no-NAME.",
)

E0626 = Code(
    "E0626",
    "key that a configuration does not have",
    cause="A key of a mapping, or a key after a dot in a flag's name, does not exist in that "
    "configuration of vLLM.",
    cure="Use the key that the message suggests.",
)

CODES = {"unknown": E0623, "abbreviated": E0624, "value": E0625, "key": E0626}

NAME = r"[a-z][a-z0-9]*(-[a-z0-9]+)*(\.[A-Za-z0-9_-]+)*"


def check(facts: Facts) -> Iterator[Diagnostic]:
    serve = facts.recipe.serve
    if serve is None:
        return
    yield from _flags(serve, facts_of(facts.model.family.name).served.switches if facts.model else {})
    yield from _parsers(facts, serve)
    yield from _structured_outputs(serve)
    yield from _variables(serve)


E0615 = Code(
    "E0615",
    "malformed flag",
    cause="A key of extra_args does not have the form of a flag of `vllm serve`.",
    cure="Write it in lower case, with words joined by - or _, and without leading dashes.",
)

E0616 = Code(
    "E0616",
    "flag that another key sets",
    cause="A key of extra_args repeats a flag that another key of the serve section sets.",
    cure="Set the other key.",
)

E0627 = Code(
    "E0627",
    "flag given twice",
    cause="Two keys of extra_args are the same flag: spelled with - and with _, through an alias, or "
    "with --no-. vLLM silently uses the last one.",
    cure="Remove one of them.",
)

E0629 = Code(
    "E0629",
    "untrusted model code",
    cause="The flag or variable makes the server run code that is not part of vLLM: code from the "
    "weights' repository (trust_remote_code), a plugin, a class given by name, or a preloaded "
    "library. Or it makes the server send its token to an address other than the hub's, or accept "
    "requests without a key.",
    cure="Leave it out. Put your own code into your own image, and name that in serve.image.",
)

E0630 = Code(
    "E0630",
    "flag that the artifact does not support",
    cause="With this flag the health check, the client scripts or the container no longer fit the server.",
    cure="Leave it out.",
)

W0659 = Code(
    "W0659",
    "requests can do more than query the model",
    cause="The flag or variable lets anyone who reaches the server do more than query the model: read "
    "files of the machine, make it fetch addresses, change the chat template, or use routes that "
    "need no key.",
    cure="Leave it out, or make sure that only you can reach the server.",
)


def _flags(serve: Serve, needed: Mapping[str, str]) -> Iterator[Diagnostic]:
    seen: dict[str, str] = {}
    for name, value in serve.extra_args.items():
        where = join(("serve", "extra_args", name))
        flag = vllm.dashed(name)
        if not re.fullmatch(NAME, flag):
            plain = re.sub(r"[^a-z0-9.-]+", "-", flag.lower()).strip("-.")
            yield Diagnostic(
                E0615,
                f"`{name}` is not the name of a flag: names have no leading dashes and are in lower case",
                where,
                f"did you mean `{plain}`?" if plain else "write for example disable_chunked_mm_input: true",
                at_key=True,
            )
            continue
        known = vllm.find(flag.partition(".")[0])
        full_name = known.name if known else flag
        if (key := _set_by_key(flag, full_name)) is not None:
            yield Diagnostic(
                E0616,
                f"{key} sets `{name}`: the flag would be given twice",
                where,
                f"remove it, and set {key} instead",
                at_key=True,
            )
        elif runs := _runs_code(full_name, flag, value):
            yield Diagnostic(
                E0629,
                f"`{name}` {runs}",
                where,
                "remove it: vLLM has its own code for the models that can be fine-tuned here",
                at_key=True,
            )
        elif full_name in needed and (value is False or flag != full_name):
            yield Diagnostic(E0630, f"`{name}`: {needed[full_name]}", where, "remove it", at_key=True)
        elif full_name in MISPLACED and value not in (None, False):
            yield Diagnostic(E0630, f"`{name}`: {MISPLACED[full_name]}", where, "remove it", at_key=True)
        else:
            if full_name in OPEN_FLAGS and flag != f"no-{full_name}" and value not in (None, False, ""):
                yield Diagnostic(W0659, f"`{name}` {OPEN_FLAGS[full_name]}", where, "remove it", at_key=True)
            yield from _checked(name, value, where)
        whole = full_name + flag.removeprefix(flag.partition(".")[0])
        again = next((other for path, other in seen.items() if _overlap(path, whole)), None)
        if again is not None:
            yield Diagnostic(
                E0627,
                f"`{name}` and `{again}` set the same option, and vLLM uses only one of them",
                where,
                "remove one of the two",
                at_key=True,
            )
        seen.setdefault(whole, name)


def _runs_code(full_name: str, flag: str, value: Any) -> str | None:
    """Return what code a flag makes the server run, None if it runs none."""
    if value in (None, False, "") or flag == f"no-{full_name}":
        return None
    if full_name == "distributed-executor-backend" and value in KNOWN_EXECUTORS:
        return None
    if full_name in CODE:
        return CODE[full_name]
    keys = {*_keys(value), *flag.split(".")[1:]}
    if named := next((key for key in CODE_KEYS if key in keys), None):
        return f"names code by `{named}`"
    backend = (
        value.get("backend") if isinstance(value, dict) else value if flag.endswith(".backend") else None
    )
    if full_name == "compilation-config" and isinstance(backend, str) and "." in backend:
        return f"imports `{backend}`"
    return None


def _keys(value: Any) -> Iterator[str]:
    """Yield the keys of a configuration at any depth, also inside JSON texts."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, dict):
        yield from value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys(item)


def _set_by_key(flag: str, full_name: str) -> str | None:
    """Return the key that sets a flag, also if vLLM would read the flag as an abbreviation of another."""
    if flag in KEYS or full_name in KEYS:
        return KEYS.get(flag) or KEYS[full_name]
    stands_for = abbreviated(flag)
    return KEYS.get(stands_for[0].name) if len(stands_for) == 1 else None


def _overlap(flag: str, other: str) -> bool:
    """Return whether two flags set the same value: equal flags, or a configuration and one of its keys."""
    return flag == other or flag.startswith(f"{other}.") or other.startswith(f"{flag}.")


def _checked(name: str, value: Any, where: str) -> Iterator[Diagnostic]:
    for problem in problems(name, value):
        inner = join((*split(where), *problem.keys))
        yield Diagnostic(CODES[problem.kind], problem.message, inner, problem.help, at_key=problem.at_key)


W0619 = Code(
    "W0619",
    "tool-call parser of another family",
    cause="vLLM accepts any parser name. A parser for another markup finds no tool calls.",
    cure="Use the parser that the message names.",
)

E0631 = Code(
    "E0631",
    "unknown parser",
    cause="The pinned vLLM has no tool-call or reasoning parser with that name. It starts anyway, and "
    "requests then fail or find nothing.",
    cure="Use the name that the message suggests.",
)


def _parsers(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    flags = vllm.by_flag(serve.extra_args)
    reasoning = flags.get("reasoning-parser")
    asked = [
        ("tool-call", "tool_parsers", serve.tool_call_parser, "serve.tool_call_parser"),
        ("reasoning", "reasoning_parsers", reasoning, _argument(serve, "reasoning-parser")),
    ]
    for what, registered, parser, where in asked:
        if not isinstance(parser, str) or parser.lower() in ("", "none"):
            continue
        known = vllm.catalog()[registered]
        if parser not in known:
            close = difflib.get_close_matches(parser, known, 3, 0.5)
            suggestion = (
                f"did you mean {listing((f'`{candidate}`' for candidate in close), 'or')}?" if close else None
            )
            yield Diagnostic(
                E0631,
                f"vLLM {vllm.version()} has no {what} parser `{parser}`",
                where,
                suggestion or f"it has {listing(known)}",
            )
    served = facts_of(facts.model.family.name).served if facts.model else Served()
    expected, parser = served.tool_call_parser, serve.tool_call_parser
    if parser in vllm.catalog()["tool_parsers"] and expected not in (None, parser):
        yield Diagnostic(
            W0619,
            f"tool_call_parser `{parser}` is for another model's markup; vLLM accepts it but would find no "
            "tool calls",
            "serve.tool_call_parser",
            f"tool_call_parser: {expected}",
        )


W0648 = Code(
    "W0648",
    "structured outputs with several replicas in one process",
    cause="tpu-inference does not support structured outputs if one process runs several replicas.",
    cure="Remove TPU_MULTIPROCESS_DP.",
)

E0649 = Code(
    "E0649",
    "option of another structured-outputs backend",
    cause="disable_any_whitespace works only with xgrammar and guidance, and "
    "disable_additional_properties only with guidance. vLLM refuses them with other backends.",
    cure="Use the backend that the message names.",
)


def _structured_outputs(serve: Serve) -> Iterator[Diagnostic]:
    """Report options of one backend when another backend is selected. vLLM refuses them at startup."""
    known = features.features()["structured_outputs"]
    options, places = _configuration(serve, "structured-outputs-config")
    backend = options.get("backend", "auto")
    for option, backends in known["options"].items():
        if options.get(option) is True and backend not in backends:
            yield Diagnostic(
                E0649,
                f"{option} needs the {listing(backends, 'or')} backend of structured outputs, and the "
                f"backend is {backend}: vLLM refuses it",
                places[option],
                f"backend: {backends[0]}"
                if split(places[option])[-1] == option
                else f"structured-outputs-config.backend: {backends[0]}",
            )
    if options and features.replicas_in_one_process(serve):
        yield Diagnostic(
            W0648,
            f"{features.ONE_PROCESS}: 0 runs the replicas in one process, where tpu-inference "
            f"{vllm.version()} does not support structured outputs",
            f"serve.env.{features.ONE_PROCESS}",
            "remove it",
            at_key=True,
        )


def _configuration(serve: Serve, flag: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of a configuration, given as a mapping or by dotted flags, and their paths in the
    recipe."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, value in serve.extra_args.items():
        head, _, key = vllm.dashed(name).partition(".")
        if head == flag:
            entries = value if not key and isinstance(value, dict) else {key: value} if key else {}
            values |= entries
            inside = () if key else ((option,) for option in entries)
            places |= {option: join(("serve", "extra_args", name)) for option in entries}
            places |= {key: join(("serve", "extra_args", name, key)) for (key,) in inside}
    return values, places


def _argument(serve: Serve, flag: str) -> str:
    """Return the path of a flag in the recipe."""
    name = next((name for name in serve.extra_args if vllm.dashed(name) == flag), flag)
    return join(("serve", "extra_args", name))


REFUSED_VARIABLES = {
    "sets what code the server's processes run, or its source": re.compile(
        # Of the interpreter, the shell, the dynamic linker, and of libraries that it loads into any process.
        r"PYTHON.*|LD_.*|DYLD_.*|BASH_ENV|ENV|BASH_FUNC.*|SHELLOPTS|BASHOPTS|IFS|PATH|SHELL|GCONV_PATH|"
        r"GLIBC_TUNABLES|NODE_OPTIONS|OPENSSL_(CONF|ENGINES|MODULES)|"
        # Libraries: TPU_LIBRARY_PATH, PJRT_NAMES_AND_LIBRARY_PATHS, MOSAIC_GPU_NVSHMEM_SO_PATH and the like.
        r".*_(LIBRARY|LIBRARIES|LIB|SO|BC|LIBDEVICE)_(PATH|DIR)S?|(TPU|PJRT)_.*LIBRARY.*|HALIDE_LIB|"
        # Compilers and other programs that are called, and their search paths.
        r"CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|(C|CPLUS|HALIDE)_INCLUDE(_PATH)?|CPATH|CUDACXX|PYTORCH_NVCC|OMP_PREFIX|"
        r"(CUDA|CUDNN|ROCM|MOSAIC_GPU_CUDA)_(HOME|PATH|ROOT)|TRITON_.*_PATH|TORCH_ADDR2LINE_BINARY|"
        # Code and pickles that are loaded again, also from a server, and names of functions to call.
        r"TORCH_EXTENSIONS_DIR|TORCHINDUCTOR_(.*_DIR|REDIS_.*|.*REMOTE_CACHE.*)|TRITON_(CACHE|OVERRIDE)_DIR|"
        r"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD|TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN|RAY_RUNTIME_ENV_HOOK|"
        r"HF_MODULES_CACHE|TRUST_REMOTE_CODE|VLLM_PLUGINS|VLLM_ALLOW_INSECURE_SERIALIZATION|"
        r"VLLM_RUST_FRONTEND_PATH|VLLM_LOGGING_CONFIG_PATH|VLLM_MODEL_REDIRECT_PATH"
    ),
    "sets where the server sends HF_TOKEN, or who can read it on the way": re.compile(
        r"HF_ENDPOINT|HF_INFERENCE_ENDPOINT|HUGGINGFACE_CO_STAGING|(HTTP|HTTPS|ALL)_PROXY|"
        r"REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|SSL_CERT_(FILE|DIR)"
    ),
    "opens the server to requests without a key, or makes it connect to another machine": re.compile(
        r"VLLM_SERVER_DEV_MODE|(USE_)?JAX_PROFILER_SERVER(_PORT)?|JAX_(BACKEND_TARGET|COORDINATOR_.*ADDRESS|CROSS_HOST_TRANS.*ADDRESS.*)|"
        r"IFRT_PROXY_.*|GRPC_XDS_BOOTSTRAP.*|MEGASCALE_(COORDINATOR_ADDRESS|DEBUG_PORT)|KINETO_.*|"
        r"TPU_(EMBEDDING_SERVER_PORT|RUNTIME_METRICS_PORTS|RUNTIME_PRIMARY_METRIC_PORT)|"
        r"VLLM_(LOOPBACK_IP|DP_MASTER_IP|RPC_BASE_PATH|.*_SIDE_CHANNEL_HOST|MOONCAKE_BOOTSTRAP_PORT)"
    ),
}
"""Variables of the server's libraries that a recipe may not set: regular expressions of their names in
capital letters, by what the variables do (in the words of the diagnostic)."""

OPEN_VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "lets a request load adapters from the server's disk",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "lets a request load adapters from the server's disk",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "lets a request load adapters from the hub",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "writes every answer into the log",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "lets an address in a request redirect to another address",
}
"""Variables that, if not 0, let clients do more than ask the model, or that expose its answers."""

CLOSE = 0.85
"""From this similarity on, an unknown variable's name is taken for a misspelling of a known one."""


E0618 = Code(
    "E0618",
    "malformed environment variable",
    cause="A key of serve.env is not a valid variable name, or its value contains a line break or "
    "control character.",
    cure="Use letters, digits and underscores in names, and one line for each value.",
)

W0632 = Code(
    "W0632",
    "unknown environment variable of the server",
    cause="The name of a variable in serve.env looks like one of vLLM's or tpu-inference's, but "
    "neither reads it.",
    cure="Use the name that the message suggests.",
)

E0638 = Code(
    "E0638",
    "variable that another key sets",
    cause="serve.env repeats a setting of another key of the serve section.",
    cure="Set the other key.",
)


def _variables(serve: Serve) -> Iterator[Diagnostic]:
    for name, value in serve.env.items():
        where = join(("serve", "env", name))
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Diagnostic(
                E0618,
                f"`{name}` is not the name of an environment variable",
                where,
                "use letters, digits and underscores",
                at_key=True,
            )
        elif not value.isprintable():
            yield Diagnostic(
                E0618,
                f"`{name}` contains a line break or another control character, which a Dockerfile cannot set",
                where,
                "write it on one line",
            )
        elif does := _refused(name):
            yield Diagnostic(
                E0629,
                f"`{name}` {does}",
                where,
                "remove it; your own image (serve.image) may set it",
            )
        elif name in OPEN_VARIABLES and value not in ("", "0", "false", "False"):
            yield Diagnostic(W0659, f"`{name}` {OPEN_VARIABLES[name]}", where, "remove it")
        elif name == blocks.VARIABLE and serve.decode_block_sizes is not None:
            yield Diagnostic(
                E0638,
                f"serve.decode_block_sizes sets `{name}`: it would be given twice",
                where,
                "remove it",
                at_key=True,
            )
        elif problem := _misspelled(name):
            yield Diagnostic(W0632, problem[0], where, problem[1], at_key=True)


def _refused(name: str) -> str | None:
    """Return what a variable does that a recipe may not set; None for other variables."""
    effects = (does for does, names in REFUSED_VARIABLES.items() if names.fullmatch(name.upper()))
    return next(effects, None)


def _misspelled(name: str) -> tuple[str, str | None] | None:
    """Return a message and a help for a misspelled variable of vLLM or tpu-inference, None for other
    names."""
    vllm_names, tpu = (vllm.catalog()["environment"][which] for which in ("vllm", "tpu_inference"))
    if name in vllm_names or name in tpu:
        return None
    close = difflib.get_close_matches(name, [*vllm_names, *tpu], 1, CLOSE)
    if not close and not name.startswith("VLLM_"):
        return None
    who = "vLLM" if name.startswith("VLLM_") else "tpu-inference"
    suggestion = f"did you mean `{close[0]}`?" if close else "remove it, or check its name"
    return f"{who} {vllm.version()} does not read the variable `{name}`, and silently ignores it", suggestion
