"""LLaMA-Factory's dataset_info.json: the data sets by their names, their columns and tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from compiler.port.keys import Keys
from compiler.port.meaning import conversion, datasets
from compiler.port.meaning.conversion import Alpaca, Tagged
from runtime.data.messages import ALIASES, CALLS, ROLES

COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
OF_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
MEDIA = ("images", "videos", "audios")
ORDER = "rows whose turns do not alternate are left out there, and kept here where the template takes them"
TOOLS = (
    "rows that call tools are left out where the template is written out, and tools are not told to the model"
)


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        source: its entry in `data.train`, None after an error.
        format, fields, transform: as of `data`.
        ranking: whether its rows are preferences.
        note: how its rows differ.
        columns: of instructions, None for rows that are none.
    """

    source: Any
    format: str = "chat"
    fields: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    ranking: bool = False
    note: str = ""
    columns: Alpaca | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """What the data sets of a run have in common."""
        return self.format, dict(self.fields), self.transform


def read(keys: Keys, name: str, folder: str, limit: int | None, stage: str) -> DataSet:
    """An entry of dataset_info.json, with a finding for each of its keys.

    Args:
        keys: of the entry.
        name: its own.
        folder: `dataset_dir`.
        limit: `max_samples`.
        stage: "sft", "dpo" or "pt".
    """
    source = _source(keys, name, folder, limit)
    columns = _named(keys, "columns", COLUMNS)
    tags = _named(keys, "tags", TAGS)
    formatting = keys.choice("formatting", ("alpaca", "sharegpt", "openai")) or "alpaca"
    ranking = keys.flag("ranking")
    _media(keys, columns)
    if stage == "pt":
        made = DataSet(source, "text", {"text": columns.get("prompt") or "text"})
    elif formatting == "alpaca":
        made = _alpaca(source, columns, ranking)
    else:
        made = _conversations(source, columns, tags, formatting, ranking)
    keys.say("formatting", {"data.format": made.format} if keys.given("formatting") else None, made.note)
    keys.same("ranking", note="two answers of a prompt" if ranking else "")
    return made


def joined(found: list[DataSet]) -> list[DataSet]:
    """Instructions and conversations as one form, whose transform tells the rows apart by their columns.

    Returns:
        The data sets as they are where they are not one form of each.
    """
    asked = [each for each in found if each.columns and not each.ranking]
    talks = [each for each in found if each.format == "chat" and not each.transform]
    if not asked or not talks or len(asked) + len(talks) != len(found):
        return found
    (columns, fields) = (asked[0].columns, talks[0].fields)
    if any(each.columns != columns for each in asked) or any(each.fields != fields for each in talks):
        return found
    if columns is None or fields["messages"] in vars(columns).values():
        return found
    made = conversion.alpaca(columns, False, fields)
    return [replace(each, fields=fields, transform=made) for each in found]


def _source(keys: Keys, name: str, folder: str, limit: int | None) -> Any:
    hub, file, cloud = (keys.text(key) for key in ("hf_hub_url", "file_name", "cloud_file_name"))
    if hub:
        place = datasets.Place(f"hf://{hub}")
    elif cloud:
        place = datasets.place(cloud)
    elif file:
        place = datasets.Place(f"{folder.rstrip('/')}/{file}" if folder else file)
    else:
        place = datasets.Place(None, "it is not on the Hugging Face hub")
    where = next((key for key in _PLACES if keys.given(key)), "file_name")
    if place.path is None:
        help = "give it as file_name, or as hf_hub_url"
        keys.refuse(where, "E1143", f"the data set `{name}` cannot be a source: {place.note}", help)
    count = keys.integer("num_samples")
    rows = min(n for n in (count, limit) if n) if count or limit else None
    made = datasets.source(place.path or name, _split(keys), keys.text("subset"), rows)
    for key in ("hf_hub_url", "file_name", "cloud_file_name", "subset", "split"):
        keys.same(key)
    keys.passive(("ms_hub_url", "om_hub_url"), "the Hugging Face hub's is taken")
    keys.passive(("script_url",), "no code of a data set's runs here")
    keys.unless("folder", (None,), "the whole repository is read, not one folder of it")
    if count:
        keys.say("num_samples", {}, f"the first {count} rows here, and {count} drawn ones there")
    return made if place.path else None


_PLACES = ("hf_hub_url", "file_name", "cloud_file_name", "ms_hub_url", "om_hub_url", "script_url")


def _split(keys: Keys) -> str | None:
    split = keys.text("split")
    return None if split == "train" else split


def _named(keys: Keys, section: str, defaults: Mapping[str, str]) -> dict[str, str]:
    """Columns or tags: the file's, where it has any, alone; otherwise LLaMA-Factory's own."""
    if not keys.stands(section):
        return dict(defaults)
    given = {str(name): str(value) for name, value in keys.mapping(section).items() if value is not None}
    below = keys.below(section)
    for name in given:
        below.same(name)
    return given


def _media(keys: Keys, columns: Mapping[str, str]) -> None:
    below = keys.below("columns")
    for name in MEDIA:
        if name in columns:
            below.said.discard(name)
            below.refuse(name, "E1150", f"`{name}`: the models here read text", "take a data set of text")
    if "kto_tag" in columns:
        below.said.discard("kto_tag")
        help = "take a data set with chosen and rejected answers, for stage dpo"
        below.refuse("kto_tag", "E1149", "recipes have no kto", help)


def _alpaca(source: Any, columns: Mapping[str, str], ranking: bool) -> DataSet:
    names = ("prompt", "query", "response", "history", "system", "chosen", "rejected")
    asked = Alpaca(**{name: columns.get(name) for name in names})
    made = conversion.alpaca(asked, ranking)
    note = TOOLS if "tools" in columns else ""
    return DataSet(source, "preference" if ranking else "chat", {}, made, ranking, note, asked)


def _conversations(
    source: Any, columns: Mapping[str, str], tags: Mapping[str, str], formatting: str, ranking: bool
) -> DataSet:
    messages = columns.get("messages") or "conversations"
    role, content = tags.get("role_tag") or "from", tags.get("content_tag") or "value"
    usual = {**ALIASES, **{name: name for name in (*ROLES, *CALLS)}}
    words = {word: OF_TAGS[tag] for tag, word in tags.items() if tag in OF_TAGS}
    known = all(usual.get(word) in (meant, "function_call") for word, meant in words.items())
    notes = [ORDER if formatting == "sharegpt" else "", TOOLS if "tools" in columns else ""]
    note = "; ".join(each for each in notes if each)
    if known and not ranking and "system" not in columns:
        pairs = (
            ("messages", messages),
            ("role", role),
            ("content", content),
            ("tools", columns.get("tools")),
        )
        return DataSet(source, "chat", {here: there for here, there in pairs if there}, note=note)
    turns = {word: "assistant" if meant == "function_call" else meant for word, meant in words.items()}
    system = columns.get("system")
    answers = (
        (columns.get("chosen") or "chosen", columns.get("rejected") or "rejected")
        if ranking
        else (None, None)
    )
    made = conversion.tagged(Tagged(messages, role, content, turns, system, *answers))
    return DataSet(source, "preference" if ranking else "chat", {}, made, ranking, note)
