"""The `launch`, `cost` and `budget` sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from recipec.spec.language.section import Section, distinct, field

KINDS = {
    "tpu-vm": "Cloud TPU VMs, with gcloud.",
    "gke": "A JobSet on Google Kubernetes Engine, with kubectl.",
    "skypilot": "A SkyPilot task.",
    "xpk": "A workload on Google Kubernetes Engine, with xpk.",
}
"""The launchers of a recipe, in the order in which files are named."""


class Launch(Section):
    """How the run is started in the cloud."""

    project: str | None = field(
        "Google Cloud project; null leaves it to the person who launches the run.",
        None,
        min_length=1,
        example="my-project",
    )
    zone: str | None = field(
        "Google Cloud zone; null leaves it to the person who launches the run.",
        None,
        min_length=1,
        example="us-east5-a",
    )
    kind: Annotated[list[Literal["tpu-vm", "gke", "skypilot", "xpk"]], AfterValidator(distinct)] = field(
        "Which launchers to write. The default leaves out those that do not fit the accelerator or the "
        "checkpoints. An empty list also leaves out probe.py, which tests machines before a run.",
        ["tpu-vm", "gke", "skypilot", "xpk"],
        choices=KINDS,
    )
    spot: bool = field("Use spot capacity, which Google Cloud can take away at any time.", False)
    reservation: str | None = field(
        "Name or address of the reservation that provides the TPUs; null uses none.",
        None,
        min_length=1,
        example="my-reservation",
    )
    queued: bool = field(
        "Request Cloud TPU VMs as a queued resource, which waits for capacity. Several slices are always "
        "requested this way.",
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
        "How often an interrupted run is restarted automatically, including after a spot preemption. "
        "SkyPilot restarts without a limit.",
        20,
        unit="restarts",
        ge=0,
        le=1000,
    )
    runtime_version: str | None = field(
        "Software version of the Cloud TPU VM; null uses the catalog's version for the accelerator.",
        None,
        min_length=1,
        example="v2-alpha-tpuv5",
    )
    network: str | None = field(
        "VPC network of the Cloud TPU VMs; null uses the project's default.",
        None,
        min_length=1,
        example="my-network",
    )
    subnetwork: str | None = field(
        "Subnetwork of the Cloud TPU VMs; null uses the network's subnetwork in the zone's region.",
        None,
        min_length=1,
        example="my-subnetwork",
    )
    service_account: str | None = field(
        "E-mail address of the Google service account of the machines; null uses the default account, and on "
        "GKE the identity of the Kubernetes service account.",
        None,
        min_length=1,
        example="trainer@my-project.iam.gserviceaccount.com",
    )
    cluster: str | None = field(
        "GKE cluster for xpk; null leaves it to the person who launches the run.",
        None,
        min_length=1,
        example="my-cluster",
    )
    image: str = field(
        "Container image for training on GKE. It needs bash, Python 3.11 to 3.13, and pip. The pinned "
        "packages are installed when it starts.",
        "python:3.11-slim-bookworm",
        pattern=r"^\S+$",
        form="the name of an image",
    )
    bucket: str | None = field(
        "gs:// address for the packed artifact on GKE; null uses the bucket of the checkpoints.",
        None,
        pattern=r"^gs://[a-z0-9][a-z0-9._-]*[a-z0-9](/[^/\s]+)*$",
        form="an address such as gs://my-bucket or gs://my-bucket/artifacts",
        example="gs://my-bucket/artifacts",
    )


class Baseline(Section):
    """A run on other hardware, for comparing costs."""

    name: str = field("Hardware of the run.", min_length=1, example="2x H100 80GB")
    train_hours: float = field(
        "Duration of its training.", unit="hours", gt=0, allow_inf_nan=False, example=5.39
    )
    train_usd_per_hour: float = field(
        "Price of its training machine.", unit="US$ per hour", ge=0, allow_inf_nan=False, example=22.12
    )
    serve_usd_per_hour: float = field(
        "Price of its serving machine.", unit="US$ per hour", ge=0, allow_inf_nan=False, example=22.12
    )


class Cost(Section):
    """Prices that replace the catalog's, and a baseline for comparing costs."""

    train_usd_per_hour: float | None = field(
        "Price of the whole training machine; null uses the catalog's list price.",
        None,
        unit="US$ per hour",
        ge=0,
        allow_inf_nan=False,
        example=16.8,
    )
    serve_usd_per_hour: float | None = field(
        "Price of the whole serving machine; null uses the catalog's list price.",
        None,
        unit="US$ per hour",
        ge=0,
        allow_inf_nan=False,
        example=21.6,
    )
    baseline: Baseline | None = field(
        "A run on other hardware that `recipe cost` compares with this one; null has none.",
        None,
        example={
            "name": "2x H100 80GB",
            "train_hours": 5.39,
            "train_usd_per_hour": 22.12,
            "serve_usd_per_hour": 22.12,
        },
    )


class Budget(Section):
    """Limits of the run. `recipe plan` fails if the plan exceeds one."""

    max_hbm_share: float | None = field(
        "Share of each device's memory that the training step may use; null allows all of it.",
        None,
        unit="none (a share)",
        gt=0,
        le=1,
        allow_inf_nan=False,
        example=0.9,
    )
    max_hours: float | None = field(
        "Limit of the estimated training time; null has no limit.",
        None,
        unit="hours",
        gt=0,
        allow_inf_nan=False,
        example=12.0,
    )
    max_usd: float | None = field(
        "Limit of the estimated cost of the training; null has no limit.",
        None,
        unit="US$",
        gt=0,
        allow_inf_nan=False,
        example=200.0,
    )
