"""The name of a container image, in its parts."""

from __future__ import annotations

import re
from dataclasses import dataclass

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class ImageName:
    """The name of a container image: `host:port/path:tag@sha256:...`.

    Attributes:
        repository: with the registry's host and port, if the name has them: "localhost:5000/vllm/vllm-tpu".
        tag: "v0.32.0"; "" if there is none.
        digest: "sha256:..."; "" if there is none. It may be invalid, as a recipe may have any.
    """

    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def read(cls, text: str) -> ImageName:
        """Split a name. A colon before the last slash belongs to the registry's port."""
        name, _, digest = text.partition("@")
        path, slash, last = name.rpartition("/")
        last, _, tag = last.partition(":")
        return cls(f"{path}{slash}{last}", tag, digest)

    def __str__(self) -> str:
        return self.tagged + (f"@{self.digest}" if self.digest else "")

    @property
    def tagged(self) -> str:
        """The name without its digest."""
        return self.repository + (f":{self.tag}" if self.tag else "")

    @property
    def exact(self) -> str:
        """The name without its tag, if it has a digest: some tools take only one of the two."""
        return f"{self.repository}@{self.digest}" if self.digest else self.tagged

    @property
    def registry(self) -> str:
        """The registry's host and port; Docker Hub's for a name without them."""
        host, slash, _ = self.repository.partition("/")
        return host if slash and (set(host) & set(".:") or host == "localhost") else "docker.io"

    @property
    def valid_digest(self) -> bool:
        """Whether the name has a digest, and that is one."""
        return DIGEST.fullmatch(self.digest) is not None
