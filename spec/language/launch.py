"""The `launch`, `cost` and `budget` sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from spec.language.base import Section, distinct, field


class Launch(Section):
    """How the run is started in the cloud."""

    project: str | None = field(
        "Google Cloud project; null leaves it to whoever launches.", None, min_length=1, example="my-project"
    )
    zone: str | None = field(
        "Google Cloud zone; null leaves it to whoever launches.", None, min_length=1, example="us-east5-a"
    )
    runtime_version: str | None = field(
        "Software version of the Cloud TPU VM; null takes the accelerator's from the catalogue.",
        None,
        min_length=1,
        example="v2-alpha-tpuv5",
    )
    spot: bool = field("Use spot capacity, which may be taken away at any time.", False)
    kind: Annotated[list[Literal["tpu-vm", "gke", "skypilot"]], AfterValidator(distinct)] = field(
        "Which launchers to emit.",
        ["tpu-vm", "gke", "skypilot"],
        choices={
            "tpu-vm": "A Cloud TPU VM, by gcloud.",
            "gke": "A job on Google Kubernetes Engine.",
            "skypilot": "A SkyPilot task.",
        },
    )


class Baseline(Section):
    """A run on other hardware, which costs are held against."""

    name: str = field("What it ran on.", min_length=1, example="2x H100 80GB")
    train_hours: float = field(
        "What its training took.", unit="hours", gt=0, allow_inf_nan=False, example=5.39
    )
    train_usd_per_hour: float = field(
        "Price of its training machine.", unit="US$ per hour", ge=0, allow_inf_nan=False, example=22.12
    )
    serve_usd_per_hour: float = field(
        "Price of the machine that served it.", unit="US$ per hour", ge=0, allow_inf_nan=False, example=22.12
    )


class Cost(Section):
    """Prices that replace the catalogue's, and what the costs are held against."""

    train_usd_per_hour: float | None = field(
        "Price of the whole training machine; null takes the catalogue's list price.",
        None,
        unit="US$ per hour",
        ge=0,
        allow_inf_nan=False,
        example=16.8,
    )
    serve_usd_per_hour: float | None = field(
        "Price of the whole serving machine; null takes the catalogue's list price.",
        None,
        unit="US$ per hour",
        ge=0,
        allow_inf_nan=False,
        example=21.6,
    )
    baseline: Baseline | None = field(
        "A run on other hardware that `recipe cost` puts beside this one; null has none.",
        None,
        example={
            "name": "2x H100 80GB",
            "train_hours": 5.39,
            "train_usd_per_hour": 22.12,
            "serve_usd_per_hour": 22.12,
        },
    )


class Budget(Section):
    """What the run may take at the most: `recipe plan` fails above it."""

    max_hbm_share: float | None = field(
        "Share of each device's memory that the training step may use; null has no bound but the memory.",
        None,
        unit="none (a share)",
        gt=0,
        le=1,
        allow_inf_nan=False,
        example=0.9,
    )
    max_hours: float | None = field(
        "Estimated duration of the training; null has no bound.",
        None,
        unit="hours",
        gt=0,
        allow_inf_nan=False,
        example=12.0,
    )
    max_usd: float | None = field(
        "Estimated price of the training; null has no bound.",
        None,
        unit="US$",
        gt=0,
        allow_inf_nan=False,
        example=200.0,
    )
