"""Secrets, and references to the environment: neither may stand in a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from spec import paths
from spec.diagnostics import Diagnostic
from spec.paths import Part
from spec.tree import Mapping, Scalar, walk

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


def find(root: Mapping) -> Iterator[Diagnostic]:
    """Every reference to the environment and every likely secret in the tree."""
    for where, key, node in walk(root):
        if _holds_secret(where) and isinstance(node, Scalar) and key is not None:
            yield Diagnostic(
                "E0703",
                f"`{where[-1]}` is named like a secret, and its value would be written into the artifact",
                paths.join(where),
                "remove it, and set it in the environment where the server runs",
                key.span,
            )
        texts = [(key.span, where[-1])] if key is not None else []
        if isinstance(node, Scalar) and isinstance(node.value, str):
            texts.append((node.place.span, node.value))
        for span, text in texts:
            if not isinstance(text, str):
                continue
            if reference := _REFERENCE.search(text):
                yield Diagnostic(
                    "E0701",
                    f"`{reference[0]}` is refused: its value would be written into the artifact",
                    paths.join(where),
                    "write the value itself; a secret is set in the environment where the artifact runs",
                    span,
                )
            for what, pattern in _TOKENS.items():
                if re.search(pattern, text):
                    yield Diagnostic(
                        "E0702",
                        f"`{paths.join(where)}` looks like {what}",
                        paths.join(where),
                        "remove it, and revoke it if the file was shared; set it in the environment instead",
                        span,
                    )


def _holds_secret(where: tuple[Part, ...]) -> bool:
    if (
        len(where) < 3
        or where[0] != "serve"
        or where[1] not in ("env", "extra_args")
        or not isinstance(where[-1], str)
    ):
        return False
    words = [word for word in re.split(r"[^a-z0-9]+", where[-1].lower()) if word]
    if not words or words[-1] in _HARMLESS_ENDS:
        return False
    return bool(_SECRET_WORDS & set(words)) or any(pair in _SECRET_PAIRS for pair in pairwise(words))


class Concealer:
    """Replaces what looks like a secret by stars, in texts that are shown."""

    def __init__(self, root: Mapping | None) -> None:
        self.values: list[str] = []
        for where, _, node in walk(root) if root is not None else ():
            if _holds_secret(where) and isinstance(node, Scalar) and node.value is not None:
                self.values.append(str(node.value))

    def __call__(self, text: str) -> str:
        text = _ANY_TOKEN.sub(lambda match: "*" * len(match[0]), text)
        for value in self.values:
            if len(value) >= 4:
                text = text.replace(value, "*" * len(value))
        return text
