"""The `launch` and `cost` sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from spec.language.base import Section, distinct, field


class Launch(Section):
    """How the run is started in the cloud."""

    project: str | None = field(
        "Google Cloud project; null leaves it to whoever launches.", None, min_length=1
    )
    zone: str | None = field("Google Cloud zone; null leaves it to whoever launches.", None, min_length=1)
    runtime_version: str | None = field(
        "Software version of the Cloud TPU VM; null takes the accelerator's from the catalogue.",
        None,
        min_length=1,
    )
    spot: bool = field("Use spot capacity, which may be taken away at any time.", False)
    kind: Annotated[list[Literal["tpu-vm", "gke", "skypilot"]], AfterValidator(distinct)] = field(
        "Which launchers to emit.", ["tpu-vm", "gke", "skypilot"]
    )


class Cost(Section):
    """Prices that replace the catalogue's."""

    train_usd_per_hour: float | None = field(
        "Price of the whole training machine; null takes the catalogue's list price.",
        None,
        unit="US$ per hour",
        ge=0,
        allow_inf_nan=False,
    )
    serve_usd_per_hour: float | None = field(
        "Price of the whole serving machine; null takes the catalogue's list price.",
        None,
        unit="US$ per hour",
        ge=0,
        allow_inf_nan=False,
    )
