"""Check the chat template against the checkpoint's family, and against the first rows of local data."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipec.compiler import catalog
from recipec.compiler.checks.formats import is_known
from recipec.compiler.lowering.at_hand import PlainTokenizer
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.first_rows import LOOKED_AT, first_rows
from recipec.compiler.lowering.references import COMPRESSIBLE, escapes, is_inline, leads_out
from recipec.compiler.packages import missing_packages
from recipec.compiler.wording import listing, plural
from recipec.runtime.data.advice import LIKED, WITHOUT_ANSWER, advice, asking, balance, leftover
from recipec.runtime.data.columns import Unread, marked, together
from recipec.runtime.data.formats import ENDS_WITH_ANSWER, PARSERS, ParsedSample, is_labeled, label_of
from recipec.runtime.data.messages import taught
from recipec.runtime.data.picture_rows import NOWHERE, refuse_pictures, taken
from recipec.runtime.data.pictures import picture_of
from recipec.runtime.data.row_counts import one_token
from recipec.runtime.data.row_values import Malformed, without_fillers
from recipec.runtime.errors import UserError
from recipec.runtime.model.families import foreign_markers
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.language import Data

LARGEST_TEMPLATE = 2**20

LARGEST_TOKENIZER = 2**26

LARGEST_PARQUET = 2**26
"""The most bytes of a Parquet file whose first rows are read: they need its first row group."""

TOKENIZER = "tokenizer.json"


E0402 = Code(
    "E0402",
    "chat template cannot be read",
    cause="`data.chat_template` names a file that is missing, too large or not text.",
    cure="Correct the path. It is relative to the recipe's folder.",
)

E0405 = Code(
    "E0405",
    "no chat template",
    cause="The tokenizer of a base checkpoint has no chat template, and chat data needs one. For a "
    "checkpoint in a folder on this machine, `recipe check` looks at its files.",
    cure="Train the instruction-tuned checkpoint, or give `data.chat_template`.",
)

E0411 = Code(
    "E0411",
    "chat template is not valid Jinja",
    cause="`data.chat_template` does not compile as transformers would compile it: a block is not closed, "
    "or a filter or test does not exist.",
    cure="Correct the template at the line that the message names.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    data, model = facts.recipe.data, facts.model
    kinds = [data.of(source) for source in (*data.train, *data.eval)]
    chats = any(kind.format in ("chat", "instruction") and kind.chat_template is None for kind in kinds)
    templates: dict[str, str | None] = {}
    for place, named in data.templates.items():
        try:
            templates[named] = _given(facts.folder, named)
        except (OSError, ValueError) as error:
            reason = "the file does not exist" if isinstance(error, FileNotFoundError) else str(error)
            yield Diagnostic(
                E0402,
                f"the chat template `{named}` cannot be read: {reason}",
                place,
                "the path is relative to the recipe's folder; a template can also be written inline",
            )
            return
        if (text := templates[named]) is not None:
            if (invalid := _invalid(text)) is not None:
                where = "" if is_inline(named) else f"`{named}`: "
                yield Diagnostic(E0411, f"{where}{invalid.message}", place, invalid.help)
                return
            yield from _markup(facts, text, place)
    shipped: str | None = None
    place = "model.id" if facts.recipe.model.tokenizer is None else "model.tokenizer"
    if data.chat_template is None and (folder := _checkpoint(facts)) is not None:
        shipped = _shipped(folder)
        if chats and shipped is None and _has_none(folder):
            named = facts.recipe.model.tokenizer or facts.recipe.model.id
            yield Diagnostic(
                E0405,
                f"the tokenizer in `{named}` has no chat template",
                place,
                "data: {chat_template: chat.jinja} with your own template, or the template that the base was "
                "trained with as chat_template.jinja in the folder",
            )
    elif (
        shipped is None
        and data.chat_template is None
        and model is not None
        and model.chat is False
        and chats
        and facts.recipe.model.tokenizer is None
    ):
        yield Diagnostic(
            E0405,
            f"`{model.id}` is not tuned for chat, and its tokenizer has no chat template",
            facts.first_given("data.format", "model.id"),
            f"{_tuned(model.id)}data: {{chat_template: chat.jinja}} with your own template",
        )
    # The model was trained with the template that it was published with.
    published = place == "model.id" and model is not None and model.added is not None
    if shipped is not None and chats and not published:
        yield from _markup(facts, shipped, place)
    held = [shipped if kind.chat_template is None else templates[kind.chat_template] for kind in kinds]
    for where, template in (
        *((at, templates[named]) for at, named in data.templates.items()),
        (place, shipped),
    ):
        if template is not None and (chats or where != place):
            yield from _end(facts, template, where)
    yield from _reasoning(facts, held)
    yield from _rows(facts, held)
    yield from _labels(facts)


W0451 = Code(
    "W0451",
    "reasoning without effect",
    cause="Every source has the format text, which has no assistant turns.",
    cure="Remove `data.reasoning`.",
)

E0452 = Code(
    "E0452",
    "template does not support empty reasoning",
    cause="`data.reasoning: empty` trains answers after the prompt that switches thinking off with "
    "the template variable enable_thinking. This template does not read that variable.",
    cure="Write `reasoning: drop`, or use a template that reads it.",
)


def _reasoning(facts: Facts, templates: Sequence[str | None]) -> Iterator[Diagnostic]:
    data = facts.recipe.data
    if data.reasoning is not None and data.formats == {"text"}:
        yield Diagnostic(
            W0451,
            "reasoning has no effect: text has no assistant turns",
            "data.reasoning",
            "remove the line",
            at_key=True,
        )
    elif data.reasoning == "empty" and any(text and "enable_thinking" not in text for text in templates):
        yield Diagnostic(
            E0452,
            "reasoning is empty, but the chat template does not read enable_thinking, the variable that "
            "switches thinking off",
            "data.reasoning",
            "reasoning: drop",
        )


def _invalid(template: str) -> UserError | None:
    """Return why a text is no template in Jinja."""
    from recipec.runtime.data.template import ChatTemplate

    try:
        ChatTemplate(template, {})
    except UserError as error:
        return error
    return None


def _given(folder: Path, template: str) -> str | None:
    """Return the text of data.chat_template; None for a path out of the folder, which other checks report."""
    if is_inline(template):
        return template
    if escapes(template) or leads_out(folder, template):
        return None
    return _read(folder / template, LARGEST_TEMPLATE)


def _read(file: Path, largest: int) -> str:
    if file.stat().st_size > largest:
        raise ValueError(f"it is larger than {largest >> 20} MiB")
    if not file.is_file():
        raise ValueError("it is not a regular file")
    return file.read_text(encoding="utf-8")


def _checkpoint(facts: Facts) -> Path | None:
    """Return the folder of the tokenizer, if it is on this machine."""
    return catalog.folder_of(facts.recipe.model.tokenizer or facts.recipe.model.id, facts.folder)


def _shipped(folder: Path) -> str | None:
    """Return the chat template of a checkpoint, from the file in which transformers looks for it."""
    try:
        return _read(folder / "chat_template.jinja", LARGEST_TEMPLATE)
    except (OSError, ValueError):
        pass
    try:
        template = json.loads(_read(folder / "tokenizer_config.json", LARGEST_TOKENIZER)).get("chat_template")
        if isinstance(template, list):
            template = {item["name"]: item["template"] for item in template}.get("default")
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return None
    return template if isinstance(template, str) else None


def _has_none(folder: Path) -> bool:
    """Return whether a folder has a tokenizer that transformers loads without a chat template."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return False
    if any((folder / name).exists() for name in ("chat_template.jinja", "additional_chat_templates")):
        return False
    try:
        config = json.loads(_read(folder / "tokenizer_config.json", LARGEST_TOKENIZER))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):  # train.py reports this
        return False
    return isinstance(config, dict) and not config.get("chat_template")


