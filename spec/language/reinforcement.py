"""The sections of reinforcement learning: `train.grpo`, `rewards`, `reward_limits` and `rollout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from recipec.spec.language.data import TRANSFORM
from recipec.spec.language.mesh import Axes
from recipec.spec.language.section import E0107, E0110, LARGEST, Problem, Section, distinct, field


class Grpo(Section):
    """Group relative policy optimization, with TRL's names, formulas and defaults."""

    num_generations: int = field(
        "Number of completions of each prompt: a group. An advantage is a reward compared with the others of "
        "its group.",
        8,
        unit="completions",
        ge=2,
        le=10**4,
    )
    iterations: int = field(
        "Number of optimizer steps on the same completions, before the next ones are generated.",
        1,
        unit="optimizer steps",
        ge=1,
        le=10**4,
    )
    loss: Literal["grpo", "bnpo", "dapo", "dr_grpo", "luspo", "gspo", "cispo", "rloo"] = field(
        "How the losses of tokens are computed and added up.",
        "dapo",
        choices={
            "grpo": "The mean of a completion's tokens, then the mean of the completions.",
            "bnpo": "As dapo. TRL averages over the tokens of each micro-batch instead.",
            "dapo": "The mean of all tokens of the step.",
            "dr_grpo": "The sum of all tokens, divided by the completions times max_completion_length.",
            "luspo": "The sum of a completion's tokens, then the mean of the completions, with the ratio of "
            "a sequence.",
            "gspo": "As grpo, with the ratio of a sequence.",
            "cispo": "As dapo. The ratio is a weight without a gradient, of at most epsilon_high.",
            "rloo": "As grpo, with the ratio of the whole completion. Advantages compare with the mean of "
            "the group's other rewards.",
        },
    )
    ratio: Literal["token", "sequence", "sequence_product"] | None = field(
        "What is compared with the policy that generated it; null uses the loss's own.",
        None,
        example="sequence",
        choices={
            "token": "The probability of each token.",
            "sequence": "The geometric mean over a completion's tokens.",
            "sequence_product": "The probability of the whole completion.",
        },
    )
    beta: float = field(
        "Weight of the KL divergence from the model before training; 0 needs no reference. rloo subtracts it "
        "from the reward, summed over the completion, as TRL does; the other losses add it to the loss.",
        0.0,
        unit="none (a factor)",
        ge=0,
        allow_inf_nan=False,
        example=0.04,
    )
    kl: Literal["k3", "k1"] = field(
        "The estimate of the KL divergence.",
        "k3",
        choices={
            "k3": "Never negative: exp(d) - d - 1, where d is the reference's log-probability minus the "
            "model's.",
            "k1": "The difference of the log-probabilities. Its gradient has the expectation 0 without "
            "kl_bias_correction.",
        },
    )
    kl_bias_correction: bool = field(
        "Multiply the estimate by the ratio, so that its gradient is that of the divergence.", True
    )
    epsilon: float = field(
        "The ratio is clipped at 1 - epsilon.",
        0.2,
        unit="none (a ratio)",
        ge=0,
        allow_inf_nan=False,
    )
    epsilon_high: float | None = field(
        "The ratio is clipped at 1 + epsilon_high; for cispo it is the largest ratio itself. null uses "
        "epsilon.",
        None,
        unit="none (a ratio)",
        gt=0,
        allow_inf_nan=False,
        example=0.28,
    )
    scale_rewards: Literal["group", "batch", "none"] = field(
        "What divides the advantages.",
        "group",
        choices={
            "group": "The standard deviation of the group's rewards.",
            "batch": "The standard deviation of all rewards of the step.",
            "none": "Nothing.",
        },
    )
    mask_truncated: bool = field(
        "Do not train on completions that reach max_completion_length without an end. Their rewards still "
        "count in their groups.",
        False,
    )
    overlong_penalty: int | None = field(
        "Number of tokens before max_completion_length within which a penalty on the reward falls from 0 to "
        "-1; null has none.",
        None,
        unit="tokens",
        ge=1,
        le=LARGEST,
        example=128,
    )
    dynamic_sampling: int = field(
        "Largest number of times that a step replaces groups whose rewards are all the same by groups of the "
        "next prompts; 0 keeps them.",
        0,
        unit="rounds",
        ge=0,
        le=1000,
        example=3,
    )
    num_generations_eval: int | None = field(
        "Number of completions of each prompt of data.eval, drawn as in training; null generates one, "
        "greedily.",
        None,
        unit="completions",
        ge=1,
        le=10**4,
        example=4,
    )
    max_prompt_length: int = field(
        "Longest prompt, with the chat template. data.overlong sets what to do with longer ones.",
        512,
        unit="tokens",
        ge=1,
        le=2**20,
    )
    max_completion_length: int = field(
        "Longest completion, with its end token.", 512, unit="tokens", ge=1, le=2**20
    )
    temperature: float = field(
        "Divisor of the logits, in the rollout and in the loss.",
        1.0,
        unit="none (a divisor)",
        gt=0,
        allow_inf_nan=False,
    )
    top_p: float = field(
        "Draw from the likeliest tokens whose probabilities add up to this; 1 draws from all.",
        1.0,
        unit="probability",
        gt=0,
        le=1,
    )
    top_k: int = field(
        "Draw from this number of likeliest tokens; 0 draws from all.", 0, unit="tokens", ge=0, le=LARGEST
    )
    min_p: float = field(
        "Draw from the tokens with at least this share of the likeliest one's probability; 0 draws from all.",
        0.0,
        unit="share of a probability",
        ge=0,
        le=1,
    )
    stop: Annotated[list[str], AfterValidator(distinct)] = field(
        "More texts that end a completion, each a single token, in addition to the ends that the chat "
        "template and generation_config.json have.",
        [],
        example=["</answer>"],
    )


