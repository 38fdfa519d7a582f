"""Check the files and the tokenizer of the data, the padding, and which tokens carry loss."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from recipec.compiler import catalog
from recipec.compiler.checks.formats import LOSS_ON, Rows, is_known, rows_of
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.format_keys import ALONE
from recipec.compiler.lowering.references import escapes, is_dataset
from recipec.compiler.lowering.run_length import held_out
from recipec.compiler.lowering.runtime_settings import choosing
from recipec.compiler.lowering.splits import Shared, complement, shared
from recipec.compiler.wording import listing, plural
from recipec.runtime.settings import OF_A_SOURCE
from recipec.runtime.training.objectives import generated
from recipec.runtime.untrusted import ENDLESS, INTO_A_FILE, is_endless
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import join

WASTEFUL = 1024
"""Padded rows of at least this length are warned about if the samples' lengths are unknown."""

USED_WELL = 0.6
"""Above this share of real tokens in padded rows, packing gains hardly anything."""

LANES = 128
"""The width of a TPU's vector registers: XLA pads shorter dimensions to it."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _files(facts)
    yield from _shared(facts)
    yield from _never_drawn(facts)
    yield from _held_out(facts)
    yield from _order(facts)
    yield from _stream(facts)
    yield from _tokenizer(facts)
    yield from _length(facts)
    yield from dict.fromkeys(diagnostic for rows in rows_of(facts) for diagnostic in _everything(rows))


W0408 = Code(
    "W0408",
    "loss on every token",
    cause="With `loss_on: all` the model also learns to write the prompts, and the loss is not "
    "comparable with a run that trains on answers only.",
    cure="Write `loss_on: assistant`, or `completion` if the format has prompts.",
)


def _everything(rows: Rows) -> Iterator[Diagnostic]:
    first, *others = LOSS_ON[rows.data.format]
    if rows.data.loss_on == "all" and "all" in others:
        answers = "the assistant's tokens" if first == "assistant" else "the completions' tokens"
        yield Diagnostic(
            W0408,
            "every token carries loss, including the prompts: the model also learns to write prompts, and "
            f"its loss is not comparable with a run that trains only on {answers}",
            join(rows.at("loss_on")),
            f"loss_on: {first}",
        )


def _files(facts: Facts) -> Iterator[Diagnostic]:
    data = facts.recipe.data
    missing: set[str] = set()
    for part, sources in (("train", data.train), ("eval", data.eval)):
        for index, source in enumerate(sources):
            if source.path not in missing:
                missing.add(source.path)
                yield from _missing(facts, source.path, f"data.{part}[{index}].path")
    if (samples := facts.recipe.train.generations) is not None:
        yield from _missing(facts, samples.prompts, "train.generations.prompts")


W0466 = Code(
    "W0466",
    "rows in two sources of data.train",
    cause="Each source draws its own samples, so an epoch has the common rows twice. Sources that "
    "read the rows in different ways are not compared.",
    cure="Remove the source or change its split. If the rows should count twice, give one source a `weight`.",
)


def _shared(facts: Facts) -> Iterator[Diagnostic]:
    """Report rows that are trained and evaluated on, or that several sources train on."""
    data = facts.recipe.data
    for index, source in enumerate(data.eval):
        for number, other in enumerate(data.train):
            overlap = shared(other, source)
            if overlap is None or data.of(source).transform != data.of(other).transform:
                continue  # two functions may keep different rows
            yield _evaluated(facts, index, number, overlap)
            break
    for index, source in enumerate(data.train):
        for number, other in enumerate(data.train[:index]):
            overlap = shared(other, source)
            ways = [[getattr(data.of(path), name) for name in OF_A_SOURCE] for path in (other, source)]
            if overlap is None or ways[0] != ways[1] or overlap.rows == "unknown":
                continue
            share = "all its rows" if overlap.rows == "all" else "some of its rows"
            probably = "probably " if overlap.revision else ""
            yield Diagnostic(
                W0466,
                f"{share} are {probably}also those of data.train[{number}], so an epoch draws them for each "
                "of the two sources",
                f"data.train[{index}].path",
                "remove one of the two, or give them different splits; weight: 2.0 at one of them draws its "
                "samples twice",
            )
            break


W0409 = Code(
    "W0409",
    "trained and evaluated on the same rows",
    cause="The evaluation loss then says nothing about new samples. `train.early_stopping` and "
    "`checkpoint.keep_best` would choose the step that has learned these rows by heart. "
    "`hf://OWNER/NAME` and `hf://OWNER/NAME@main` are the same data set, and `train[:5%]` is a part "
    "of `train`.",
    cure="Hold out some samples, with `eval_fraction` or with splits that have no row in common.",
)

N0465 = Code(
    "N0465",
    "rows that may be shared",
    cause="Parts of a split in rows and in percent overlap only for some numbers of rows.",
    cure="Give both parts in percent or both in rows. train.py prints how many evaluation samples are "
    "also training samples.",
)


def _evaluated(facts: Facts, index: int, number: int, overlap: Shared) -> Diagnostic:
    """Report a source of data.eval that has rows of a source of data.train."""
    recipe = facts.recipe
    source, other = recipe.data.eval[index], recipe.data.train[number]
    where = f"data.eval[{index}].{'split' if source.split else 'path'}"
    chooses = choosing(recipe)
    trusted = f", and {listing(chooses)} would choose the step that knows them best" if chooses else ""
    rest = None if overlap.revision else complement(source.split)
    apart = f'split: "{rest}" at data.train[{number}]; or ' if rest and other.split in (None, "train") else ""
    help = (
        f"{apart}eval_fraction: 0.05 instead of eval, which holds samples out; or a file with other samples"
    )
    if overlap.rows == "unknown":
        return Diagnostic(
            N0465,
            f"whether `{source.path}` has rows of data.train[{number}] depends on the number of its rows: "
            "train.py and `recipe preview` count them",
            where,
            help,
        )
    split = f", split {source.split}," if source.split != other.split and source.split else ""
    used = f"`{source.path}`{split} is used for training and evaluation"
    if overlap.revision:
        used = f"`{source.path}`{split} is another revision of a data set that is also trained on"
    elif overlap.rows == "some":
        used = f"some rows of `{source.path}`{split} are used for training and evaluation"
    return Diagnostic(
        W0409,
        f"{used}, so the evaluation loss says {'little' if overlap.revision else 'nothing'} about new "
        f"samples{trusted}",
        where,
        help,
    )


W0467 = Code(
    "W0467",
    "source that is never drawn",
    cause="A `weight` below 1 draws that share of a source's samples in each epoch, rounded to whole "
    "samples.",
    cure="Raise the weight, or remove the source.",
)


def _never_drawn(facts: Facts) -> Iterator[Diagnostic]:
    """Report a weight by which no sample of a source is drawn."""
    data, local = facts.recipe.data, facts.length.data
    if local is None or data.temperature is not None or data.stream_window is not None:
        return
    for index, (source, rows) in enumerate(zip(data.train, local.sizes, strict=True)):
        splits = data.of(source).overlong == "split"
        if rows and not splits and not round(source.weight * rows):
            places = 10 ** (len(str(rows)) + 1)
            yield Diagnostic(
                W0467,
                f"{source.weight:g} of the {plural(rows, 'sample')} of `{source.path}` is "
                f"{source.weight * rows:g}, which rounds to none: the source is never drawn",
                f"data.train[{index}].weight",
                f"weight: {math.ceil(places / rows) / places:g}, which draws one sample an epoch; or remove "
                "the source",
            )


W0401 = Code(
    "W0401",
    "data file not found",
    cause="The recipe names a local file that does not exist. The artifact is the same, but warm-up, "
    "steps and padding could not be checked against the data.",
    cure="Put the file there, or name its folder with --data-dir of train.py.",
)

E0425 = Code(
    "E0425",
    "data is not a regular file",
    cause="Reading a pipe waits until a process writes to it, and a device such as /dev/zero has no "
    "end. Data is read more than once: it is counted, hashed and tokenized.",
    cure="Write the output into a file, and name that file.",
)


def _missing(facts: Facts, path: str, where: str) -> Iterator[Diagnostic]:
    """Report what is wrong with a file that should be next to the recipe."""
    if _is_local(facts, path) and is_endless(facts.folder / path):
        yield Diagnostic(E0425, f"`{path}` {ENDLESS}", where, INTO_A_FILE)
    elif _is_local(facts, path) and not os.path.exists(facts.folder / path):
        yield Diagnostic(
            W0401,
            f"the {'folder' if is_dataset(path) else 'file'} `{path}` does not exist next to the recipe",
            where,
            "put it there, or pass the folder that contains it to train.py with --data-dir",
        )


E0420 = Code(
    "E0420",
    "two sources of evaluation data",
    cause="`data.eval` names samples to evaluate on, and `data.eval_fraction` holds out others.",
    cure="Remove one of the two.",
)

W0421 = Code(
    "W0421",
    "eval_seed without effect",
    cause="eval_seed decides which samples `data.eval_fraction` holds out, and no samples are held out.",
    cure="Remove the line, or give `data.eval_fraction`.",
)

E0422 = Code(
    "E0422",
    "no sample left to train on",
    cause="`data.eval_fraction` holds out that share of the samples, rounded up. Here this is all of them.",
    cure="Use a smaller share or more samples.",
)


def _held_out(facts: Facts) -> Iterator[Diagnostic]:
    data = facts.recipe.data
    if data.eval_fraction is None:
        if "eval_seed" in data.model_fields_set:
            yield Diagnostic(
                W0421,
                "eval_seed has no effect: without eval_fraction no samples are held out",
                "data.eval_seed",
                "remove the line, or add eval_fraction: 0.05",
                at_key=True,
            )
        return
    if data.eval:
        yield Diagnostic(
            E0420,
            "data.eval and eval_fraction both give samples to evaluate on",
            "data.eval_fraction",
            "remove the line, or data.eval",
            at_key=True,
        )
    local = facts.length.data
    if local is not None and local.rows and held_out(data.eval_fraction, local.rows) == local.rows:
        yield Diagnostic(
            E0422,
            f"eval_fraction {data.eval_fraction:g} of the {plural(local.rows, 'sample')} of data.train, "
            "rounded up, leaves none to train on",
            "data.eval_fraction",
            "eval_fraction: 0.1" if local.rows > 1 else "remove the line, or give more samples",
        )


E0453 = Code(
    "E0453",
    "curriculum with packed rows",
    cause="Packing fills every row with several samples, so no row is shorter than another.",
    cure="Write `packing: false`.",
)

E0454 = Code(
    "E0454",
    "temperature together with weights",
    cause="`data.temperature` computes the sources' weights from their sizes.",
    cure="Remove `data.temperature`, or every `weight`.",
)

W0455 = Code(
    "W0455",
    "temperature without effect",
    cause="There is only one source, so all its samples are used at any temperature.",
    cure="Remove `data.temperature`.",
)


def _order(facts: Facts) -> Iterator[Diagnostic]:
    data = facts.recipe.data
    if data.curriculum is not None and data.packing:
        yield Diagnostic(
            E0453,
            "curriculum: length sorts rows by length, and packing fills all rows",
            "data.curriculum",
            "packing: false, or remove the line",
        )
    if data.temperature is None:
        return
    for index, source in enumerate(data.train):
        if "weight" in source.model_fields_set:
            yield Diagnostic(
                E0454,
                "temperature weights the sources by their sizes, and this source also has a weight",
                f"data.train[{index}].weight",
                "remove the line, or data.temperature",
                at_key=True,
            )
    if len(data.train) == 1:
        yield Diagnostic(
            W0455,
            "temperature has no effect with a single source",
            "data.temperature",
            "remove the line",
            at_key=True,
        )


E0460 = Code(
    "E0460",
    "epochs of a stream",
    cause="`data.stream_window` reads the training data during the run. The steps of an epoch are "
    "known only at its end, but the learning rate's schedule needs them at the start.",
    cure="Write `train.steps` instead of `train.epochs`. The data is repeated as often as the steps need.",
)

E0461 = Code(
    "E0461",
    "a stream that would have to be counted",
    cause="`data.eval_fraction`, `data.temperature` and `data.curriculum` need the number or the "
    "lengths of all samples. A stream is not read completely before the run.",
    cure="Write `data.eval` with another file and a `weight` at each source, or remove `data.stream_window`.",
)

E0462 = Code(
    "E0462",
    "a part of a split in a stream",
    cause="A split such as train[:10%] needs the number of the split's samples, which a stream does "
    "not have.",
    cure="Name the whole split, and set `limit` to the number of its first samples to use.",
)

N0463 = Code(
    "N0463",
    "a stream of several sources without weights",
    cause="Without a stream every sample of every source is drawn once an epoch. A stream does not "
    "know the sources' sizes: it draws only by the weights, which are 1 by default, and starts a "
    "source again when it ends.",
    cure="Give each source a `weight`, in proportion to the samples to draw from it.",
)


def _stream(facts: Facts) -> Iterator[Diagnostic]:
    data, train = facts.recipe.data, facts.recipe.train
    if data.stream_window is None:
        return
    if train.steps is None:
        yield Diagnostic(
            E0460,
            "a stream's end is not known, so its epochs cannot be counted",
            "train.epochs",
            "steps: 1000 in place of epochs, or remove data.stream_window",
            at_key=True,
        )
    whole = {
        "eval_fraction": "holds out a share of all samples, which needs their number",
        "temperature": "draws by the numbers of the sources' samples, which have to be counted",
        "curriculum": "puts all samples of an epoch into order",
    }
    instead = {"eval_fraction": "eval: [FILE]", "temperature": "a weight for each source"}
    for name in (name for name in whole if getattr(data, name) is not None):
        yield Diagnostic(
            E0461,
            f"{name} {whole[name]}, but data.stream_window reads them during the run",
            f"data.{name}",
            f"{instead[name]} instead" if name in instead else "remove the line, or stream_window",
            at_key=True,
        )
    for index, source in enumerate(data.train):
        if source.split is not None and not source.split.replace("_", "").replace("-", "").isalnum():
            yield Diagnostic(
                E0462,
                f"`{source.split}`, a part of a split, needs the split's number of rows, which a stream "
                "does not have",
                f"data.train[{index}].split",
                "the whole split's name, with its rows limited by limit",
            )
    if len(data.train) > 1 and not any("weight" in source.model_fields_set for source in data.train):
        yield Diagnostic(
            N0463,
            f"the stream draws equally often from each of the {len(data.train)} sources, whatever their "
            "numbers of samples",
            "data.stream_window",
            "weight: 2.0 at a source draws twice as many of it",
        )


def _is_local(facts: Facts, path: str) -> bool:
    return "://" not in path and not escapes(path) and is_known(path, facts.folder)


E0403 = Code(
    "E0403",
    "tokenizer of another family",
    cause="The token ids of this tokenizer stand for other text than the checkpoint was trained on. "
    "No error occurs: the run trains on noise, or relearns the vocabulary.",
    cure="Leave `model.tokenizer` out.",
)

W0404 = Code(
    "W0404",
    "tokenizer is not in the catalog",
    cause="The compiler cannot tell whether this tokenizer fits the checkpoint.",
    cure="Leave `model.tokenizer` out, unless it was made for this checkpoint.",
)


def _tokenizer(facts: Facts) -> Iterator[Diagnostic]:
    tokenizer, model = facts.recipe.model.tokenizer, facts.model
    if tokenizer is None or model is None or tokenizer == model.id:
        return
    named = catalog.known(tokenizer, facts.folder)
    if named is not None and named.family.name != model.family.name:
        yield Diagnostic(
            E0403,
            f"`{tokenizer}` is a tokenizer of {named.family.title}, and {model.title} was trained with "
            f"{model.family.title}'s: the token ids stand for different text",
            "model.tokenizer",
            "remove the line to use the model's own tokenizer",
        )
    elif named is None and not catalog.is_directory(tokenizer):
        yield Diagnostic(
            W0404,
            f"`{tokenizer}` is not in the catalog: the compiler cannot tell whether it fits {model.title}",
            "model.tokenizer",
            "remove the line, unless the tokenizer was made for this checkpoint",
        )


W0407 = Code(
    "W0407",
    "padded rows",
    cause="Without packing, each sample is padded to max_length, and the padding is computed too.",
    cure="Write `packing: true`, or use a smaller max_length.",
)

N0411 = Code(
    "N0411",
    "length is not a multiple of 128",
    cause="A TPU pads the last dimension to a multiple of 128, so the next multiple costs the same.",
    cure="Use the multiple that the message gives.",
)


def _length(facts: Facts) -> Iterator[Diagnostic]:
    data = facts.recipe.data
    tpu = facts.accelerator is not None and facts.accelerator.platform == "tpu"
    up = -(-data.max_length // LANES) * LANES
    within = facts.positions is None or up <= facts.positions
    if tpu and within and up != data.max_length and facts.recipe.model.attention == "dot":
        yield Diagnostic(
            N0411,
            f"max_length {data.max_length} is not a multiple of {LANES}, the width of the TPU's registers: "
            f"{up} costs the same",
            "data.max_length",
            f"max_length: {up}",
        )
    if data.packing or data.format in ALONE:
        return
    local = facts.length.data
    padded = f"every sample is padded to max_length {data.max_length:,} and computed at that length"
    shorter = "a smaller max_length"
    # Packing is refused with both.
    alone = data.curriculum is not None or generated(facts.recipe.train, data.max_length) is not None
    if any(rows.data.overlong == "split" for rows in rows_of(facts)):
        return  # texts of several rows fill all of them but the last
    if local is not None and local.mean_tokens:
        share = local.mean_tokens / data.max_length
        if share < USED_WELL:
            yield Diagnostic(
                W0407,
                f"{padded}; the samples of data.train have {local.lengths()}, "
                f"so about {1 - share:.0%} of the work is padding",
                "data.packing",
                shorter if alone else f"packing: true, or {shorter}",
            )
    elif data.max_length >= WASTEFUL:
        help = shorter if alone else "packing: true puts several samples into one row"
        yield Diagnostic(W0407, padded, "data.packing", help)
