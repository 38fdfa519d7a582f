"""Find secrets and references to environment variables. Neither is allowed in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from recipec.spec import key_paths
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import Part
from recipec.spec.tree import Mapping, Node, Scalar, walk

_REFERENCE = re.compile(r"\$\{(?:oc\.)?env:[^}]*\}?")

_TOKENS: dict[str, str] = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{16,}",
    "a Google API key": r"\bAIza[A-Za-z0-9_-]{30,}",
    "a Google access token": r"\bya29\.[A-Za-z0-9_-]{16,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{16,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "an AWS access key": r"\bAKIA[A-Z0-9]{16}\b",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a JSON web token": r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
_ANY_TOKEN = re.compile("|".join(_TOKENS.values()))

WANDB_KEY = re.compile(r"(?:\w+-)?(?=[A-Za-z]*\d)[A-Za-z0-9]{40,}|wandb_v\d+_\w{20,}")
"""A key of Weights & Biases: 40 or more letters and digits, after a prefix for a private server. Other values
can look the same, so only train.log.wandb_project is searched for one."""

_WANDB_PROJECT = ("train", "log", "wandb_project")

_SECRET_WORDS = {
    "token",
    "password",
    "passwd",
    "passphrase",
    "secret",
    "secrets",
    "credential",
    "credentials",
    "apikey",
}
_SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key")}
_HARMLESS_ENDS = {"path", "file", "dir", "parallelism", "threshold", "adaptive", "ids"}
_COUNTS = {"id", "index", "num", "budgets", "bucket"}
"""Words that count or number tokens, in names such as eos_token_id."""

_VARIABLES = {"api-key": "VLLM_API_KEY", "hf-token": "HF_TOKEN"}
"""The environment variable from which the server reads a flag's secret."""


E0701 = Code(
    "E0701",
    "reference to an environment variable",
    cause="The values of a recipe are written into the artifact, which is committed and copied. "
    "`${env:NAME}` could write a secret there, or make the artifact differ between machines.",
    cure="Write the value itself if it is not a secret. Otherwise remove it and set the variable "
    "where the artifact runs. vLLM and huggingface_hub read HF_TOKEN from their environment.",
)

E0702 = Code(
    "E0702",
    "looks like a secret",
    cause="The text has the form of an access token or a private key. A recipe is committed, and its "
    "values are copied into the artifact.",
    cure="Remove it, and revoke it if the file was shared. Set it in the environment where the "
    "artifact runs.",
)

E0703 = Code(
    "E0703",
    "variable that holds a secret",
    cause="The name of a variable in `serve.env` or of a flag in `serve.extra_args` looks like a "
    "secret (token, password, secret, key). Its value would be written into the artifact, and the "
    "list of processes would show a flag's value.",
    cure="Remove it, and set the variable that the message names where the server runs.",
)


def find(root: Mapping) -> Iterator[Diagnostic]:
    """Yield every reference to the environment and every likely secret in the tree."""
    for where, key, node in walk(root):
        if _holds_secret(where) and not _is_switch(node) and key is not None:
            variable = _VARIABLES.get(str(where[-1]).replace("_", "-"), "it")
            yield Diagnostic(
                E0703,
                f"the name `{where[-1]}` looks like a secret, and its value would be written into the "
                "artifact",
                key_paths.join(where),
                f"remove it, and set {variable} in the environment where the server runs",
                key.span,
                at_key=True,
            )
        texts = [(key.span, where[-1])] if key is not None else []
        if isinstance(node, Scalar) and isinstance(node.value, str):
            texts.append((node.place.span, node.value))
        for span, text in texts:
            if not isinstance(text, str):
                continue
            if reference := _REFERENCE.search(text):
                yield Diagnostic(
                    E0701,
                    f"`{reference[0]}` is not allowed: its value would be written into the artifact",
                    key_paths.join(where),
                    "write the value itself; set secrets in the environment where the artifact runs",
                    span,
                )
            for what, pattern in _TOKENS.items():
                if re.search(pattern, text):
                    yield Diagnostic(
                        E0702,
                        f"`{key_paths.join(where)}` looks like {what}",
                        key_paths.join(where),
                        "remove it, and revoke it if the file was shared; set it in the environment instead",
                        span,
                    )


def kind(text: str) -> str | None:
    """Describe the token in a text, for example "a Hugging Face token"; None for text without one."""
    return next((what for what, pattern in _TOKENS.items() if re.search(pattern, text)), None)


def _is_switch(node: Node) -> bool:
    """Return whether a value is only a switch, such as --allow-credentials."""
    return isinstance(node, Scalar) and isinstance(node.value, bool)


def _within_secret(where: tuple[Part, ...]) -> bool:
    """Return whether a value, or a list or mapping that contains it, has the name of a secret."""
    return any(_holds_secret(where[:end]) for end in range(3, len(where) + 1))


def _holds_secret(where: tuple[Part, ...]) -> bool:
    if (
        len(where) < 3
        or where[0] != "serve"
        or where[1] not in ("env", "extra_args")
        or not isinstance(where[-1], str)
    ):
        return False
    words = [word for word in re.split(r"[^a-z0-9]+", where[-1].lower()) if word]
    if not words or words[-1] in _HARMLESS_ENDS or ("token" in words and words[-1] in _COUNTS):
        return False
    return bool(_SECRET_WORDS & set(words)) or any(pair in _SECRET_PAIRS for pair in pairwise(words))


class Concealer:
    """Replace likely secrets by asterisks in texts for display."""

    def __init__(self, root: Mapping | None) -> None:
        self.values: set[str] = set()
        for where, _, node in walk(root) if root is not None else ():
            if isinstance(node, Scalar) and not _is_switch(node) and _is_secret(where, node):
                # Hide the value as spelled and as read; they can differ: escapes, 007 and 7, true and True.
                span = node.place.span
                spelled = span.text[span.column - 1 : span.column - 1 + span.length]
                self.values |= {spelled.strip("\"'"), *str(node.value).splitlines()}

    def __call__(self, text: str) -> str:
        text = _ANY_TOKEN.sub(lambda match: "*" * len(match[0]), text)
        for value in sorted(self.values, key=len, reverse=True):
            if len(value) >= 4:
                text = text.replace(value, "*" * len(value))
        return text


def _is_secret(where: tuple[Part, ...], node: Scalar) -> bool:
    """Return whether a value is a secret by its name, or is in a list or mapping that is."""
    if node.value is None:
        return False
    if where == _WANDB_PROJECT:
        return WANDB_KEY.fullmatch(str(node.value)) is not None
    return _within_secret(where)