COLUMN = "The column with the answer to compare with."


class ExactMatch(Section):
    """1 if the completion is the answer, apart from white space at both ends."""

    column: str = field(COLUMN, min_length=1, example="answer")
    ignore_case: bool = field("Upper and lower case are equal.", False)


class NumericMatch(Section):
    """1 if the last number of the completion is the answer's last number. After ####, as in GSM8K, the first
    number counts."""

    column: str = field(COLUMN, min_length=1, example="answer")
    tolerance: float = field(
        "Largest difference between equal numbers: relative to the answer if that is above 1.",
        1.0e-6,
        unit="none",
        ge=0,
        allow_inf_nan=False,
    )


class BoxedAnswer(Section):
    r"""1 if the last \boxed{...} of the completion has the answer, as in MATH: as numbers, or as texts
    without spacing."""

    column: str = field(
        r"The column with the answer, or with a solution that has it in \boxed{...}.",
        min_length=1,
        example="answer",
    )


class FormatMatch(Section):
    """1 if a regular expression matches the whole completion."""

    pattern: str = field(
        "The expression, in Python's syntax. A dot also matches the ends of lines.",
        min_length=1,
        example="<think>.*</think>.*",
    )


class JsonSchema(Section):
    """1 if the completion is JSON that a JSON Schema accepts. It may stand in a fenced block."""

    file: str | None = field(
        "A file with the schema, relative to the recipe's folder. It is copied into the artifact. Give "
        "either this or column.",
        None,
        min_length=1,
        example="answer.schema.json",
    )
    column: str | None = field(
        "The column with a schema for each prompt.", None, min_length=1, example="schema"
    )

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        if values.get("file") is not None and values.get("column") is not None:
            yield Problem(
                E0107, ("column",), "`file` and `column` both give the schema", "remove one of the two", True
            )
        if values.get("file") is None and values.get("column") is None:
            yield Problem(
                E0110, (), "`json_schema` has no schema", "file: answer.schema.json, or column: schema", True
            )