E0406 = Code(
    "E0406",
    "chat template of another family",
    cause="The template writes turn markers that the checkpoint was not trained with, such as Gemma "
    "3's `<start_of_turn>` for Gemma 4, which uses `<|turn>`. Markers that are tokens of the "
    "checkpoint's tokenizer are allowed, and a model that is not tuned for chat can learn any "
    "markers.",
    cure="Leave `data.chat_template` out to use the checkpoint's template. If the checkpoint's own "
    "template is wrong, copy the one from the model's repository.",
)

W0406 = Code(
    "W0406",
    "chat template without the family's markers",
    cause="The template does not write the turn markers that the checkpoint was trained with.",
    cure="Leave `data.chat_template` out, unless another markup is intended.",
)


def _markup(facts: Facts, template: str, place: str) -> Iterator[Diagnostic]:
    """Report turn markers that the checkpoint was not trained with; a base model was trained with none."""
    model = facts.model
    if model is None or model.chat is False:
        return
    turn = model.family.markers(model.architecture)
    if not turn:
        return
    foreign = foreign_markers(turn, template)
    markers = [marker for marker in foreign if not _is_token(_checkpoint(facts), marker)]
    from_recipe = place.endswith("chat_template")
    trained = f"{model.title} was trained with {model.family.title}'s `{turn[0]}` ... `{turn[1]}`"
    if markers:
        whose = "the chat template" if from_recipe else "the checkpoint's chat template"
        yield Diagnostic(
            E0406,
            f"{whose} writes {listing(f'`{m}`' for m in markers)}, the turn markup of "
            f"{foreign[markers[0]]}; {trained}",
            place,
            "remove the line to use the checkpoint's own template"
            if from_recipe
            else "copy the template of the model's own repository there, or give it as data.chat_template",
        )
    elif not foreign and not all(marker in template for marker in turn):
        yield Diagnostic(
            W0406,
            f"the chat template does not write `{turn[0]}` ... `{turn[1]}`, the turn markup that "
            f"{model.title} was trained with",
            place,
            "remove the line, unless another markup is intended"
            if from_recipe
            else "copy the template of the model's own repository there, unless another markup is intended",
        )


