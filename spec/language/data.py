"""The `data` section: which samples, and which of their tokens are learned."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema, PydanticKnownError

from recipec.spec.core_schema import flow
from recipec.spec.language.images import Images
from recipec.spec.language.section import E0104, E0109, Section, distinct, fault, field

Format = Literal[
    "chat", "instruction", "prompt_completion", "text", "preference", "unpaired_preference", "prompt"
]

FORMATS = {
    "chat": "messages with role and content, or conversations with from and value; optionally tools.",
    "instruction": "instruction, input and output.",
    "prompt_completion": "prompt and completion.",
    "text": "text, all of which is learned.",
    "preference": "prompt, chosen and rejected, for dpo, cpo and orpo.",
    "unpaired_preference": "prompt, completion and label (whether it is desirable), for kto.",
    "prompt": "messages, or prompt (messages, or a text that is tokenized without changes), and the columns "
    "that rewards read, for grpo.",
}

Targets = Literal["assistant", "last_assistant", "completion", "all"]

TARGETS = {
    "assistant": "Every assistant turn.",
    "last_assistant": "Only the last assistant turn.",
    "completion": "The completion.",
    "all": "Every token, including the prompt.",
}

ROLES = {
    "system": "The system message.",
    "user": "Messages of the user.",
    "assistant": "Messages of the assistant, including tool calls.",
    "tool": "Results of tools.",
}


def _loss_on(value: Any) -> Any:
    if not isinstance(value, list):
        if value not in get_args(Targets):
            raise PydanticKnownError("literal_error", {"expected": ", ".join(get_args(Targets))})
        return value
    form = "loss_on: [assistant, tool], or loss_on: assistant"
    if not value:
        raise fault(E0109, "`loss_on` lists no role", form)
    for index, role in enumerate(value):
        if not isinstance(role, str) or role not in ROLES:
            *most, last = ROLES
            message = f"a role must be {', '.join(most)} or {last}, not `{flow(role)}`"
            raise fault(E0104, message, form, at=f"[{index}]")
    return distinct(value)


LossOn = Annotated[
    Targets | list[str],
    BeforeValidator(_loss_on),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(get_args(Targets))},
                {
                    "type": "array",
                    "items": {
                        "type": "string",
                        "enum": list(ROLES),
                        "enumDescriptions": list(ROLES.values()),
                    },
                    "minItems": 1,
                    "uniqueItems": True,
                },
            ]
        }
    ),
]

TRANSFORM = r"^[^:\s][^:]*\.py:[A-Za-z_][A-Za-z0-9_]*$"

OWN = "null uses the value of data."

Overlong = Literal["drop", "truncate", "error", "split"]

OVERLONG = {
    "drop": "Leave it out.",
    "truncate": "Cut its end off.",
    "error": "Stop the run.",
    "split": "For text: make samples of max_length tokens of it, and one of the rest.",
}


class Source(Section):
    """One source of samples. Plain text is short for its path."""

    path: str = field(
        "A file or the folder of a data set, relative to the recipe's folder; a gs:// address; or "
        "hf://OWNER/NAME for a data set of the Hugging Face hub. The ending gives the kind: .jsonl, .json or "
        ".csv, also with .gz or .zst; .parquet; .arrow; .array_record.",
        min_length=1,
        example="data/train.jsonl",
    )
    weight: float = field(
        "How often its samples are drawn, relative to the other sources.",
        1.0,
        unit="none (a ratio)",
        gt=0,
        allow_inf_nan=False,
    )
    split: str | None = field(
        "Split of a Hugging Face data set, or a part of one; null uses train.",
        None,
        min_length=1,
        example="train[:10%]",
    )
    config: str | None = field(
        "Configuration (subset) of a Hugging Face data set; null uses its default.",
        None,
        min_length=1,
        example="default",
    )
    limit: int | None = field(
        "Number of samples to use from the start of the source; null uses all.",
        None,
        unit="samples",
        ge=1,
        example=1000,
    )
    format: Format | None = field(
        f"What a sample of this source contains; {OWN} Preferences cannot be mixed with other formats.",
        None,
        example="text",
        choices=FORMATS,
    )
    fields: dict[str, str] | None = field(
        f"Renames this source's columns; {OWN}", None, example={"messages": "conversation"}
    )
    transform: str | None = field(
        f"A Python function for the samples of this source, as file.py:function; {OWN}",
        None,
        pattern=TRANSFORM,
        form="file.py:function",
        example="prepare.py:clean",
    )
    chat_template: str | None = field(
        f"A chat template of its own, as data.chat_template; {OWN} The server renders with data's.",
        None,
        min_length=1,
        example="other.jinja",
    )
    loss_on: LossOn | None = field(
        "Tokens of this source that carry loss; null uses the value of data, or the format's default if data "
        "gives none.",
        None,
        example="assistant",
        choices=TARGETS,
    )
    overlong: Overlong | None = field(
        f"What to do with a sample of this source that is longer than max_length; {OWN}",
        None,
        example="split",
        choices=OVERLONG,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        json_schema = handler(schema)
        mapping = handler.resolve_ref_schema(json_schema)
        whole = {**mapping, "title": "Source"}
        mapping.clear()
        mapping.update({"anyOf": [{"type": "string", "minLength": 1}, whole]})
        return json_schema

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


def _loss_of_format(values: dict[str, Any]) -> str:
    return {"chat": "assistant", "text": "all"}.get(str(values.get("format", "chat")), "completion")


def _packs(values: dict[str, Any]) -> bool:
    return values.get("format") not in ("preference", "unpaired_preference", "prompt")


class Data(Section):
    """Samples, and how they become rows of tokens."""

    train: list[Source] = field("Sources to train on.", min_length=1, example=[{"path": "data/train.jsonl"}])
    eval: list[Source] = field(
        "Sources to evaluate on; without them and without eval_fraction, the run does not evaluate.",
        [],
        example=["data/eval.jsonl"],
    )
    eval_fraction: float | None = field(
        "Share of the training samples to hold out for evaluation: those that datasets' "
        "train_test_split(test_size=eval_fraction, seed=eval_seed) selects from all sources together. "
        "shuffle_seed orders the others. null holds none out.",
        None,
        unit="share of the samples",
        gt=0,
        lt=1,
        example=0.05,
    )
    eval_seed: int = field(
        "Seed of the selection for eval_fraction.", 42, unit="none (a seed)", ge=0, le=2**32 - 1
    )
    format: Format = field(
        "What a sample contains.",
        "chat",
        choices=FORMATS,
    )
    fields: dict[str, str] = field(
        "Renames columns: maps the format's name of a column to its name in the source.",
        {},
        example={"messages": "conversation"},
    )
    transform: str | None = field(
        "A Python function that turns a sample into a sample or None, as file.py:function, relative to the "
        "recipe's folder. The file is copied into the artifact.",
        None,
        pattern=TRANSFORM,
        form="file.py:function",
        example="prepare.py:clean",
    )
    chat_template: str | None = field(
        "A Jinja chat template: a file relative to the recipe's folder, or the template itself; null uses "
        "the tokenizer's.",
        None,
        min_length=1,
        example="template.jinja",
    )
    loss_on: LossOn = field(
        "Tokens that carry loss: one of these words, or the turns of the listed roles, such as "
        "[assistant, tool].",
        default_is="assistant for chat, all for text, completion for the other formats",
        default_factory=_loss_of_format,
        example="assistant",
        choices=TARGETS,
    )
    reasoning: Literal["keep", "drop", "empty"] | None = field(
        "What to do with the assistant's reasoning in reasoning_content, reasoning, thinking or <think>; "
        "null leaves this to the template, which may drop it from earlier turns.",
        None,
        example="drop",
        choices={
            "keep": "Keep it in each learned turn; samples are left out if the template does not write it.",
            "drop": "Remove it before the template is applied.",
            "empty": "As drop, and the last turn follows the prompt that switches thinking off.",
        },
    )
    special_tokens: Literal["control", "text"] = field(
        "How the texts of control tokens, such as <|im_end|>, are tokenized if they stand in the data. The "
        "control tokens that the chat template writes are always control tokens.",
        "control",
        example="text",
        choices={
            "control": "As control tokens, as a server does. Preview and train.py count such samples.",
            "text": "As ordinary text, in messages of every role, tools and plain text.",
        },
    )
    images: Images | None = field(
        "Pictures in the samples, for models that read pictures: `{}` uses the checkpoint's own settings. "
        "null has none, and a sample with a picture is malformed.",
        None,
        example={"longest_side": 1024},
    )
    max_length: int = field(
        "Length of a row, by default at most the model's positions; overlong sets what to do with longer "
        "samples. With grpo it is max_prompt_length + max_completion_length.",
        4096,
        unit="tokens",
        ge=8,
        le=2**20,
    )
    overlong: Overlong = field(
        "What to do with a sample longer than max_length: leave it out, cut its end off, stop, or, for text, "
        "split it into samples.",
        "drop",
        choices=OVERLONG,
    )
    max_invalid_ratio: float = field(
        "Largest share of a split's samples that may be malformed or without clear targets; more is an "
        "error.",
        0.1,
        unit="share of the samples",
        ge=0,
        le=1,
    )
    packing: bool = field(
        "Put several samples into one row, each attending only to itself; false puts one padded sample into "
        "each row.",
        default_is="true, or false for preferences and prompts",
        default_factory=_packs,
        example=True,
    )
    shuffle_seed: int | None = field(
        "Seed of the order of samples, which changes every epoch; null keeps the order of the sources.",
        0,
        unit="none (a seed)",
        ge=0,
        le=2**32 - 1,
    )

    temperature: float | None = field(
        "An epoch draws from each source of train in proportion to its number of samples to the power of "
        "1 / temperature, and as many samples in total as the sources have. 1 draws each sample once, and "
        "higher values draw more from small sources. null draws by the weights of the sources.",
        None,
        unit="none",
        gt=0,
        allow_inf_nan=False,
        example=3.0,
    )
    curriculum: Literal["length"] | None = field(
        "The order of an epoch's rows; null uses the order of shuffle_seed.",
        None,
        example="length",
        choices={"length": "The shortest rows first; shuffle_seed orders rows of equal length."},
    )
    stream_window: int | None = field(
        "Streams train: during the run, this many samples at a time are read, tokenized, shuffled and "
        "packed, drawn from the sources by their weights; for data larger than the memory or the disk. It "
        "needs train.steps. null reads all samples first, and shuffles and packs them together.",
        None,
        unit="samples",
        ge=1,
        example=10000,
    )

    def of(self, source: Source) -> Data:
        """Return the section as it applies to one of its sources."""
        names = ("format", "fields", "transform", "chat_template", "loss_on", "overlong")
        of_source = {name: value for name in names if (value := getattr(source, name)) is not None}
        if "loss_on" not in of_source and "loss_on" not in self.model_fields_set:
            of_source["loss_on"] = _loss_of_format({"format": of_source.get("format", self.format)})
        return self.model_copy(update=of_source)

    @property
    def formats(self) -> set[str]:
        """The formats of all its sources."""
        return {source.format or self.format for source in (*self.train, *self.eval)}

    @property
    def transforms(self) -> dict[str, str]:
        """The functions that transform rows, by the place that first names each."""
        return self._named("transform")

    def _named(self, key: str) -> dict[str, str]:
        named = {f"data.{key}": getattr(self, key)}
        for part, sources in (("train", self.train), ("eval", self.eval)):
            named |= {f"data.{part}[{i}].{key}": getattr(source, key) for i, source in enumerate(sources)}
        first: dict[str, str] = {}
        for place, value in named.items():
            if value is not None and value not in first.values():
                first[place] = value
        return first

    @property
    def templates(self) -> dict[str, str]:
        """The chat templates, by the place that first names each."""
        return self._named("chat_template")

    @property
    def evaluates(self) -> bool:
        """Whether there is data to evaluate on."""
        return bool(self.eval) or self.eval_fraction is not None
