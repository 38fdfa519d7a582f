"""Environment variables of the server: those that it reads, and none that lets others in."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from compiler.facts import Facts
from compiler.serving import blocks
from compiler.serving import flags as vllm
from spec.diagnostics import Diagnostic
from spec.paths import join

REFUSED_VARIABLES = {
    "decides what code the server's processes run, or where it comes from": re.compile(
        # The interpreter's, the shell's, the dynamic linker's and what it loads into any process.
        r"PYTHON.*|LD_.*|DYLD_.*|BASH_ENV|ENV|BASH_FUNC.*|SHELLOPTS|BASHOPTS|IFS|PATH|SHELL|GCONV_PATH|"
        r"GLIBC_TUNABLES|NODE_OPTIONS|OPENSSL_(CONF|ENGINES|MODULES)|"
        # Libraries: TPU_LIBRARY_PATH, PJRT_NAMES_AND_LIBRARY_PATHS, MOSAIC_GPU_NVSHMEM_SO_PATH and the like.
        r".*_(LIBRARY|LIBRARIES|LIB|SO|BC|LIBDEVICE)_(PATH|DIR)S?|(TPU|PJRT)_.*LIBRARY.*|HALIDE_LIB|"
        # Compilers and what else is called, and where they look.
        r"CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|(C|CPLUS|HALIDE)_INCLUDE(_PATH)?|CPATH|CUDACXX|PYTORCH_NVCC|OMP_PREFIX|"
        r"(CUDA|CUDNN|ROCM|MOSAIC_GPU_CUDA)_(HOME|PATH|ROOT)|TRITON_.*_PATH|TORCH_ADDR2LINE_BINARY|"
        # Code and pickles that are loaded again, also from a server, and functions that are named.
        r"TORCH_EXTENSIONS_DIR|TORCHINDUCTOR_(.*_DIR|REDIS_.*|.*REMOTE_CACHE.*)|TRITON_(CACHE|OVERRIDE)_DIR|"
        r"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD|TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN|RAY_RUNTIME_ENV_HOOK|"
        r"HF_MODULES_CACHE|TRUST_REMOTE_CODE|VLLM_PLUGINS|VLLM_ALLOW_INSECURE_SERIALIZATION|"
        r"VLLM_RUST_FRONTEND_PATH|VLLM_LOGGING_CONFIG_PATH|VLLM_MODEL_REDIRECT_PATH"
    ),
    "decides where the server sends HF_TOKEN, or who reads it on the way": re.compile(
        r"HF_ENDPOINT|HF_INFERENCE_ENDPOINT|HUGGINGFACE_CO_STAGING|(HTTP|HTTPS|ALL)_PROXY|"
        r"REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|SSL_CERT_(FILE|DIR)"
    ),
    "opens the server to requests that need no key, or has it talk to another machine": re.compile(
        r"VLLM_SERVER_DEV_MODE|(USE_)?JAX_PROFILER_SERVER(_PORT)?|JAX_(BACKEND_TARGET|COORDINATOR_.*ADDRESS|CROSS_HOST_TRANS.*ADDRESS.*)|"
        r"IFRT_PROXY_.*|GRPC_XDS_BOOTSTRAP.*|MEGASCALE_(COORDINATOR_ADDRESS|DEBUG_PORT)|KINETO_.*|"
        r"TPU_(EMBEDDING_SERVER_PORT|RUNTIME_METRICS_PORTS|RUNTIME_PRIMARY_METRIC_PORT)|"
        r"VLLM_(LOOPBACK_IP|DP_MASTER_IP|RPC_BASE_PATH|.*_SIDE_CHANNEL_HOST|MOONCAKE_BOOTSTRAP_PORT)"
    ),
}
"""Variables of the server's libraries that a recipe may not set: by what they do, in the words of the
diagnostic, patterns of their names in capital letters."""

OPEN_VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "lets a request load adapters from the server's disk",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "lets a request load adapters from the server's disk",
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": "lets a request load adapters from the hub",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "writes every answer into the log",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "lets an address that a request names lead to another",
}
"""Variables by which whoever reaches the server may do more than ask the model, where they are not 0."""

CLOSE = 0.85
"""How alike two names of environment variables are when one is taken for a misspelling of the other."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    serve = facts.recipe.serve
    if serve is None:
        return
    for name, value in serve.env.items():
        where = join(("serve", "env", name))
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield Diagnostic(
                "E0618",
                f"`{name}` is not the name of an environment variable",
                where,
                "use letters, digits and underscores",
                at_key=True,
            )
        elif not value.isprintable():
            yield Diagnostic(
                "E0618",
                f"`{name}` holds a line break or another control character, which no Dockerfile can set",
                where,
                "write it on one line",
            )
        elif does := _refused(name):
            yield Diagnostic(
                "E0629",
                f"`{name}` {does}",
                where,
                "leave it out; an image of your own (serve.image) may set it",
            )
        elif name in OPEN_VARIABLES and value not in ("", "0", "false", "False"):
            yield Diagnostic("W0659", f"`{name}` {OPEN_VARIABLES[name]}", where, "leave it out")
        elif name == blocks.VARIABLE and serve.decode_block_sizes is not None:
            yield Diagnostic(
                "E0638",
                f"`{name}` is what serve.decode_block_sizes sets: it would be given twice",
                where,
                "remove it",
                at_key=True,
            )
        elif said := _misspelt(name):
            yield Diagnostic("W0632", said[0], where, said[1], at_key=True)


def _refused(name: str) -> str | None:
    """What a variable does that a recipe may not set."""
    found = (does for does, names in REFUSED_VARIABLES.items() if names.fullmatch(name.upper()))
    return next(found, None)


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