def _is_token(folder: Path | None, marker: str) -> bool:
    """Return whether a marker is a token of the checkpoint's tokenizer, and so was part of its training."""
    if folder is None:
        return False
    for name in ("tokenizer_config.json", "tokenizer.json"):
        try:
            # Within the text of a template the quotes would be escaped.
            if f'"{marker}"' in _read(folder / name, LARGEST_TOKENIZER):
                return True
        except (OSError, ValueError):
            continue
    return False


W0470 = Code(
    "W0470",
    "end of an answer is several tokens",
    cause="The chat template ends an answer with a text that is no token of the tokenizer. The model "
    "learns to write the text, but transformers, servers and `recipe chat` stop only at single "
    "tokens, so they generate to their limit.",
    cure="Make it one token with model.add_tokens, or use a template that ends an answer with a token "
    "of the tokenizer.",
)


def _end(facts: Facts, template: str, place: str) -> Iterator[Diagnostic]:
    """Report a template that ends an answer with a text of several tokens, at which nothing stops."""
    folder, added = _checkpoint(facts), facts.recipe.model.add_tokens
    if folder is None or not (folder / TOKENIZER).is_file() or missing_packages(("tokenizers",)):
        return
    # They import Jinja, which only a rendered template needs.
    from recipec.runtime.data.masking import after_answer
    from recipec.runtime.data.template import ChatTemplate

    try:
        tokenizer = PlainTokenizer(folder)
        end = after_answer(ChatTemplate(template, tokenizer.special_tokens_map))
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # train.py reports it
    known = tokenizer.added_tokens_decoder
    tokens = tokenizer.backend_tokenizer.encode(end, add_special_tokens=False).ids
    if end and tokens and tokens[-1] not in known and not end.endswith(tuple(added) or ("\0",)):
        yield Diagnostic(
            W0470,
            f"the chat template ends an answer with `{end}`, which is {plural(len(tokens), 'token')} of the "
            "tokenizer: no server and no chat stops there",
            place,
            one_token(end),
        )


