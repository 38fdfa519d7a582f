"""Helpers for an artifact's compose file and pods, and a recipe with every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

FULL = [
    "serve.tensor_parallel_size=4",
    "serve.data_parallel_size=2",
    "serve.quantization=fp8",
    "serve.prefix_caching=false",
    "serve.tool_call_parser=gemma4",
    "serve.port=9000",
    "serve.decode_block_sizes=[1, 1024, 1, 1024]",
    'serve.extra_args={async_scheduling: true, enable_log_requests: false, seed: 3, hf_overrides: {a: "$b"}}',
]


def yaml(text: str) -> dict[str, Any]:
    data: dict[str, Any] = YAML(typ="safe").load(text)
    return data


def objects(manifest: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a manifest by kind."""
    found = [item for item in YAML(typ="safe").load_all(manifest) if item]
    assert len({item["kind"] for item in found}) == len(found)
    return {item["kind"]: item for item in found}


def pod_of(manifest: str) -> dict[str, Any]:
    pod: dict[str, Any] = objects(manifest)["StatefulSet"]["spec"]["template"]["spec"]
    return pod


ADAPTER_FILES = ("adapter_config.json", "generation_config.json")


def with_model(folder: Path, *names: str) -> Path:
    """Make a folder with models or adapters in folders below it."""
    for name in names or ("merged",):
        (folder / name).mkdir(parents=True)
        for file in ADAPTER_FILES if name.endswith("adapter") else ("config.json",):
            (folder / name / file).write_text("{}")
    return folder
