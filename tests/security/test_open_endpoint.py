"""Tests of a server that others can reach: its access, its rights on the machine, and its key's places."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from recipec.compiler.cli.main import app

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 8}
data: {train: [train.jsonl]}
serve: {accelerator: v6e-8}
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that builds the recipe with some `--set`, once for each."""

    @cache
    def build(*sets: str) -> Path:
        folder = tmp_path_factory.mktemp("built")
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "train.jsonl").write_text("")
        arguments = [word for one in sets for word in ("--set", one)]
        built = CliRunner().invoke(
            app, ["build", str(folder / "recipe.yaml"), "-o", str(folder / "generated"), *arguments]
        )
        assert built.exit_code == 0, built.stderr
        return folder / "generated" / "example"

    return build


def documents(file: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(file.read_text()) if one]


def pod(folder: Path) -> dict[str, Any]:
    (stateful,) = [one for one in documents(folder / "serve/k8s.yaml") if one["kind"] == "StatefulSet"]
    return dict(stateful["spec"]["template"]["spec"])


def test_server_listens_only_on_loopback_by_default(artifact: Callable[..., Path]) -> None:
    serve = artifact() / "serve"
    for name in ("Dockerfile", "serve.sh"):
        assert re.search(r'--host"?,? "?127\.0\.0\.1', (serve / name).read_text()), name
    kinds = {one["kind"] for one in documents(serve / "k8s.yaml")}
    assert not kinds & {"Ingress", "Gateway", "HTTPRoute"}
    (service,) = [one for one in documents(serve / "k8s.yaml") if one["kind"] == "Service"]
    assert service["spec"].get("type", "ClusterIP") == "ClusterIP"


def test_public_server_does_not_start_without_an_api_key(
    artifact: Callable[..., Path], tmp_path: Path
) -> None:
    folder = artifact("serve.host=0.0.0.0")
    (stub := tmp_path / "bin").mkdir()
    (stub / "vllm").write_text("#!/bin/sh\ntouch STARTED\n")
    (stub / "vllm").chmod(0o755)
    environment = {"PATH": f"{stub}:/usr/bin:/bin", "HOME": str(tmp_path)}
    script = ["bash", str(folder / "serve/serve.sh")]
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "VLLM_API_KEY is not set" in done.stderr
    assert not (tmp_path / "STARTED").exists()
    compose = (folder / "serve/compose.yaml").read_text()
    assert "${VLLM_API_KEY:?" in compose
    (server,) = pod(folder)["containers"]
    (key,) = [one["valueFrom"]["secretKeyRef"] for one in server["env"] if one["name"] == "VLLM_API_KEY"]
    assert "optional" not in key


def test_artifact_files_contain_no_keys_from_the_environment(
    artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("VLLM_API_KEY", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(variable, "sesame-4711")
    folder = artifact("serve.host=0.0.0.0", "checkpoint.directory=gs://bucket/run")
    for file in folder.rglob("*"):
        if file.is_file():
            text = file.read_text()
            assert "sesame-4711" not in text and "--api-key=" not in text and "--hf-token" not in text, file
    assert "--api-key" not in (folder / "serve/serve.sh").read_text()


def test_pod_runs_without_host_privileges(artifact: Callable[..., Path]) -> None:
    """Run as root within the pod, which owns the TPU's devices, but without root's capabilities."""
    spec = pod(artifact("serve.model=gs://bucket/merged"))
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec.get("hostNetwork") and not spec.get("hostPID")
    for container in (*spec["containers"], *spec["initContainers"]):
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]} and context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False and not context.get("privileged")


def test_compose_fetch_container_runs_without_privileges(artifact: Callable[..., Path]) -> None:
    (compose,) = documents(artifact("serve.model=gs://bucket/merged") / "serve/compose.yaml")
    fetch, server = compose["services"]["fetch-model"], compose["services"]["vllm"]
    assert fetch["cap_drop"] == ["ALL"] and fetch["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in fetch and server["privileged"] is True  # the TPU's devices
    assert all(volume.get("read_only") for volume in server["volumes"] if volume["target"] == "/model")


@pytest.mark.parametrize("script", ["smoke.sh", "eval.sh"])
def test_serve_scripts_import_no_module_from_the_working_folder(
    script: str, artifact: Callable[..., Path], tmp_path: Path
) -> None:
    folder = artifact("evaluate.tasks=[gsm8k]")
    (strange := tmp_path / "downloads").mkdir()
    for module in ("json", "argparse", "runtime", "urllib", "http"):
        (strange / f"{module}.py").write_text("open('CANARY', 'w')\n")
    (binaries := tmp_path / "bin").mkdir()
    (binaries / "python3").symlink_to(sys.executable)
    environment = {"PATH": f"{binaries}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}
    command = ["bash", str(folder / "serve" / script), "--help"]
    done = subprocess.run(command, cwd=strange, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (strange / "CANARY").exists()
