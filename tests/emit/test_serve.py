"""serve/: one list of flags, stated by the image and by the script alike."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from emitting import RECIPE, files_of

from compiler.lower import lower
from spec.load import load


def image_words(dockerfile: str) -> list[str]:
    entry = dockerfile.partition("\nENTRYPOINT ")[2].replace("\\\n", "")
    words: list[str] = json.loads(entry)
    return words


def run_script(folder: Path, files: dict[str, bytes], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs serve.sh with a vllm that prints its arguments, one a line, and the environment after them."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/vllm").write_text('#!/bin/sh\nprintf "%s\\n" vllm "$@"\nenv\n')
    (folder / "bin/vllm").chmod(0o755)
    (folder / "serve").mkdir(exist_ok=True)
    (folder / "serve/serve.sh").write_bytes(files["serve/serve.sh"])
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
    command = ["bash", str(folder / "serve/serve.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


FULL = [
    "serve.tensor_parallel_size=4",
    "serve.data_parallel_size=2",
    "serve.quantization=fp8",
    "serve.prefix_caching=false",
    "serve.tool_call_parser=gemma4",
    "serve.port=9000",
    "serve.extra_args={async_scheduling: true, disable_chunked_mm_input: false, seed: 3, "
    'hf_overrides: {a: "$b"}}',
]


@pytest.mark.parametrize("sets", [[], FULL], ids=["default", "full"])
def test_image_and_script_start_the_same_server(sets: list[str], tmp_path: Path) -> None:
    files = files_of(tmp_path, sets)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/config.json").write_text("{}")
    image = image_words(files["serve/Dockerfile"].decode())
    script = run_script(tmp_path, files).stdout.splitlines()
    assert image[:3] == ["vllm", "serve", "/model"]
    assert script[:3] == ["vllm", "serve", f"{tmp_path}/serve/../merged"]
    assert script[3 : len(image)] == image[3:]
    assert {"HF_HUB_OFFLINE=1", f"VLLM_XLA_CACHE_PATH={tmp_path}/.cache/vllm/xla"} <= {*script[len(image) :]}


def test_the_script_says_when_there_is_no_model(tmp_path: Path) -> None:
    done = run_script(tmp_path, files_of(tmp_path), str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'nowhere'} holds no model: run merge.py first")


def test_every_key_of_the_recipe_is_a_flag(tmp_path: Path) -> None:
    words = image_words(files_of(tmp_path, FULL)["serve/Dockerfile"].decode())[3:]
    assert words == [
        *["--served-model-name", "sample"],
        *["--host", "0.0.0.0"],
        *["--port", "9000"],
        *["--tensor-parallel-size", "4"],
        *["--data-parallel-size", "2"],
        *["--max-model-len", "16384"],
        *["--max-num-seqs", "64"],
        *["--max-num-batched-tokens", "4096"],
        *["--kv-cache-dtype", "fp8"],
        *["--quantization", "fp8"],
        "--no-enable-prefix-caching",
        "--enable-auto-tool-choice",
        *["--tool-call-parser", "gemma4"],
        "--no-disable-chunked-mm-input",
        "--async-scheduling",
        *["--seed", "3"],
        *["--hf-overrides", '{"a": "$b"}'],
    ]


def test_chunked_multimodal_input_is_off_for_gemma_4_alone(tmp_path: Path) -> None:
    assert b"--disable-chunked-mm-input" in files_of(tmp_path)["serve/serve.sh"]
    gemma3 = files_of(tmp_path, ["model.id=google/gemma-3-27b-it", "serve.tensor_parallel_size=8"])
    assert b"chunked" not in gemma3["serve/serve.sh"]


def test_the_environment_reaches_the_server(tmp_path: Path) -> None:
    files = files_of(tmp_path, ['serve.env={HF_HUB_OFFLINE: "0", GREETING: \'a "b" $c\'}'])
    dockerfile, script = (files[f"serve/{name}"].decode() for name in ("Dockerfile", "serve.sh"))
    assert 'ENV HF_HUB_OFFLINE="0"\n' in dockerfile
    assert 'ENV GREETING="a \\"b\\" \\$c"\n' in dockerfile
    assert "export HF_HUB_OFFLINE=0\n" in script
    assert 'export GREETING="a \\"b\\" \\$c"\n' in script


def test_the_image_is_pinned_as_the_recipe_says(tmp_path: Path) -> None:
    digest = f"vllm/vllm-tpu@sha256:{'0' * 64}"
    dockerfile = files_of(tmp_path, [f"serve.image={digest}"])["serve/Dockerfile"].decode()
    assert f"\nARG BASE_IMAGE={digest}\nFROM ${{BASE_IMAGE}}\n" in dockerfile
    # Nothing is fetched when it is built: the image has all that is needed.
    assert not re.search(r"^(RUN|ADD|COPY)\b", dockerfile, re.MULTILINE)
    assert "/health" in dockerfile


def test_compose_mounts_the_weights_read_only_and_keeps_the_cache(tmp_path: Path) -> None:
    from ruamel.yaml import YAML

    compose = YAML(typ="safe").load(files_of(tmp_path)["serve/compose.yaml"].decode())
    service = compose["services"]["vllm"]
    assert service["privileged"] is True and service["network_mode"] == "host"
    assert service["shm_size"] == "16gb" and service["restart"] == "unless-stopped"
    weights, cache = service["volumes"]
    assert weights["read_only"] is True and weights["target"] == "/model"
    assert weights["source"] == "${MODEL_DIR:-../merged}"
    assert cache["source"] in compose["volumes"]
    dockerfile = files_of(tmp_path)["serve/Dockerfile"].decode()
    assert f"ENV VLLM_XLA_CACHE_PATH={cache['target']}\n" in dockerfile


def test_weights_that_cannot_be_mounted_have_to_be_given(tmp_path: Path) -> None:
    files = files_of(tmp_path, ["merge.output='odd name'"])
    assert "${MODEL_DIR:?" in files["serve/compose.yaml"].decode()
    assert 'model="${1:?' in files["serve/serve.sh"].decode()


def test_an_environment_that_would_break_out_of_the_dockerfile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    found = lower(load(path, ['serve.env={A: "x\\nRUN rm -rf /"}']))
    assert found.program is None
    assert [d.path for d in found.diagnostics if d.code == "E0618"] == ["serve.env.A"]