class Length(Section):
    """1 from minimum to maximum tokens. Shorter completions score their share of the minimum, and longer ones
    the maximum's share of their length."""

    maximum: int = field("Longest length with the full reward.", unit="tokens", ge=1, example=256)
    minimum: int = field(
        "Shortest length with the full reward.", 0, unit="tokens", ge=0, le=LARGEST, example=16
    )

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        least, most = values.get("minimum", 0), values.get("maximum")
        if isinstance(least, int) and isinstance(most, int) and least > most >= 1:
            yield Problem(
                E0107, ("minimum",), f"`minimum` is above `maximum`, which is {most}", f"minimum: {most}"
            )


class CodeTests(Section):
    """The share of tests that the completion's code passes. It runs in a sandbox."""

    column: str = field(
        "The column with the tests: a list of statements, or one text.", min_length=1, example="test_list"
    )
    seconds: float = field(
        "Time limit for the code of a completion with all its tests.",
        10.0,
        unit="s",
        gt=0,
        le=86400,
    )
    memory_mebibytes: int = field("Its memory limit.", 512, unit="MiB", ge=1, le=2**20)
    all_tests: bool = field("1 only if all tests pass, and otherwise 0.", False)
    setup: str = field("Statements that run before the code, such as imports.", "", example="import math")


class Reward(Section):
    """A number for each completion: by a function, or by one of the ready rewards."""

    function: str | None = field(
        "A Python function, as file.py:function, relative to the recipe's folder. The file is copied into "
        "the artifact. It is called as TRL calls it, with prompts, completions and the data's columns, and "
        "returns a number for each completion, or None for one that it does not score.",
        None,
        pattern=TRANSFORM,
        form="file.py:function",
        example="rewards.py:correct",
    )
    exact_match: ExactMatch | None = field(
        "Compare the whole completion with a column.", None, example={"column": "answer"}
    )
    numeric_match: NumericMatch | None = field(
        "Compare the last number with a column's.", None, example={"column": "answer"}
    )
    boxed_answer: BoxedAnswer | None = field(
        r"Compare what is in \boxed{...} with a column.", None, example={"column": "answer"}
    )
    format_match: FormatMatch | None = field(
        "Match a regular expression.", None, example={"pattern": "<think>.*</think>.*"}
    )
    json_schema: JsonSchema | None = field(
        "Validate JSON with a schema.", None, example={"file": "answer.schema.json"}
    )
    length: Length | None = field("Score the number of tokens.", None, example={"maximum": 256})
    code_tests: CodeTests | None = field(
        "Run the completion's code with tests of a column.", None, example={"column": "test_list"}
    )
    weight: float = field(
        "Factor of this reward in the sum of all.", 1.0, unit="none (a factor)", allow_inf_nan=False
    )

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        kinds = [kind for kind in KINDS if values.get(kind) is not None]
        if len(kinds) > 1:
            yield Problem(
                E0107,
                (kinds[1],),
                f"`{kinds[0]}` and `{kinds[1]}` are two rewards",
                f"give each an item of its own in `rewards`: - {{{kinds[1]}: ..., weight: 1.0}}",
                at_key=True,
            )
        if not kinds:
            yield Problem(E0110, (), "a reward has no function", "function: rewards.py:correct", at_key=True)

    @property
    def kind(self) -> str:
        """The key that says how completions are scored: one of KINDS."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


KINDS = tuple(key for key in Reward.model_fields if key != "weight")
"""The kinds of rewards: `function`, and the ready ones."""


class RewardLimits(Section):
    """The limits of the processes in which rewards run."""

    seconds: float = field(
        "Time limit for a function to score all completions of a step.", 60.0, unit="s", gt=0, le=86400
    )
    memory_mebibytes: int = field(
        "Memory limit of each function's process.", 2048, unit="MiB", ge=64, le=2**24
    )


URL = (
    r"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])"
    r"(:([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5]))?(/[A-Za-z0-9._~/-]*)?$"
)
"""A server's address, with a port of at most 65535."""


