"""The training data of a recipe, tokenised and laid into rows by the code that train.py runs.

The weights are not needed, nothing is downloaded and jax is not imported. The few numbers that come out are
kept, under a key of everything that they follow from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter, ValidationError

from recipec.compiler.errors import ArtifactError
from recipec.compiler.explain.preview import PACKAGES
from recipec.compiler.packages import install, missing_packages
from recipec.compiler.plan.at_hand import AtHand, Subject, Unavailable, contents, look

if TYPE_CHECKING:
    from recipec.spec.language import Train

QUICK_PACKAGES = ("numpy", "tokenizers", "huggingface_hub")
"""What counting takes without transformers, whose import takes seconds."""

QUICK_BYTES = 4 * 2**20
"""Of data that is tokenised while a recipe is checked: a second or two."""


@dataclass(frozen=True)
class Statistics:
    """The training data of a recipe, tokenised and laid into rows.

    Attributes:
        samples: that are kept; of preferences, pairs.
        dropped: rows of the files that are not.
        rows: of an epoch, as train.global_batch_size counts them: both answers of a preference are one.
        answers: rows of tokens in each of them: 2 of a preference, else 1.
        tokens: real ones of an epoch.
    """

    samples: int
    dropped: int
    rows: int
    answers: int
    tokens: int

    @property
    def tokens_per_row(self) -> float:
        """Real tokens of a row of max_length, on average."""
        return self.tokens / (self.rows * self.answers)

    def steps(self, train: Train) -> int:
        """Optimizer steps of a run, as runtime.data.prepare counts them."""
        if train.steps is not None:
            return train.steps
        return (train.epochs or 1) * math.ceil(self.rows / train.global_batch_size)


class Store(Protocol):
    """What compiler.plan.store offers."""

    def key(self, *parts: object) -> str: ...

    def get(self, name: str, /) -> str | None: ...

    def put(self, name: str, value: str, /) -> None: ...


STATISTICS: TypeAdapter[Statistics] = TypeAdapter(Statistics)


def statistics(
    program: Subject, model: Path | None = None, data_dir: Path | None = None, store: Store | None = None
) -> Statistics | Unavailable:
    """Counts the training data of a recipe; it takes as long as tokenising does, unless it is in the store.

    Args:
        model, data_dir: as for `at_hand.look`.
        store: None for the one of plans.

    Raises:
        ArtifactError: what was given is not there, or train.py would refuse the data.
    """
    if missing := _missing(PACKAGES):
        return missing
    found = look(program, model, data_dir)
    if isinstance(found, Unavailable):
        return found

    def load() -> Any:
        from recipec.runtime.data.tokenizer import load_tokenizer

        return load_tokenizer(found.model_dir, found.model, found.data, found.data_dir)

    store = _plans() if store is None else store
    key = store.key("statistics", contents(found))
    return _kept(store, key) or _counted(found, load, store, key)


def quick_statistics(program: Subject, store: Store | None = None) -> Statistics | Unavailable:
    """The same where it takes no more than a second or two, and runs none of the recipe's code.

    Args:
        store: None for the one of plans, whose counts are taken as well.
    """
    if missing := _missing(QUICK_PACKAGES):
        return missing
    if program.recipe.data.transform is not None:
        return Unavailable("data.transform is a program, which is not run to count")
    try:
        found = look(program, None, None)
        if isinstance(found, Unavailable):
            return found
        store = _plans() if store is None else store
        digest = contents(found)
        kept = _kept(store, store.key("statistics", digest))
        if kept is not None:
            return kept
        files = [found.data_dir / source.path for source in program.recipe.data.train]
        if not all(file.is_file() for file in files) or sum(f.stat().st_size for f in files) > QUICK_BYTES:
            return Unavailable(f"the data is more than {QUICK_BYTES >> 20} MiB")
        key = store.key("quick statistics", digest)
        own = Path(found.model.tokenizer) if found.model.tokenizer else found.model_dir
        return _kept(store, key) or _counted(found, lambda: PlainTokenizer(own), store, key)
    except (ArtifactError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return Unavailable("the data or the tokenizer cannot be read")  # whoever uses them says why


class PlainTokenizer:
    """A tokenizer's files with the attributes of transformers' fast tokenizer that encoding reads.

    Args:
        folder: with tokenizer.json and tokenizer_config.json.

    Raises:
        OSError, ValueError: a file is missing or no JSON of its kind.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self.backend_tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
        except OSError:
            raise
        except Exception as error:  # the Rust parser's own
            raise ValueError(str(error)) from error
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        more = folder / "special_tokens_map.json"
        named = (json.loads(more.read_text("utf-8")) if more.is_file() else {}) | config
        self.special_tokens_map = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in named.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        self.eos_token = self.special_tokens_map.get("eos_token")
        self.pad_token_id = 0
        template = folder / "chat_template.jinja"
        self.chat_template = (
            template.read_text("utf-8") if template.is_file() else config.get("chat_template")
        )
        if isinstance(self.chat_template, list):  # several by name
            by_name = {one["name"]: one["template"] for one in self.chat_template}
            self.chat_template = by_name.get("default")

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by number, each with `content` and `special`."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens that have names."""
        return list(self.special_tokens_map.values())

    def get_chat_template(self) -> str:
        """The template's text."""
        return str(self.chat_template)


def _missing(packages: tuple[str, ...]) -> Unavailable | None:
    missing = missing_packages(packages)
    if not missing:
        return None
    return Unavailable(f"{', '.join(missing)} cannot be imported ({install('train', 'plan')})")


def _plans() -> Store:
    from recipec.compiler.plan import store

    return store


def _kept(store: Store, key: str) -> Statistics | None:
    kept = store.get(key)
    with suppress(ValidationError):  # an entry that cannot be read is made again
        return None if kept is None else STATISTICS.validate_json(kept)
    return None


def _counted(found: AtHand, load: Callable[[], Any], store: Store, key: str) -> Statistics:
    counted = _count(found, load)
    store.put(key, STATISTICS.dump_json(counted).decode())
    return counted


def _count(found: AtHand, load: Callable[[], Any]) -> Statistics:
    """Tokenises and packs as train.py does."""
    from recipec.runtime.data.prepare import prepare
    from recipec.runtime.errors import UserError
    from recipec.runtime.settings import TrainSettings

    # Batches of one row: how many rows a batch has is no matter of the data.
    alone = TrainSettings(epochs=1, global_batch_size=1, micro_batch_size=1)
    try:
        prepared = prepare(found.data, alone, 1, load(), found.data_dir, found.vocabulary)
    except UserError as error:
        raise ArtifactError(error.message, error.help) from error
    report, answers = prepared.report.train, prepared.samples.group
    samples = len(prepared.samples) // answers
    return Statistics(
        samples=samples,
        dropped=report.read - samples,
        rows=prepared.steps_per_epoch,
        answers=answers,
        tokens=report.row_tokens,
    )
