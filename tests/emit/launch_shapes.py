"""Recipes for the tests of launch/: each shape of machines, and each key of the section."""

from __future__ import annotations

BASE = ["serve=null", "model.id=meta-llama/Llama-3.2-1B-Instruct", "checkpoint.directory=gs://my-bucket/run"]
LONG = "a-name-that-is-as-long-as-names-may-be-which-is-63-characters-l"

SHAPES = {
    "one-host": ["mesh={accelerator: v5p-8, axes: {fsdp: 4}}"],
    "four-hosts": ["mesh={accelerator: v5p-32, axes: {fsdp: 16}}", "train.global_batch_size=16"],
    "eight-chips": ["mesh={accelerator: v6e-8, axes: {fsdp: 8}}"],
    "pairs": ["mesh={accelerator: v6e-8, hosts: 2, axes: {fsdp: 8}}"],
    "slices": ["mesh={accelerator: v5e-8, axes: {dcn: 2, fsdp: 8}}", "train.global_batch_size=16"],
    "slices-of-pairs": [
        "mesh={accelerator: v5e-8, hosts: 4, axes: {dcn: 2, fsdp: 8}}",
        "train.global_batch_size=16",
    ],
    "slices-of-four": [
        "mesh={accelerator: v5p-32, axes: {dcn: 2, fsdp: 16}}",
        "train.global_batch_size=32",
    ],
    "ironwood": ["mesh={accelerator: tpu7x-16, axes: {fsdp: 16}}", "train.global_batch_size=16"],
    "v4": ["mesh={accelerator: v4-8, axes: {fsdp: 4}}"],
    "local": ["mesh={accelerator: v5e-4, axes: {fsdp: 4}}", "checkpoint.directory=checkpoints"],
    "full": ["mesh={accelerator: v5p-8, axes: {fsdp: 4}}", "lora=null"],
    "long-name": [
        "mesh={accelerator: v5p-8, axes: {fsdp: 4}}",
        "merge.output=gs://my-bucket/merged",
        f"name={LONG}",
    ],
    "everything": [
        "mesh={accelerator: v5e-8, axes: {fsdp: 8}}",
        "launch={project: a-project, zone: us-east5-a, spot: true, queued: true, queue_for: 12h, "
        "max_restarts: 3, runtime_version: v2-alpha-x, network: net, subnetwork: sub, "
        "service_account: a@b.iam.gserviceaccount.com, "
        "cluster: c, image: 'registry.example.com/train:1', bucket: gs://others/artifacts}",
        "train.log.wandb_project=runs",
        "model.revision=main",
    ],
    "reserved": [
        "mesh={accelerator: v5p-32, axes: {fsdp: 16}}",
        "train.global_batch_size=16",
        'launch={reservation: mine, zone: "a\'b $c", kind: [tpu-vm, gke, skypilot, xpk]}',
    ],
}