class Rollout(Section):
    """How completions are generated during training."""

    engine: Literal["mesh", "vllm"] = field(
        "What generates completions.",
        "mesh",
        choices={
            "mesh": "The chips that train, between optimizer steps.",
            "vllm": "A vLLM server on other chips, which gets the adapters of each step. It needs LoRA.",
        },
    )
    axes: Axes | None = field(
        "Sizes of the mesh axes for generation on the same chips, as mesh.axes. A layout of its own keeps "
        "the frozen weights a second time. null chooses tp, as large as the heads and the memory allow, if "
        "fsdp splits the weights, and otherwise mesh.axes. Only with engine mesh.",
        None,
        unit="devices",
        min_length=1,
        example={"tp": 8},
    )
    rows: int | None = field(
        "Number of completions generated at once, over all devices, or asked of the server at once; null "
        "generates all of a step.",
        None,
        unit="completions",
        ge=1,
        le=10**6,
        example=256,
    )
    url: str = field(
        "Address of the vLLM server. A key for it is read from the environment variable VLLM_API_KEY.",
        "http://127.0.0.1:8000",
        pattern=URL,
        form="http://HOST:PORT",
        example="http://10.0.0.2:8000",
        compiled=False,
    )
    adapter_path: str | None = field(
        "Folder for this run's adapters alone, an absolute path that the server reads too; null uses "
        "rollout-adapters in the checkpoint directory. It has at most two adapters at a time.",
        None,
        pattern=r"^/[^\n]*$",
        form="/FOLDER",
        example="/mnt/shared/adapters",
        compiled=False,
    )
    server_adapter_path: str | None = field(
        "The same folder as the server sees it, for example in its container; null for the same path.",
        None,
        pattern=r"^/[^\n]*$",
        form="/FOLDER",
        example="/adapters",
        compiled=False,
    )
    wait_seconds: int = field(
        "How long the run waits for a server that does not answer, or that has restarted, before it ends.",
        1800,
        unit="s",
        ge=1,
        le=7 * 86400,
        compiled=False,
    )
    importance_sampling_correction: bool = field(
        "Weigh the loss of a completion, or of a token, with its probability in the training step divided by "
        "that in the server. The two compute in other ways, and so differ a little. As TRL's "
        "vllm_importance_sampling_correction.",
        True,
    )
    importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = field(
        "What is weighed, and what happens to a weight outside of the bounds.",
        "sequence_mask",
        choices={
            "token_truncate": "Each token's own weight, moved to the bound.",
            "token_mask": "Each token's own weight; a token beyond a bound is not trained.",
            "sequence_truncate": "The weight of the whole completion for all its tokens, moved to the bound.",
            "sequence_mask": "The weight of the whole completion for all its tokens; a completion beyond a "
            "bound is not trained.",
        },
    )
    importance_sampling_clip_max: float | None = field(
        "Largest weight; null has no upper bound.",
        3.0,
        unit="none (a ratio)",
        gt=0,
        allow_inf_nan=False,
    )
    importance_sampling_clip_min: float | None = field(
        "Smallest weight; null has no lower bound.",
        None,
        unit="none (a ratio)",
        gt=0,
        allow_inf_nan=False,
        example=0.2,
    )

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        bounds = ("importance_sampling_clip_min", "importance_sampling_clip_max")
        least, most = values.get(bounds[0]), values.get(bounds[1], 3.0)
        if isinstance(least, int | float) and isinstance(most, int | float) and least >= most > 0:
            yield Problem(
                E0107,
                bounds[:1],
                f"`{bounds[0]}` is not below `{bounds[1]}`, which is {most:g}",
                f"{bounds[0]}: {most / 10:g}",
            )
        mode = values.get("importance_sampling_mode")
        if isinstance(mode, str) and mode.endswith("truncate") and least is None and most is None:
            yield Problem(
                E0107,
                ("importance_sampling_mode",),
                f"`{mode}` moves weights to a bound, and the section has none",
                "importance_sampling_clip_max: 3.0",
            )


OF_SERVER = tuple(key for key in Rollout.model_fields if key not in ("engine", "axes", "rows"))
"""Keys of `rollout` that only the engine vllm reads."""
