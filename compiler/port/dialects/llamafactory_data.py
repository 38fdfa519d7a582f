"""LLaMA-Factory's data: which sets, their template, lengths, packing, masks, evaluation."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from compiler.catalog import Model
from compiler.port.dialects import llamafactory_sets as sets_
from compiler.port.dialects.llamafactory_sets import DataSet
from compiler.port.keys import Keys, keeps
from compiler.port.meaning import conversion, datasets, templates

CUT = "the end of a long sample is cut off here; there its questions and answers are shortened in proportion"
MIXED = "samples of a row do not attend to each other here, as with neat_packing"
BLOCKS = "texts are not cut into blocks that go on in the next row: the end of a long one is cut off"
PIECES = "each turn is tokenised with what is around it: other tokens where an answer begins with white space"
TURN_ENDS = "the end of a turn is learnt with its answer, not as the first token of the next question"


def port(keys: Keys, model: Model | None, stage: str) -> None:
    """The keys of `data`.

    Args:
        stage: "sft", "dpo" or "pt".
    """
    chosen = _chosen(keys, "dataset", "data.train", stage)
    others = _chosen(keys, "eval_dataset", "data.eval", stage)
    _form(keys, [*chosen, *others], stage)
    _mixing(keys, chosen)
    for name in ("dataset", "eval_dataset", "dataset_dir", "max_samples"):
        keys.same(name)
    _template(keys, model, stage)
    _lengths(keys, stage)
    _masks(keys, stage)
    _evaluation(keys, bool(others))


def _names(keys: Keys, key: str) -> list[str]:
    given = keys.texts(key)
    found = given.split(",") if isinstance(given, str) else given or []
    return [name.strip() for name in found if name.strip()]


def _chosen(keys: Keys, key: str, path: str, stage: str) -> list[DataSet]:
    """The data sets of one list."""
    names = _names(keys, key)
    if not names:
        if key == "dataset":
            keys.refuse(
                key, "E1143", "the file names no data set", "dataset: my_data, and its dataset_info.json"
            )
        return []
    info, folder = _info(keys)
    online = keys.value("dataset_dir") == "ONLINE"
    limit = keys.integer("max_samples")
    out = []
    for name in names:
        if online:
            out.append(DataSet(datasets.source(f"hf://{name}", None, None, limit), "chat", {}, _plain()))
        elif info is None or not isinstance(info.source.get(f"{info.prefix}{name}"), dict):
            _missing(keys, key, name, info)
        else:
            out.append(sets_.read(info.below(name), name, folder, limit, stage))
    _unused(keys, info, {*_names(keys, "dataset"), *_names(keys, "eval_dataset")})
    made = [found.source for found in out if found.source is not None]
    if made:
        keys.said.discard(key)
        keys.say(key, {path: made})
        if limit:
            keys.same("max_samples", {path: made}, f"the first {limit} rows of each source")
    return out


def _plain() -> str:
    return conversion.alpaca(conversion.Alpaca(), False)


def _info(keys: Keys) -> tuple[Keys | None, str]:
    """dataset_info.json, and the folder that its files are in."""
    folder = keys.value("dataset_dir")
    if isinstance(folder, dict):
        return keys.below("dataset_dir"), ""
    file = keys.ledger.sources.others.get("dataset_info")
    if file is None:
        return None, str(folder)
    cached = keys.sections.setdefault("\0dataset_info", Keys(keys.ledger, file, "LLaMA-Factory"))
    return cached, str(folder)


def _entries(info: Keys) -> dict[str, Any]:
    """The entries of dataset_info.json, by the data sets' names."""
    data = info.source.get(info.prefix.rstrip("."))
    return data if isinstance(data, dict) else {}


def _missing(keys: Keys, key: str, name: str, info: Keys | None) -> None:
    if info is None:
        message = f"`{name}` stands in LLaMA-Factory's dataset_info.json, which is not among the files"
        file = keys.source.path.name
        keys.refuse(
            key, "E1151", message, f"recipe port {file} {keys.value('dataset_dir')}/dataset_info.json"
        )
        return
    close = get_close_matches(name, list(_entries(info)), n=1)
    help = f"did you mean `{close[0]}`?" if close else f"add `{name}` to {info.source.file}"
    keys.refuse(key, "E1151", f"`{name}` is not in {info.source.file}", help)


def _unused(keys: Keys, info: Keys | None, used: set[str]) -> None:
    if info:
        info.unused([name for name in _entries(info) if name not in used], "not a data set of this run")


def _form(keys: Keys, found: list[DataSet], stage: str) -> None:
    if not found:
        return
    found = sets_.joined(found)
    first, chosen = found[0], _names(keys, "dataset")
    for other in found:
        if other.form != first.form:
            keys.said.discard("dataset")
            message = "the data sets' rows are of different forms, and a recipe has one form"
            alike = [name for name, each in zip(chosen, found, strict=False) if each.form == first.form]
            keys.refuse("dataset", "E1142", message, keeps("dataset", ",".join(alike)))
            return
        if other.ranking is not (stage == "dpo") and stage != "pt":
            keys.said.discard("dataset")
            message = f"a data set with{'out' if stage == 'dpo' else ''} ranking is not for the stage {stage}"
            keys.refuse("dataset", "E1142", message, "stage: dpo for preferences, stage: sft for the others")
            return
    keys.ledger.set("data.format", first.format, first.note)
    if first.fields:
        keys.ledger.set("data.fields", dict(first.fields))
    if first.transform:
        keys.ledger.files[conversion.FILE] = first.transform
        why = "LLaMA-Factory's own way of joining columns"
        keys.ledger.set("data.transform", f"{conversion.FILE}:{conversion.FUNCTION}", why)


