"""Explain errors of the hub in words that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from recipec.compiler.errors import ArtifactError
from recipec.runtime.errors import first_line

ELSEWHERE = "or run `recipe models add` on a machine that reaches the hub, and copy the folder that it writes"
"""The alternative if the hub cannot be reached."""


class HubNotReached(ArtifactError):
    """The hub cannot be reached: no network, a wrong address, HF_HUB_OFFLINE, or no huggingface_hub.

    Attributes:
        reason: why, as a clause.
    """

    def __init__(
        self,
        model_id: str,
        reason: str,
        help: str = f"check the network, HF_ENDPOINT and proxies; {ELSEWHERE}",
    ) -> None:
        super().__init__(f"`{model_id}` was not added: {reason}", help)
        self.reason = reason


@contextmanager
def refused(model_id: str, revision: str | None) -> Iterator[None]:
    """Turn any exception of huggingface_hub in the block into an ArtifactError.

    Raises:
        HubNotReached, ArtifactError: in place of the original error.
    """
    try:
        yield
    except (ArtifactError, MemoryError):
        raise
    except Exception as error:  # from the hub, the connection, or the disk of the cache
        raise refusal(model_id, revision, error) from error


def refusal(model_id: str, revision: str | None, error: Exception) -> ArtifactError:
    """Return the ArtifactError for an error of huggingface_hub."""
    import httpx
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/{model_id}"
    if isinstance(error, errors.GatedRepoError):
        return ArtifactError(
            f"`{model_id}`: its terms have to be accepted on the hub",
            f"accept them on {where}, then set HF_TOKEN, or run `hf auth login`",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ArtifactError(
            f"`{model_id}`: the hub has no such model, or it is private",
            f"check the id on {where}; a private model needs HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ArtifactError(
            f"`{model_id}`: the hub has no revision {revision} of it", f"its branches and tags are on {where}"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        unset = f"unset HF_HUB_OFFLINE; {ELSEWHERE}"
        return HubNotReached(model_id, "HF_HUB_OFFLINE is set, so the hub is not used", unset)
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return refusal(model_id, revision, error.__cause__)
    if isinstance(error, httpx.NetworkError | httpx.ProtocolError | httpx.ReadTimeout) and not isinstance(
        error, httpx.ConnectError
    ):
        return HubNotReached(model_id, f"the connection to {constants.ENDPOINT} broke ({first_line(error)})")
    if isinstance(error, httpx.TransportError | errors.LocalEntryNotFoundError):
        why = f"the hub was not reached at {constants.ENDPOINT} ({first_line(error)})"
        return HubNotReached(model_id, why)
    if isinstance(error, errors.HFValidationError):
        return ArtifactError(f"`{model_id}` is not an id of the hub", "write the id as OWNER/NAME")
    if isinstance(error, httpx.HTTPStatusError | errors.HfHubHTTPError):
        status = error.response.status_code if error.response is not None else "an error"
        wrong = status in (401, 403)
        return ArtifactError(
            f"`{model_id}`: the hub answered {status}",
            "HF_TOKEN may belong to another account, or may have expired" if wrong else "try again later",
        )
    if isinstance(error, OSError):
        return ArtifactError(f"`{model_id}` was not added: {first_line(error)}", "try again")
    return ArtifactError(
        f"`{model_id}`: the answer of {constants.ENDPOINT} is not the hub's ({first_line(error)})",
        "check HF_ENDPOINT and proxies",
    )
