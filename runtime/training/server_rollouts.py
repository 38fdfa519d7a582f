"""Completions from a vLLM server on other chips, with the adapters of each step.

The run writes its adapters as a PEFT adapter into a folder that the server reads, and asks the server to load
them under a new name: the server keys what it remembers of prompts by the adapter's name. Prompts are sent as
tokens, and completions come back as tokens with their log-probabilities.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..backends.run_output import save_adapter
from ..checkpoints.first_adapters import read_initial
from ..clients.client import ServerError
from ..errors import UserError
from ..model.adapters import LoraSettings, build_adapters
from ..model.decode import Completions, Generation
from ..model.sampling import Sampling
from ..sections import Rollout
from ..settings import ModelSettings
from ..weights.checkpoint import HFCheckpoint
from .rollout_server import RolloutServer
from .rollouts import Current

FOLDER = "rollout-adapters"
"""The folder of the adapters, in the checkpoint directory, if the recipe names none."""
PREFIX = "rollout"
"""The beginning of each adapter's name: rollout-RUN-NUMBER."""


@dataclass(frozen=True)
class Exported:
    """What an adapter's files are written from, besides its arrays.

    Attributes:
        base, model, lora: the checkpoint that is trained, and the recipe's sections.
        directory: of the checkpoints, which may hold the adapters' first values.
        folder: where the adapters are written.
        seen: the same folder as the server sees it.
    """

    base: HFCheckpoint
    model: ModelSettings
    lora: LoraSettings
    directory: str
    folder: Path
    seen: str

    @classmethod
    def of(
        cls, base: HFCheckpoint, model: ModelSettings, lora: LoraSettings, directory: str, rollout: Rollout
    ) -> Exported:
        """Return what `rollout` says of the folders.

        Raises:
            UserError: the checkpoints are in a bucket, and the recipe names no folder.
        """
        if rollout.adapter_path is None and "://" in directory:
            raise UserError(
                f"the server reads adapters from a folder, and the checkpoints are in {directory}",
                "name a folder in rollout.adapter_path that this machine and the server share",
            )
        folder = Path(rollout.adapter_path or Path(directory) / FOLDER)
        return cls(base, model, lora, directory, folder, rollout.server_adapter_path or str(folder))

    @property
    def rank(self) -> int:
        """Return the largest rank of the adapter's matrices."""
        largest = max([self.lora.rank, *self.lora.rank_pattern.values()])
        return 2 * largest if self.lora.principal else largest

    def write(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a PEFT adapter, completely or not at all.

        Args:
            arrays: the trained arrays by their paths.

        Raises:
            UserError: it cannot be written.
        """
        adapters = build_adapters(self.base.family, self.base.architecture, self.lora)
        values = {
            adapter.name: adapter.to_peft(*(arrays[path] for path, *_ in adapter.arrays))
            for adapter in adapters
        }
        initial = read_initial(self.directory) if self.lora.principal else None
        save_adapter(self.folder / name, self.base, self.model, self.lora, values, initial)

    def remove(self, name: str) -> None:
        """Remove an adapter's files, if they exist."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def names(self) -> list[str]:
        """Return the names of the adapters in the folder."""
        with suppress(OSError):
            return sorted(path.name for path in self.folder.glob(f"{PREFIX}-*"))
        return []


class ServerGenerator:
    """Generate completions with a server and the adapters that a trainer trains, on one host.

    Args:
        trainer: whose adapters are used.
        server: generates.
        exported: writes the adapters.
        generation: the lengths, ends and sampling of completions.
        scored: whether the server reports log-probabilities.
    """

    def __init__(
        self,
        trainer: Current,
        server: RolloutServer,
        exported: Exported,
        generation: Generation,
        scored: bool,
    ) -> None:
        self._trainer, self._server, self._exported = trainer, server, exported
        self._generation, self._scored = generation, scored
        self._run, self._numbers = uuid.uuid4().hex[:8], itertools.count(1)
        self._newest: tuple[Any, str] | None = None
        self._older: list[str] = []
        self._checked = False

    def identity(self) -> str:
        """Return a digest of the adapters. Completions of these adapters may be stored and used again."""
        digest = hashlib.sha256()
        for path, array in sorted(self._arrays().items()):
            digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def generate(self, prompts: Mapping[str, np.ndarray], sampling: Sampling | None = None) -> Completions:
        """Return the completions of prompts, as numpy arrays.

        Args:
            prompts: as for `decode.generate`, any number of rows.
            sampling: how tokens are chosen; None takes that of training.

        Raises:
            UserError: the server does not answer in time, lacks what a run needs, or refuses a prompt.
            Interrupted: a signal asks the run to stop.
        """
        real = np.asarray(prompts["segment_ids"]) > 0
        rows = [tuple(row[inside].tolist()) for row, inside in zip(prompts["tokens"], real, strict=True)]
        requests = self._requests(rows, sampling or self._generation.sampling)
        if not self._checked:
            self._check(rows[0])
            self._checked = True

        def work() -> Completions:
            answers = self._server.complete(self._hand_over(), requests)
            return self._completions(itertools.chain.from_iterable(answers), len(rows))

        return self._server.patiently(work)

    def _check(self, prompt: Sequence[int]) -> None:
        """Check what the server has to have, with the newest adapters and a prompt of the run."""
        longest = self._generation.longest or len(prompt) + self._generation.most
        self._server.check(self._exported.model.id, longest)
        self._forget_earlier()
        name = self._server.patiently(self._hand_over)
        if self._scored:
            self._server.check_logprobs(name, prompt)

    def _requests(self, rows: Sequence[tuple[int, ...]], sampling: Sampling) -> list[dict[str, Any]]:
        """Return a request for each group of equal prompts that follow each other."""
        body: dict[str, Any] = {
            "max_tokens": self._generation.most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            # Only these tokens end a completion. The server's own ends may be others.
            "stop_token_ids": list(self._generation.ends),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        if self._scored:
            body["logprobs"] = 0  # of the tokens that are drawn
        out = []
        for prompt, group in itertools.groupby(rows):
            count = len(list(group))
            # vLLM refuses several greedy completions of a prompt, which would be the same.
            parts = [count] if sampling.temperature else [1] * count
            out += [{**body, "prompt": list(prompt), "n": part} for part in parts]
        return out

    def _completions(self, answers: Any, count: int) -> Completions:
        most, ends = self._generation.most, set(self._generation.ends)
        tokens, logps = np.zeros((count, most), np.int32), np.zeros((count, most), np.float32)
        lengths, ended = np.zeros(count, np.int32), np.zeros(count, bool)
        for row, answer in enumerate(answers):
            size = lengths[row] = len(answer.tokens)
            ended[row] = bool(answer.tokens) and answer.tokens[-1] in ends
            if not 0 < size <= most or not (ended[row] or (size == most and not answer.stopped)):
                raise UserError(
                    f"the rollout server at {self._server.url} ended a completion after {size:,} tokens, at "
                    "none of the tokens that end one",
                    "start it with vLLM's own defaults, as rollout/serve.sh of the artifact does",
                )
            tokens[row, :size], logps[row, :size] = answer.tokens, answer.logps
        return Completions(tokens, lengths, logps, ended)

    def _hand_over(self) -> str:
        """Return the name of the newest adapters, once the server has them.

        Raises:
            UserError: they cannot be written, or the server refuses them.
            ServerError: the server does not answer.
        """
        trained = self._trainer.current()[2]
        if self._newest is None or self._newest[0] is not trained:
            if self._newest is not None:
                self._older.append(self._newest[1])
            name = f"{PREFIX}-{self._run}-{next(self._numbers)}"
            self._exported.write(name, self._arrays())
            self._newest = trained, name
        name = self._newest[1]
        self._server.load(name, f"{self._exported.seen}/{name}", self._exported.rank)
        while self._older:
            self._server.unload(self._older[-1])
            self._exported.remove(self._older.pop())
        return name

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return the newest adapters on the host, by their paths."""
        trained = jax.device_get(self._trainer.current()[2])
        return {
            ".".join(map(str, path)): np.asarray(jax.tree.leaves(variable)[0])
            for path, variable in trained.flat_state()
        }

    def _forget_earlier(self) -> None:
        """Unload and remove the adapters that an earlier process of the run left in this folder."""
        place = f"{self._exported.seen}/{PREFIX}-"
        for name, root in self._server.adapters().items():
            if root.startswith(place):
                with suppress(ServerError):
                    self._server.unload(name)
        for name in self._exported.names():
            self._exported.remove(name)


def server_generator(
    trainer: Current,
    exported: Exported,
    rollout: Rollout,
    generation: Generation,
    group: int,
    rows: int,
    requested: Callable[[], int | None],
) -> ServerGenerator:
    """Return what generates with the recipe's server.

    Args:
        group: the completions of a prompt.
        rows: the completions of a batch.
        requested: returns the signal that asks the run to stop, None before there is one.
    """
    at_once = max(1, (rollout.rows or rows) // group)
    server = RolloutServer(rollout.url, rollout.wait_seconds, at_once, requested)
    return ServerGenerator(trainer, server, exported, generation, rollout.importance_sampling_correction)