def _tuned(model_id: str) -> str:
    """Suggest the checkpoint of the same model that is tuned for chat, if the catalog has it."""
    plain = model_id.removesuffix("-pt").removesuffix("-Base")
    names = (f"{plain}{ending}" for ending in ("-it", "-Instruct", ""))
    known = next((name for name in names if name != model_id and name in catalog.entries()), None)
    return f"model: {{id: {known}}}, or " if known else ""


E0720 = Code(
    "E0720",
    "answers without a label",
    cause="In the format unpaired_preference, `label` says whether the answer is desirable: true or "
    "false, in CSV as text.",
    cure="Name the column with `data.fields`, or make it with a `data.transform`.",
)

W0721 = Code(
    "W0721",
    "answers of only one kind",
    cause="KTO compares desirable answers with undesirable ones. With only one kind the model only "
    "moves toward it, or away from it.",
    cure="Add answers of the other kind, or learn the desirable ones with `objective: sft`.",
)

N0723 = Code(
    "N0723",
    "weights of the two kinds of answers",
    cause="desirable_weight times the desirable answers should be 1 to 4/3 of undesirable_weight "
    "times the others (Ethayarajh et al. 2024, eq. 8; TRL warns as well).",
    cure="Use one of the two weights that the message gives.",
)


def _labels(facts: Facts) -> Iterator[Diagnostic]:
    """Check the labels in the first rows of local files: which answers are desirable."""
    recipe = facts.recipe
    if recipe.data.format != "unpaired_preference":
        return
    counts = [0, 0]
    whole = recipe.data.eval_fraction is None
    for part, sources in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        for index, source in enumerate(sources):
            section = recipe.data.of(source)
            rows = first_at_hand(facts, source.path)[: source.limit] if section.transform is None else []
            whole = whole and 0 < len(rows) < LOOKED_AT
            labels: list[bool | str] = [_label(row, section.fields) for row in rows]
            faults = [label for label in labels if isinstance(label, str)]
            if rows and len(faults) > (recipe.data.max_invalid_ratio if whole else 0.5) * len(rows):
                yield Diagnostic(
                    E0720,
                    f"of {plural(len(rows), 'sample')} of `{source.path}` {len(faults)} do not say whether "
                    f"the answer is desirable: {faults[0]}",
                    f"data.{part}[{index}].path",
                    "label: true or false in each, or data: {fields: {label: COLUMN}}",
                )
                return
            if part == "train":
                counts[0] += labels.count(True)
                counts[1] += labels.count(False)
    train = recipe.train
    if not whole or not any(counts):
        return
    unequal = balance(counts[0], counts[1], (train.desirable_weight, train.undesirable_weight))
    if unequal is not None:
        key = facts.first_given("train.desirable_weight", "train.undesirable_weight", "train.objective")
        code, place = (N0723, key) if all(counts) else (W0721, "data.train")
        yield Diagnostic(code, unequal[0], place, unequal[1])


def _label(row: dict[str, Any], fields: dict[str, str]) -> bool | str:
    """Return whether an answer is desirable, or a text that says why this cannot be determined."""
    try:
        return label_of(row, fields)
    except Malformed as error:
        return str(error)


E0423 = Code(
    "E0423",
    "too many samples contain unused content",
    cause="More than data.max_invalid_ratio of the samples contain something that is not read or that "
    "the chat template does not write: tool calls, tools, reasoning, pictures, a system prompt next "
    "to messages.",
    cure="Use a template that writes it, or remove it with `data.transform`.",
)

E0424 = Code(
    "E0424",
    "preferences with labels (KTO)",
    cause="Rows with a prompt, a completion and a label are KTO data. With `prompt_completion` the "
    "model would also learn the undesirable answers.",
    cure="Write `format: unpaired_preference` with `objective: kto`, or keep only the desirable "
    "answers with a `data.transform`.",
)

W0430 = Code(
    "W0430",
    "some samples contain unused content",
    cause="Some of the local samples contain something that is not read or that the chat template "
    "does not write. `recipe preview` counts all of them.",
    cure="Use a template that writes it, or remove it with `data.transform`.",
)

