"""The `launch`, `cost` and `budget` sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from recipec.spec.language.base import Section, distinct, field

KINDS = {
    "tpu-vm": "Cloud TPU VMs, by gcloud.",
    "gke": "A JobSet on Google Kubernetes Engine, by kubectl.",
    "skypilot": "A SkyPilot task.",
    "xpk": "A workload on Google Kubernetes Engine, by xpk.",
}
"""What a recipe can be launched with, in the order that the files are named in."""


class Launch(Section):
    """How the run is started in the cloud."""

    project: str | None = field(
        "Google Cloud project; null leaves it to whoever launches.", None, min_length=1, example="my-project"
    )
    zone: str | None = field(
        "Google Cloud zone; null leaves it to whoever launches.", None, min_length=1, example="us-east5-a"
    )
    kind: Annotated[list[Literal["tpu-vm", "gke", "skypilot", "xpk"]], AfterValidator(distinct)] = field(
        "Which launchers to emit; of the default's, those that do not fit the accelerator or the checkpoints "
        "are left out.",
        ["tpu-vm", "gke", "skypilot", "xpk"],
        choices=KINDS,
    )
    spot: bool = field("Use spot capacity, which may be taken away at any time.", False)
    reservation: str | None = field(
        "The reservation that the TPUs are taken from, by its name or its address; null takes none.",
        None,
        min_length=1,
        example="my-reservation",
    )
    queued: bool = field(
        "Ask for Cloud TPU VMs by a queued resource, which waits until there is capacity; several slices "
        "always do.",
        False,
        example=True,
    )
    queue_for: str | None = field(
        "How long a queued resource waits for capacity: a number and s, m, h or d; null waits until it is "
        "deleted.",
        None,
        pattern=r"^[1-9][0-9]{0,5}[smhd]$",
        form="a whole number followed by s, m, h or d, such as 12h",
        example="12h",
    )
    max_restarts: int = field(
        "How often a run that was cut off is started again by itself, spot capacity that is taken away "
        "included. SkyPilot does so without a bound.",
        20,
        unit="restarts",
        ge=0,
        le=1000,
    )
    runtime_version: str | None = field(
        "Software version of the Cloud TPU VM; null takes the accelerator's from the catalogue.",
        None,
        min_length=1,
        example="v2-alpha-tpuv5",
    )
    network: str | None = field(
        "VPC network of the Cloud TPU VMs; null takes the project's default.",
        None,
        min_length=1,
        example="my-network",
    )
    subnetwork: str | None = field(
        "Subnetwork of the Cloud TPU VMs; null takes the network's in the zone's region.",
        None,
        min_length=1,
        example="my-subnetwork",
    )
    service_account: str | None = field(
        "E-mail address of the Google service account that the machines act as; null takes the default one, "
        "and on GKE the Kubernetes service account's own identity.",
        None,
        min_length=1,
        example="trainer@my-project.iam.gserviceaccount.com",
    )
    cluster: str | None = field(
        "GKE cluster that xpk launches in; null leaves it to whoever launches.",
        None,
        min_length=1,
        example="my-cluster",
    )
    image: str = field(
        "Container that trains on GKE. It needs bash, Python 3.11 or 3.12 and pip; the pinned packages are "
        "installed when it starts.",
        "python:3.11-slim-bookworm",
        pattern=r"^\S+$",
        form="the name of an image",
    )
    bucket: str | None = field(
        "gs:// address below which the packed artifact lies for GKE; null takes the checkpoints' bucket.",
        None,
        pattern=r"^gs://[a-z0-9][a-z0-9._-]*[a-z0-9](/[^/\s]+)*$",
        form="an address such as gs://my-bucket or gs://my-bucket/artifacts",
        example="gs://my-bucket/artifacts",
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
