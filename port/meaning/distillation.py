"""The keys of TRL's GKDTrainer (trl.experimental.gkd), and the teacher that its scripts load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, table
from recipec.port.meaning import adapters, datasets, model_names
from recipec.port.refusals import E1142, E1144, E1160

DISTILL = "train.distill"
KWARGS = "teacher_model_init_kwargs"
TEACHER = "teacher_model_name_or_path"
OF_DISTILLATION = table("""
learned seq_kd=false: recipec's teacher writes no answers
exact packing packing_strategy padding_free eval_packing completion_only_loss assistant_only_loss loss_type
    dataset_text_field shuffle_dataset dataset_kwargs: GKDTrainer takes the rows as they are and computes its
    own loss
exact label_smoothing_factor router_aux_loss_coef: GKDTrainer's loss does not have it
""")
OF_TEACHER = table("""
lost quantization_config=null
exact device_map attn_implementation use_cache low_cpu_mem_usage trust_remote_code: where and how the teacher
    is computed, not its predictions
""")
COUNTS = (
    "TRL divides the loss of own answers by the number of tokens of the data's answers, and recipec by "
    "theirs; TRL draws for each micro-batch, and recipec for each step"
)
CUT = "recipec cuts off the end of a longer row, and TRL the beginning"
ROOM = "prompts of TRL's length, and the student's own answers"


def say_rows(keys: Keys, form: str, row: Mapping[str, Any] | None, where: tuple[Keys, str]) -> Says:
    """State the rows of a distillation: conversations, whose last answer carries loss.

    Args:
        form: the format by what a script makes of the rows, or else chat.
        row: the first row, if it is at hand.
        where: the keys, and the key that names the data.
    """
    if form != "chat" or (row is not None and "messages" not in row):
        message = "GKDTrainer's collator reads conversations, from a column `messages`"
        yield where[0].withdraw(where[1])
        help = f"rows such as {datasets.SAMPLES['sft']}"
        yield where[0].refuse(where[1], E1142, message, help)
    yield keys.sets("data.format", "chat")
    yield keys.sets("data.packing", False)
    yield keys.sets("data.loss_on", "last_assistant", "TRL trains on the last answer of a conversation")


def say_length(keys: Keys) -> Says:
    """State the length of rows. TRL's own answers come on top of it; a recipe's are part of it."""
    longest = keys.integer("max_length")
    longest = 1024 if longest is None else longest  # DataCollatorForChatML's own default
    more = (keys.integer("max_new_tokens") or 0) if keys.number("lmbda") else 0
    note = f"{CUT}; {ROOM}" if more else CUT
    sets = {"data.max_length": longest + more, "data.overlong": "truncate"}
    if keys.stands("max_length"):
        yield keys.differs("max_length", sets, note)
    else:
        yield keys.say("max_length", sets, note)
    yield keys.same("truncation_mode", note="GKDTrainer's collator does not read it")


def say_teacher(keys: Keys) -> Says:
    """State the teacher and how it is loaded: as the student in TRL's gkd.py, by its own keys in a script."""
    name = keys.text(TEACHER)
    if not name:
        message = "the run has no teacher, without which GKDTrainer does not start"
        yield keys.refuse(TEACHER, E1144, message, f"--set {TEACHER}=OWNER/NAME")
        return
    named = model_names.resolve(name, keys.source.path.parent)
    teacher: dict[str, Any] = {"id": named.id}
    of_script = keys.source.script is not None
    settings = keys.below(KWARGS) if of_script else keys
    branch = settings.text("revision" if of_script else "model_revision")
    if branch not in (None, "main") and not named.note:
        teacher["revision"] = branch
    notes = [named.note] if named.note else []
    four, eight = settings.flag("load_in_4bit"), settings.flag("load_in_8bit")
    if four or eight:
        kind = settings.text("bnb_4bit_quant_type") or ("fp4" if of_script else "nf4")
        quantization = adapters.quantized(4 if four else 8, kind, settings.flag("use_bnb_nested_quant"))
        teacher["quantization"] = quantization.value
        notes += [f"the teacher: {quantization.note}"] if quantization.note else []
    yield keys.sets(f"{DISTILL}.teacher", teacher)
    yield keys.say(TEACHER, {f"{DISTILL}.teacher": teacher}, "; ".join(notes))
    if not of_script:
        note = "gkd.py replaces it: the teacher is loaded as the student is"
        yield from keys.unused((KWARGS,), note)
        return
    names = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "revision")
    yield from settings.passive(names, f"part of {DISTILL}.teacher")
    computes = keys.ledger.value("model.dtype")
    for key in ("dtype", "torch_dtype"):
        if settings.value(key) in (None, "auto", computes):
            yield settings.same(key, note="model.dtype")
        yield settings.say(key, {}, f"recipec computes the teacher in model.dtype, {computes}")
    yield from settings.follow(OF_TEACHER)
    yield keys.same(KWARGS, note="none")


def _share(keys: Keys, key: str) -> Statements[float]:
    share = keys.number(key) or 0.0
    if not 0 <= share <= 1:
        message = f"`{key}` is {share}, and GKDConfig accepts 0 to 1"
        yield keys.refuse(key, E1160, message, f"{key}: 0.5")
        return 0.5
    return share


def say_divergence(keys: Keys) -> Says:
    """State the divergence, and the share of the student's own answers.

    `temperature` divides only the logits that answers are drawn from: GKDTrainer.compute_loss does not pass
    it to the loss.
    """
    lmbda = yield from _share(keys, "lmbda")
    yield keys.say("beta", {f"{DISTILL}.beta": (yield from _share(keys, "beta"))})
    yield keys.say("lmbda", {f"{DISTILL}.lmbda": lmbda}, COUNTS if lmbda else "")
    if lmbda:
        yield keys.say("max_new_tokens", {f"{DISTILL}.max_completion_length": keys.integer("max_new_tokens")})
        drawn = {f"{DISTILL}.sampling_temperature": keys.number("temperature")}
        yield keys.say("temperature", drawn)
    yield from keys.passive(("max_new_tokens", "temperature"), "without own answers nothing is drawn")
    if lmbda == 1:
        yield keys.same("seq_kd", note="every step trains on the student's own answers")
    yield from keys.follow(OF_DISTILLATION)