E0435 = Code(
    "E0435",
    "samples are not of the format",
    cause="More than data.max_invalid_ratio of the samples of a local file, or most of its first "
    "ones, do not match `data.format`. A run would leave them out, or would not start.",
    cure="Use the format or the `data.fields` that the help proposes, or a `data.transform`.",
)


def _rows(facts: Facts, templates: Sequence[str | None]) -> Iterator[Diagnostic]:
    """Report fields in the first rows of local files that the model would not see."""
    data, held_by = facts.recipe.data, iter(templates)
    for part, sources in (("train", data.train), ("eval", data.eval)):
        seen, whole, count = 0, True, 0
        kind = (data.format, data.fields)
        counts = [Counter[str]() for _ in Unread._fields]
        for index, source in enumerate(sources):
            section, template = data.of(source), next(held_by)
            rows = first_at_hand(facts, source.path)[: source.limit] if section.transform is None else []
            whole = whole and 0 < len(rows) < LOOKED_AT
            seen += len(rows)
            labeled = section.format == "prompt_completion" and any(
                _is_labeled(row, section.fields) for row in rows
            )
            if labeled:
                yield Diagnostic(
                    E0424,
                    f"`{source.path}` has prompts, completions and labels, which are data for objective: kto",
                    f"data.{part}[{index}].path",
                    LIKED,
                )
            faults: list[tuple[str, dict[str, Any]]] = []
            for row in rows:
                try:
                    texts = _without_pictures(facts, source.path, row, section.fields)
                    unread = _left(section.format, texts, section.fields, template)
                except Malformed as error:
                    faults.append((str(error), row))
                    continue
                count += bool(unread.parts)
                kind = (section.format, section.fields) if unread.parts else kind
                for counter, names in zip(counts, unread, strict=True):
                    counter.update(names)
            few = 0 < len(rows) < LOOKED_AT
            told = labeled or section.format == "unpaired_preference"  # by another diagnostic
            if not told and _too_many(len(faults), len(rows), data, few):
                reason, row = faults[0]
                alone = len(data.train) + len(data.eval) == 1 and source.format is source.fields is None
                place = "data" if alone else f"data.{part}[{index}]"
                yield Diagnostic(
                    E0435,
                    f"{len(faults)} of {'the' if few else 'the first'} {plural(len(rows), 'sample')} of "
                    f"`{source.path}` {'is' if len(faults) == 1 else 'are'} not of the format "
                    f"{section.format}: {reason}",
                    f"data.{part}[{index}].path",
                    _cure(reason, row, place)
                    or advice(section.format, section.fields, [*map(str, row)], place),
                )
        of = f"{'the' if whole else 'the first'} {plural(seen, 'sample')} of data.{part}"
        yield from _columns(f"data.{part}", of, counts)
        if not count:
            continue
        certain = whole and count > data.max_invalid_ratio * seen
        yield Diagnostic(
            E0423 if certain else W0430,
            f"{count} of {of} {'contains' if count == 1 else 'contain'} something that the model would not "
            f"see: {_counted(counts[0])}",
            f"data.{part}",
            leftover(*kind, counts[0]),
        )


def _cure(reason: str, row: dict[str, Any], place: str) -> str | None:
    """Return the help for a row by the reason why it cannot be used; None for a reason with no help of its
    own.

    Args:
        place: of the section data, or of the row's source.
    """
    if reason.endswith(NOWHERE):
        return asking([*map(str, row)], place)
    if ENDS_WITH_ANSWER in reason:
        return WITHOUT_ANSWER
    if reason.endswith((" is blank", " is null", " is empty")):
        return (
            "leave these rows out with a data.transform that returns None for them, or raise "
            "data.max_invalid_ratio: train.py leaves out so many"
        )
    return None


def _too_many(faults: int, rows: int, data: Data, few: bool) -> bool:
    """Return whether so many samples are malformed that a run would not start: of more rows, most."""
    return bool(rows) and faults > (data.max_invalid_ratio if few else 0.5) * rows


