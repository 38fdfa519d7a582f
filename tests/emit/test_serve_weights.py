"""Tests of where a server finds its weights: merge.py's folder, another folder, a bucket or the hub.

An adapter is served next to its base.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serve_programs import image_environment, image_words, run_script, variant

from tests.emit.compose_files import objects, pod_of, with_model, yaml

FOLDERS = {
    "merged": ("${MODEL_DIR:-../merged}", "serve/../merged"),
    "runs/a b": ("${MODEL_DIR:-../runs/a b}", "serve/../runs/a b"),
    "odd $name": ("${MODEL_DIR:-../odd $$name}", "serve/../odd $name"),
    "odd }": ("${MODEL_DIR:?the folder of the weights}", "serve/../odd }"),
    "s3://bucket/merged": ("${MODEL_DIR:?the folder of the weights}", None),
}


@pytest.mark.parametrize("output", FOLDERS)
def test_serve_weights_default_to_the_merge_output_folder(output: str, tmp_path: Path) -> None:
    files = variant(merge__output=output)
    source, default = FOLDERS[output]
    assert yaml(files["serve/compose.yaml"])["services"]["vllm"]["volumes"][0]["source"] == source
    script = files["serve/serve.sh"]
    with_model(tmp_path, "elsewhere", "given", *([output] if default else []))
    elsewhere, given = str(tmp_path / "elsewhere"), str(tmp_path / "given")
    assert run_script(tmp_path, script, given, MODEL_DIR=elsewhere).words[2] == given
    assert run_script(tmp_path, script, MODEL_DIR=elsewhere).words[2] == elsewhere
    found = run_script(tmp_path, script)
    if default:
        assert found.words[2] == f"{tmp_path}/{default}"
    else:
        assert found.status == 1 and found.stderr.startswith("error: the folder of weights is not given\n")


PLACES = {
    "~/models/x": ("${MODEL_DIR:-${HOME}/models/x}", "{home}/models/x"),
    "./x": ("${MODEL_DIR:-.././x}", "{home}/serve/.././x"),
    "/srv/x": ("${MODEL_DIR:-/srv/x}", None),
}


@pytest.mark.parametrize("place", PLACES)
def test_local_model_folder_is_mounted_and_given_to_serve_script(place: str, tmp_path: Path) -> None:
    files = variant(model=place)
    source, default = PLACES[place]
    assert yaml(files["serve/compose.yaml"])["services"]["vllm"]["volumes"][0]["source"] == source
    with_model(tmp_path, "models/x", "x")
    if default:
        words = run_script(tmp_path, files["serve/serve.sh"]).words
        assert words[2] == default.format(home=tmp_path)
    else:
        assert f'model="${{1:-${{MODEL_DIR:-{place}}}}}"\n' in files["serve/serve.sh"]


def test_weights_in_a_bucket_are_copied_before_the_server_starts(tmp_path: Path) -> None:
    files = variant(model="gs://bucket/merged")
    compose = yaml(files["serve/compose.yaml"])
    fetch, vllm = compose["services"]["fetch-model"], compose["services"]["vllm"]
    mirror = "--delete-unmatched-destination-objects"
    copy = ["gcloud", "storage", "rsync", "--recursive", mirror, "gs://bucket/merged", "/model"]
    assert fetch["command"] == copy and fetch["cap_drop"] == ["ALL"]
    assert vllm["depends_on"] == {"fetch-model": {"condition": "service_completed_successfully"}}
    assert fetch["volumes"] == [{"type": "volume", "source": "model", "target": "/model"}]
    assert vllm["volumes"][0] == fetch["volumes"][0] | {"read_only": True}
    pod = pod_of(files["serve/k8s.yaml"])
    (init,) = pod["initContainers"]
    assert init["command"] == copy and init["securityContext"]["runAsNonRoot"] is True
    # Of the non-root users, use the one in the image, because gcloud looks up its name in /etc/passwd.
    assert init["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 1000
    assert pod["serviceAccountName"] == objects(files["serve/k8s.yaml"])["ServiceAccount"]["metadata"]["name"]
    ran = run_script(tmp_path, files["serve/serve.sh"])
    local = f"{tmp_path}/.cache/sample/model"
    # The folder may be the user's own, so that the script deletes nothing in it.
    assert ran.copied == (("storage", "rsync", "--recursive", "gs://bucket/merged", local),)
    assert ran.words[2] == local
    refused = run_script(tmp_path, files["serve/serve.sh"], stubs=["vllm"])
    assert refused.status == 1 and "error: weights cannot be copied from the bucket\n" in refused.stderr


def test_hub_weights_are_served_by_model_id(tmp_path: Path) -> None:
    files = variant(model="someone/model", model__revision="main")
    words = image_words(files["serve/Dockerfile"])
    assert words[2] == "someone/model" and "--revision" not in words
    assert run_script(tmp_path, files["serve/serve.sh"]).words == tuple(words)
    assert "HF_HUB_OFFLINE" not in files["serve/Dockerfile"] + files["serve/serve.sh"]
    service = yaml(files["serve/compose.yaml"])["services"]["vllm"]
    assert service["environment"] == ["VLLM_API_KEY", "HF_TOKEN"]
    home = image_environment(files["serve/Dockerfile"])["HF_HOME"]
    assert home in [volume["target"] for volume in service["volumes"]]
    (vllm,) = pod_of(files["serve/k8s.yaml"])["containers"]
    (token,) = [env for env in vllm["env"] if env["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "sample-serve", "key": "HF_TOKEN", "optional": True}
    assert "initContainers" not in pod_of(files["serve/k8s.yaml"])


def test_recipe_revision_is_passed_with_the_recipe_model() -> None:
    files = variant(model="google/gemma-4-31B-it", model__revision="main")
    assert image_words(files["serve/Dockerfile"])[2:5] == ["google/gemma-4-31B-it", "--revision", "main"]


def test_adapter_is_served_with_its_base_model(tmp_path: Path) -> None:
    files = variant(weights="adapter", model="./base", env={"MODEL_IMPL_TYPE": "vllm"})
    words = image_words(files["serve/Dockerfile"])
    flags = " ".join(words)
    assert "--served-model-name sample-base " in flags
    assert "--enable-lora --max-lora-rank 16 --lora-modules sample=/adapter " in flags
    # vLLM 0.32 takes end tokens from this file, and not from --override-generation-config.
    assert "--generation-config /adapter " in flags
    base, adapter, _ = yaml(files["serve/compose.yaml"])["services"]["vllm"]["volumes"]
    assert base["source"] == "${MODEL_DIR:-.././base}"
    assert adapter["source"] == "${ADAPTER_DIR:-../merged-adapter}"
    assert adapter["target"] == "/adapter" and adapter["read_only"] is True
    with_model(tmp_path, "base", "merged-adapter", "other-adapter")
    script = run_script(tmp_path, files["serve/serve.sh"])
    assert f"sample={tmp_path}/serve/../merged-adapter" in script.words
    place = script.words.index("--generation-config") + 1
    assert script.words[place] == f"{tmp_path}/serve/../merged-adapter"
    other = str(tmp_path / "other-adapter")
    assert f"sample={other}" in run_script(tmp_path, files["serve/serve.sh"], ADAPTER_DIR=other).words
    waits = pod_of(files["serve/k8s.yaml"])["initContainers"]
    assert [wait["name"] for wait in waits] == ["await-model", "await-adapter"]
    assert not {"--tokenizer", "--chat-template"} & {*words}
    (tmp_path / "merged-adapter" / "generation_config.json").unlink()
    assert "holds no generation_config.json" in run_script(tmp_path, files["serve/serve.sh"]).stderr
    assert "--generation-config" not in image_words(variant()["serve/Dockerfile"]), (
        "read from the model's folder"
    )


@pytest.mark.parametrize(
    ("reasoning", "variables"),
    [
        (None, None),
        ("drop", None),
        ("empty", {"enable_thinking": False}),
        ("keep", {"enable_thinking": True, "preserve_thinking": True}),
    ],
)
def test_server_gives_the_template_the_variables_of_the_run(
    reasoning: str | None, variables: dict[str, bool] | None, tmp_path: Path
) -> None:
    files, flag = variant(data__reasoning=reasoning), "--default-chat-template-kwargs"
    with_model(tmp_path, "merged")
    for words in (
        image_words(files["serve/Dockerfile"]),
        run_script(tmp_path, files["serve/serve.sh"]).words,
    ):
        found = json.loads(words[words.index(flag) + 1]) if flag in words else None
        assert found == variables
    own = variant(data__reasoning=reasoning, extra_args={flag[2:]: {"own": 1}})["serve/Dockerfile"]
    assert own.count(flag) == 1 and "enable_thinking" not in own


def test_adapter_is_served_with_the_tokenizer_and_template_of_the_run(tmp_path: Path) -> None:
    own = {"model__tokenizer": "someone/tokenizer", "data__chat_template": "chat.jinja"}
    assert not {"--tokenizer", "--chat-template"} & {*image_words(variant(**own)["serve/Dockerfile"])}
    files = variant(weights="adapter", model="./base", **own)
    flags = " ".join(image_words(files["serve/Dockerfile"]))
    assert "--tokenizer /adapter --chat-template /adapter/chat_template.jinja " in flags
    tokens = variant(weights="adapter", model="./base", model__add_tokens={"<note>": None})
    assert "--tokenizer /adapter " in " ".join(image_words(tokens["serve/Dockerfile"]))
    with_model(tmp_path, "base", "merged-adapter")
    words = run_script(tmp_path, files["serve/serve.sh"]).words
    adapter = f"{tmp_path}/serve/../merged-adapter"
    assert [adapter, f"{adapter}/chat_template.jinja"] == [
        words[words.index(flag) + 1] for flag in ("--tokenizer", "--chat-template")
    ]


@pytest.mark.parametrize("model", ["./mine", "recipec/tiny-gemma4"])
def test_unknown_base_model_folder_must_be_given_in_model_dir(model: str, tmp_path: Path) -> None:
    files = variant(weights="adapter", model__id=model)
    base, _, _ = yaml(files["serve/compose.yaml"])["services"]["vllm"]["volumes"]
    assert base["source"] == "${MODEL_DIR:?the folder of the base's weights}"
    with_model(tmp_path, "base", "merged-adapter")
    refused = run_script(tmp_path, files["serve/serve.sh"])
    assert refused.stderr == (
        "error: the folder of weights is not given\n  = help: name the folder in MODEL_DIR\n"
    )
    named = run_script(tmp_path, files["serve/serve.sh"], MODEL_DIR=str(tmp_path / "base"))
    assert named.words[2] == str(tmp_path / "base")
