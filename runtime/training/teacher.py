"""The teacher of a distillation: its checkpoint, which is compared with the student's, and its model.

The teacher is computed on the student's mesh. It has no adapters and no gradient, and no checkpoint of the
run stores it: a resumed run loads it again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..addresses import path_of, reached
from ..checkpoints.record import read_record, write_next_to
from ..checkpoints.trained_weights import check_model
from ..data.tokenizer import first_difference, load_tokenizer
from ..errors import UserError
from ..model.loading import Built, build
from ..progress import Progress
from ..settings import DataSettings, ModelSettings, RunSettings
from ..weights.checkpoint import HFCheckpoint
from ..weights.locate import locate_model
from ..weights.quantized_formats import sentence

if TYPE_CHECKING:
    from .session import Session

RECORD = "teacher.json"
"""The file next to the checkpoints with the teacher's name and a digest of its files."""
SAMPLED = 1 << 20
"""Bytes at both ends of each file of weights that the digest covers, besides its length. Reading all of a
large model would take minutes; a model that was trained further differs in its last megabyte."""


def open_teacher(session: Session, settings: RunSettings) -> HFCheckpoint:
    """Open the teacher's checkpoint.

    Raises:
        UserError: when there is none, it is not the model that the recipe was compiled for, its tokenizer is
            not the student's, or it is not the teacher that the run began with.
    """
    teacher = settings.teacher
    assert teacher is not None
    folder = locate_model(teacher, session.arguments.teacher, "--teacher")
    checkpoint = HFCheckpoint.open(folder)
    checkpoint.verify()
    check_model({"model": read_record(session.artifact).get("teacher")}, checkpoint, "--teacher")
    if checkpoint.dequantized:
        print(f"note: {sentence(checkpoint)}", file=sys.stderr)
    _check_tokenizers(session, settings, checkpoint)
    _check_same(session, checkpoint.name, _digest(checkpoint))
    return checkpoint


def check_stored(session: Session) -> None:
    """Keep a digest of the teacher's stored log-probabilities, if the run reads any.

    Raises:
        UserError: they are not those that the run began with.
    """
    if (stored := session.prepared.stored) is not None:
        _check_same(session, str(stored.folder), stored.digest)


def build_teacher(session: Session, settings: RunSettings) -> Built:
    """Place the teacher's weights on the mesh in scope, with its family's shardings.

    Raises:
        UserError: as `open_teacher`.
    """
    assert settings.teacher is not None
    checkpoint = open_teacher(session, settings)
    with Progress("placing the teacher's weights", 1.0) as progress:
        return build(
            checkpoint,
            settings.teacher,
            None,
            session.mesh,
            progress=lambda done, count: progress.advance(1 / count),
        )


def _check_tokenizers(session: Session, settings: RunSettings, checkpoint: HFCheckpoint) -> None:
    """Raise an error unless both models give every token the same number."""
    assert settings.teacher is not None
    about = replace(settings.teacher, vocab_size=checkpoint.architecture.vocab_size)
    student = _tokens(session.base, settings.model, session)
    teacher = _tokens(checkpoint, about, session)
    if (difference := first_difference(student, teacher)) is not None:
        raise UserError(
            f"{checkpoint.name}: the teacher's tokenizer is not the student's: {difference}",
            "distillation compares the probabilities of the same tokens: choose a teacher with the student's "
            "tokenizer, such as a larger model of the same series",
        )


def _tokens(checkpoint: HFCheckpoint, model: ModelSettings, session: Session) -> Mapping[str, int]:
    """Return the tokens of a checkpoint's tokenizer with their numbers."""
    assert checkpoint.directory is not None
    plain = DataSettings(train=(), format="text")  # needs no chat template
    tokenizer = load_tokenizer(checkpoint.directory, model, plain, session.arguments.data_dir)
    tokens: dict[str, int] = tokenizer.get_vocab()
    return tokens


def _check_same(session: Session, name: str, digest: str) -> None:
    """Raise an error if the run began with another teacher, or another process has another one."""
    session.hosts.same(
        "teacher",
        digest,
        "has another teacher than process 0",
        "put the same files on every host, or at an address that all of them read",
    )
    if session.resumed.step is not None:
        known = recorded_teacher(session.directory)
        if known and known.get("digest") != digest:
            raise UserError(
                f"{name}: is not the teacher that the run began with, which was "
                f"{known.get('name')}, or its files have changed since",
                "restore it, or start a new run in another --output",
            )
    elif session.hosts.first:
        record = {"name": name, "digest": digest}
        write_next_to(session.directory, RECORD, (json.dumps(record, indent=2) + "\n").encode())


def recorded_teacher(directory: str) -> Mapping[str, Any]:
    """Return the name and the digest of a run's teacher; {} if there is none."""
    with reached(directory):
        try:
            return dict(json.loads((path_of(directory) / RECORD).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return {}


def _digest(checkpoint: HFCheckpoint) -> str:
    """Return a SHA-256 of config.json, and of the lengths and both ends of the files of weights."""
    digest = hashlib.sha256(checkpoint.config_file())
    for name in sorted(checkpoint.files):
        size = checkpoint.store.sizes[name]
        digest.update(f"{name} {size} ".encode())
        digest.update(checkpoint.store.read(name, 0, min(SAMPLED, size)))
        digest.update(checkpoint.store.read(name, max(0, size - SAMPLED), size))
    return digest.hexdigest()