W0433 = Code(
    "W0433",
    "text of the samples is not used",
    cause="Columns of local samples hold text that no role of the format reads, and that the samples "
    "do not repeat elsewhere. The model does not see it. `recipe preview` counts all of them.",
    cure="Name the role of the column with `data.fields`, or return the rows without it from "
    "`data.transform`.",
)

N0434 = Code(
    "N0434",
    "columns read under another name, or not read",
    cause="A well-known column of another name is read in an optional role: `context` as the input of "
    "an instruction, `system_prompt` as its system message, and names such as `cot` as reasoning. "
    "Columns with ids, numbers or categories are not read.",
    cure="Nothing is wrong if the roles are right. `data.fields` names another column for a role.",
)


def _columns(place: str, of: str, counts: Sequence[Counter[str]]) -> Iterator[Diagnostic]:
    """Report columns that no format reads, and those that are read under another name."""
    _, texts, values, taken = counts
    if texts:
        yield Diagnostic(
            W0433,
            f"text that is not used in {of}: {_counted(texts)}",
            place,
            "name its role with data.fields, or return rows without it from data.transform",
        )
    if taken or values:
        read = [f"`{column}` is read as {role}" for column, role in (name.split(" as ") for name in taken)]
        left = [f"{listing(f'`{name}`' for name in values)} {'is' if len(values) == 1 else 'are'} not used"]
        yield Diagnostic(N0434, f"in {of}, {'; '.join([*read, *(left if values else [])])}", place, None)


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} in {number}" for name, number in names.items())


def first_at_hand(facts: Facts, path: str) -> list[dict[str, Any]]:
    """Return the first rows of a local text file, or of a Parquet file that is not large; [] for another."""
    if "://" in path or escapes(path) or not is_known(path, facts.folder) or leads_out(facts.folder, path):
        return []
    file, parquet = facts.folder / path, path.lower().endswith(".parquet")
    if not parquet and not path.lower().removesuffix(".gz").endswith(COMPRESSIBLE):
        return []
    try:
        if parquet and file.stat().st_size > LARGEST_PARQUET:
            return []
        rows = first_rows(file) or []
        return [without_fillers(row) for row in rows] if parquet else rows
    except (OSError, EOFError, ValueError, RecursionError, csv.Error):  # train.py reports this
        return []


def _is_labeled(row: dict[str, Any], fields: dict[str, str]) -> bool:
    named = (fields.get(name, name) for name in ("prompt", "completion"))
    return is_labeled(row) and all(row.get(name) is not None for name in named)


def _without_pictures(facts: Facts, path: str, row: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    """Return a row with marks instead of its pictures, which are looked for but not opened.

    Args:
        path: of the row's file.

    Raises:
        Malformed: a picture is missing, or cannot be used where it is.
    """
    images = facts.recipe.data.images
    if images is None:
        refuse_pictures(row, fields)
        return row
    row, pictures = taken(row, fields, Path(path).name.startswith("metadata."))
    folder = str(Path(path).parent) if images.folder is None else images.folder
    if "://" not in folder:
        folder = os.path.abspath(facts.folder / Path(folder).expanduser())
    for what, value in pictures:
        picture = picture_of(value, what, folder)
        if picture.content is None and "://" not in picture.place and not os.path.isfile(picture.place):
            raise Malformed(f"{what} is missing: {os.path.relpath(picture.place, facts.folder)}")
    return row


def _left(format: str, row: dict[str, Any], fields: dict[str, str], template: str | None) -> Unread:
    """Return the columns of a row that are not read, and fields that the template does not even mention.

    Raises:
        Malformed: the row does not match the format.
    """
    parsed = PARSERS[format]("", row, fields)
    held: list[str] = []
    for answer in (parsed,) if isinstance(parsed, ParsedSample) else parsed.answers():
        if answer.messages is not None and template is not None:
            names = [key for message in answer.messages for key in taught(message)]
            names += ["tools"] if answer.tools else []
            held += [name for name in names if name not in template]
    return together(marked(parsed.unread), Unread(tuple(held)))
