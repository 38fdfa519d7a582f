"""The section `train.distill`: what a student learns from a teacher."""

from __future__ import annotations

from typing import Literal

from recipec.spec.language.section import Section, field


class Teacher(Section):
    """A model whose predictions the student learns. It is not trained."""

    id: str = field(
        "The teacher, as model.id: a Hugging Face id from the catalog or added with `recipe models add`; or "
        "a directory, which starts with ./, / or ~. It may be of another family than the student, and needs "
        "the same tokenizer. For weights in a bucket, pass their address to train.py with --teacher.",
        min_length=1,
        example="Qwen/Qwen3-14B",
    )
    revision: str | None = field(
        "Branch, tag or commit of the Hugging Face repository; null uses the commit at which the model was "
        "added, or otherwise the main branch.",
        None,
        min_length=1,
        example="main",
    )
    quantization: Literal["nf4", "int8", "fp8"] | None = field(
        "Quantization of the teacher's weights of linear layers and experts; null keeps model.dtype.",
        None,
        example="int8",
        choices={
            "nf4": "4 bits a number, with a scale for each 64 inputs.",
            "int8": "8 bits a number, with a scale for each output.",
            "fp8": "8 bits a number in floating point (float8_e4m3fn), with a scale for each output.",
        },
    )


class Distill(Section):
    """Knowledge distillation: the loss compares the next-token probabilities of student and teacher at each
    token that carries loss, of the data's answers or of the student's own, as TRL's GKDTrainer does."""

    teacher: Teacher = field(
        "The model that the student learns from. It stands next to the student on the same devices.",
        example={"id": "Qwen/Qwen3-14B"},
    )
    beta: float = field(
        "The divergence: 0 is the KL divergence of the student from the teacher (forward), 1 the reverse; "
        "between them lies the generalized Jensen-Shannon divergence, with this share of the teacher in the "
        "mixture.",
        0.5,
        unit="none (a share)",
        ge=0,
        le=1,
    )
    temperature: float = field(
        "Divisor of both models' logits in the loss. The loss is not multiplied by its square.",
        1.0,
        unit="none (a divisor)",
        gt=0,
        allow_inf_nan=False,
    )
    stored: str | None = field(
        "Folder with the teacher's likeliest tokens and their log-probabilities at each token that carries "
        "loss, relative to --data-dir. `train.py --write-teacher` writes it once, and training then needs no "
        "teacher on its devices. null computes the teacher in each step.",
        None,
        min_length=1,
        example="teacher-logps",
    )
    top_k: int = field(
        "Number of the teacher's likeliest tokens that `stored` keeps. All other tokens together are one "
        "event, with the probability that is left: the divergence is between these top_k + 1 events.",
        64,
        unit="tokens",
        ge=1,
        le=4096,
    )
    lmbda: float = field(
        "Share of the optimizer steps that train on the student's own answers: it answers the samples' "
        "prompts again, with its weights before the step, and the last answer is replaced. 0 trains on the "
        "data's answers alone.",
        0.0,
        unit="share of the steps",
        ge=0,
        le=1,
        example=0.5,
    )
    max_completion_length: int = field(
        "Longest own answer, with its end token. A prompt gets the rest of data.max_length; a sample with a "
        "longer one keeps its answer.",
        128,
        unit="tokens",
        ge=1,
        le=2**20,
    )
    sampling_temperature: float = field(
        "Divisor of the logits when own answers are drawn, TRL's `temperature`.",
        0.9,
        unit="none (a divisor)",
        gt=0,
        allow_inf_nan=False,
    )
