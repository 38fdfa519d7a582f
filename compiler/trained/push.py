"""Upload a trained model's folder to the Hugging Face hub, with huggingface_hub's upload_folder."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipec.compiler import __version__
from recipec.compiler.errors import ArtifactError
from recipec.compiler.hub.hub_errors import HubNotReached, refusal
from recipec.compiler.packages import install, missing_packages
from recipec.compiler.terminal import manner
from recipec.compiler.trained.model_folder import Trained, open_trained
from recipec.compiler.wording import plural
from recipec.runtime.merging.journal import RECORD
from recipec.runtime.progress import readable_size

MAIN = "main"
WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin")
"""Endings of files that loaders look for. Such a file of an earlier model would be loaded as this one's."""


@dataclass(frozen=True)
class Push:
    """The plan of an upload.

    Attributes:
        files: sizes by name.
        branch: MAIN, or another.
        private: whether the repository is, or will be, private.
        parent: the branch's commit, None if the repository or the branch does not exist.
        there: whether the repository exists.
        replaced, kept: files of the branch that the upload replaces, and those that stay.
    """

    folder: Path
    repo: str
    files: Mapping[str, int]
    branch: str
    private: bool
    parent: str | None
    there: bool
    replaced: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max(map(len, self.files))
        size, state = readable_size(sum(self.files.values())), "is there" if self.there else "will be created"
        lines = [f"{self.folder}: {plural(len(self.files), 'file')}, {size}"]
        lines += [f"  {name:{width}}  {readable_size(size)}" for name, size in self.files.items()]
        lines += [f"to {self.repo}, {'private' if self.private else 'public'}, which {state}: {self.branch}"]
        for what, names in (("replaces", self.replaced), ("leaves", self.kept)):
            lines += [f"{what} there {', '.join(names)}"] if names else []
        return "\n".join(lines)


def plan(folder: Path, repo: str, branch: str = MAIN, public: bool = False) -> Push:
    """Check the folder and the repository, without changing anything.

    Raises:
        ArtifactError: when the folder is incomplete, there is no token, the hub refuses, the repository is
            public and that was not requested or the reverse, or weights already there would stay.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    trained = open_trained(folder)
    files, api = _files(trained), _api()
    with _explained(repo, branch):
        try:
            about = api.model_info(repo)
        except RepositoryNotFoundError:
            return Push(trained.folder, repo, files, branch, not public, None, False)
        try:
            # A branch that does not exist yet will start from the main branch.
            about, parent = (now := api.model_info(repo, revision=branch)), now.sha
        except RevisionNotFoundError:
            parent = None
    if bool(about.private) == public:
        if public:
            raise ArtifactError(f"{repo} exists and is private", "leave --public out, or change it there")
        raise ArtifactError(f"{repo} exists and is public", "--public confirms that everyone may read it")
    there = [str(sibling.rfilename) for sibling in about.siblings or ()]
    kept = tuple(name for name in there if name not in files and name != ".gitattributes")
    if stale := next((name for name in kept if name.endswith(WEIGHTS)), None):
        raise ArtifactError(
            f"{repo} has {stale}, which would stay next to these weights",
            "push to another repository, or remove it there",
        )
    replaced = tuple(name for name in there if name in files)
    return Push(trained.folder, repo, files, branch, not public, parent, True, replaced, kept)


def upload(push: Push) -> str:
    """Upload the files in one commit, and return its address.

    Raises:
        ArtifactError: when the hub refuses, or the branch has changed since it was checked.
    """
    api = _api()
    with _explained(push.repo, push.branch):
        if not push.there:
            api.create_repo(push.repo, private=push.private)
        if push.branch != MAIN and push.parent is None:
            api.create_branch(push.repo, branch=push.branch)
        commit = api.upload_folder(
            repo_id=push.repo,
            folder_path=push.folder,
            allow_patterns=[glob.escape(name) for name in push.files],
            commit_message="Upload by recipe push",
            revision=push.branch,
            parent_commit=push.parent,
        )
    return str(commit.commit_url)


def _files(trained: Trained) -> dict[str, int]:
    """Return the files to upload: for a merge, those in its record; otherwise all except hidden files."""
    if trained.record is not None:
        names = sorted([*trained.record["files"], RECORD])
    else:
        paths = sorted(
            path.relative_to(trained.folder) for path in trained.folder.rglob("*") if path.is_file()
        )
        names = [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)]
    return {name: (trained.folder / name).stat().st_size for name in names}


def _api() -> Any:
    if missing_packages(["huggingface_hub"]):
        raise ArtifactError("pushing needs huggingface_hub, which is not installed", install("hub"))
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars, logging

    token = os.environ.get("HF_TOKEN")
    if not token:
        help = "set it to a token that may write: https://huggingface.co/settings/tokens"
        raise ArtifactError("the variable HF_TOKEN is not set", help)
    logging.set_verbosity_error()
    if manner.quiet or not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(token=token, library_name="recipec", library_version=__version__)


@contextmanager
def _explained(repo: str, branch: str) -> Iterator[None]:
    """Turn exceptions of huggingface_hub in the block into an ArtifactError."""
    try:
        yield
    except (ArtifactError, MemoryError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) else None  # from the upload of a file
        explanation = refusal(repo, branch, cause if isinstance(cause, Exception) else error)
        if isinstance(explanation, HubNotReached):
            help = "check the network, HF_ENDPOINT, HF_HUB_OFFLINE and proxies"
            raise ArtifactError(f"{repo}: {explanation.reason}", help) from error
        raise explanation from error