def _mixing(keys: Keys, found: list[DataSet]) -> None:
    strategy = keys.text("mix_strategy") or "concat"
    if strategy == "concat" or len(found) < 2:
        keys.same("mix_strategy")
        keys.passive(("interleave_probs",), "the data sets are put one after another")
        return
    given = keys.value("interleave_probs")
    shares = str(given).split(",") if isinstance(given, str) else given or []
    made: list[Any] = [found_.source for found_ in found]
    try:
        weights = [float(share) for share in shares]
        made = [
            {**(entry if isinstance(entry, dict) else {"path": entry}), "weight": weight}
            for entry, weight in zip(made, weights, strict=True)
        ]
    except (TypeError, ValueError):
        pass
    keys.say(
        "mix_strategy", {"data.train": made}, "drawn by weights here, until each source has been gone through"
    )
    keys.same("interleave_probs", {"data.train": made})


def _template(keys: Keys, model: Model | None, stage: str) -> None:
    name, system = keys.text("template"), keys.text("default_system")
    thinking = keys.flag("enable_thinking")
    if stage == "pt":
        keys.passive(
            ("template", "default_system", "enable_thinking", "preserve_thinking"), "texts have no template"
        )
        return
    found = templates.llamafactory(name, model, thinking, system)
    if not found.known:
        known = ", ".join(templates.LLAMAFACTORY)
        message = f"the template `{name}` is not known here"
        keys.refuse("template", "E1147", message, f"the templates that are: {known}")
    elif keys.given("template"):
        notes = [found.note, PIECES, TURN_ENDS if name == "gemma2" else ""]
        keys.say("template", found.sets, "; ".join(note for note in notes if note))
    else:
        keys.default("template", None, {}, "LLaMA-Factory's default: the tokenizer's own template")
    written = found.sets if keys.given("template") else None
    keys.same("default_system", written if keys.given("default_system") else None)
    keys.same("enable_thinking", written if keys.given("enable_thinking") else None)
    keys.unless(
        "preserve_thinking", (False,), "with mask_history thoughts of earlier turns stay in any case here"
    )


def _lengths(keys: Keys, stage: str) -> None:
    length = keys.integer("cutoff_len") or 2048
    asked = keys.flag("neat_packing") or keys.flag("packing")
    packs = asked or (stage == "pt" and keys.value("packing") is None)
    # Only a packing that the file asks for takes a token off: the stage pt packs after that is done.
    sets = {"data.max_length": length - 1 if asked else length}
    if keys.given("cutoff_len"):
        keys.same("cutoff_len", sets, "one less, as LLaMA-Factory takes it when it packs" if asked else "")
    else:
        keys.default("cutoff_len", length, sets)
    keys.ledger.set("data.overlong", "truncate", BLOCKS if stage == "pt" else CUT)
    keys.ledger.defaulted("truncation", "in proportion", {"data.overlong": "truncate"}, CUT)
    sets = {"data.packing": packs}
    if keys.flag("neat_packing"):
        keys.say("neat_packing", sets, "other samples share a row: rows are filled in another order")
        keys.same("packing", note="neat_packing holds")
    elif packs:
        keys.same("neat_packing", note="off")
        keys.say("packing", sets, BLOCKS if stage == "pt" else MIXED)
    else:
        keys.same("neat_packing", note="off")
        keys.say("packing", sets)
    if "data.packing" not in keys.ledger.lines:
        keys.default("packing", packs, sets)


def _masks(keys: Keys, stage: str) -> None:
    whole, last = keys.flag("train_on_prompt"), keys.flag("mask_history")
    if stage == "dpo":
        keys.passive(("train_on_prompt", "mask_history"), "of preferences the answers are compared")
        return
    if whole and last:
        message = "`mask_history` and `train_on_prompt` exclude each other in LLaMA-Factory"
        keys.refuse("mask_history", "E1145", message, "keep one of them")
    loss = "all" if whole or stage == "pt" else "last_assistant" if last else "assistant"
    keys.say("train_on_prompt", {"data.loss_on": loss})
    keys.same("mask_history", {"data.loss_on": loss} if last else None)


def _evaluation(keys: Keys, others: bool) -> None:
    size = keys.number("val_size") or 0.0
    seed = keys.integer("seed") or 0
    if size and others:
        message = "`val_size` and `eval_dataset` exclude each other in LLaMA-Factory"
        keys.refuse("val_size", "E1145", message, "keep one of them")
    made = datasets.evaluation(size)
    if made:
        keys.say("val_size", {**made, "data.eval_seed": seed})
    elif size >= 1:
        note = "a number of rows cannot be held out: nothing is; data.eval_fraction takes a share, 0.05 say"
        keys.unless("val_size", (0, 0.0), note)
    else:
        keys.same("val_size", note="nothing is held out")
