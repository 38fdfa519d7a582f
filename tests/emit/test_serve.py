"""Tests of serve/: the image, Kubernetes and the script describe the same server."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from emitting import RECIPE, files_of, program_of
from serve_programs import (
    base,
    expanded,
    image_environment,
    image_words,
    run_script,
    served,
    server_of,
    variant,
)

from recipec.compiler.emitters.readme import emit_readme
from recipec.compiler.emitters.server import emit_serve
from recipec.compiler.lower import lower
from recipec.compiler.lowering.hardware import from_name
from recipec.spec.load import load
from tests.emit.compose_files import FULL, objects, pod_of, with_model, yaml


@pytest.mark.parametrize("sets", [[], FULL], ids=["default", "full"])
def test_image_pod_and_script_start_the_same_server(sets: list[str], tmp_path: Path) -> None:
    program = base(*sets)
    server, files = server_of(program), emit_serve(program)
    image = image_words(files["serve/Dockerfile"])
    assert tuple(image) == server.entrypoint
    assert image[:3] == ["vllm", "serve", "/model"]
    assert image_environment(files["serve/Dockerfile"]) == server.environment
    script = run_script(with_model(tmp_path), files["serve/serve.sh"])
    assert script.words == ("vllm", "serve", f"{tmp_path}/serve/../merged", *image[3:])
    # On a bare machine, vLLM keeps compiled programs in its default folder, in the user's home.
    passed = {**server.environment} | {"VLLM_XLA_CACHE_PATH": None}
    assert {name: script.environment.get(name) for name in passed} == passed
    (vllm,) = pod_of(files["serve/k8s.yaml"])["containers"]
    loopback = image.index("--host") + 1
    on_every_address = [*image[:loopback], "0.0.0.0", *image[loopback + 1 :]]
    assert [expanded(word, {}) for word in vllm["command"]] == on_every_address
    assert {env["name"]: env.get("value") for env in vllm["env"]} == {
        "HOME": "/tmp",
        **server.environment,
        "VLLM_API_KEY": None,
    }


def test_readme_asks_a_model_of_plain_text_to_continue_a_prompt() -> None:
    """A server refuses a chat with a model that has no chat template."""
    text, chat = (emit_readme(base(*sets)) for sets in (["data.format=text"], []))
    assert "/v1/completions --header" in text and '"prompt": "Hello"}\'\n' in text
    assert "/v1/chat/completions" not in text and "/v1/chat/completions --header" in chat


@pytest.mark.parametrize(
    "mesh", ["{accelerator: v6e-8, axes: {fsdp: 8}}", "{accelerator: v5p-8, axes: {fsdp: 4}}"]
)
@pytest.mark.parametrize("weights", ["merged", "adapter"])
def test_readme_takes_no_address_for_a_folder(mesh: str, weights: str) -> None:
    sets = ["merge.output=s3://bucket/out", f"serve.weights={weights}", "serve.env.MODEL_IMPL_TYPE=vllm"]
    text = emit_readme(base(f"mesh={mesh}", *sets))
    variable, folder = ("MODEL_DIR", "out") if weights == "merged" else ("ADAPTER_DIR", "out-adapter")
    there = "WEIGHTS_DIR" if "v6e" in mesh else f"/dev/shm/{folder}"
    assert text.count(f"export {variable}={there}\n") == 2 and "(cd WEIGHTS_DIR && tar" in text
    assert not re.search(r"(cd |\$PWD/)s3:", text)


def test_serve_keys_become_vllm_flags() -> None:
    dockerfile = variant(*FULL)["serve/Dockerfile"]
    assert image_words(dockerfile)[3:] == [
        *["--served-model-name", "sample"],
        *["--host", "127.0.0.1"],
        *["--port", "9000"],
        *["--shutdown-timeout", "120"],
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
        "--disable-chunked-mm-input",
        "--async-scheduling",
        "--no-enable-log-requests",
        *["--seed", "3"],
        *["--hf-overrides", '{"a": "$b"}'],
    ]
    assert 'ENV RPA_V3_DECODE_BLOCK_SIZES="1,1024,1,1024"\n' in dockerfile


def test_serve_files_do_not_trust_remote_code() -> None:
    for changes in ({}, {"model": "someone/model"}, {"weights": "adapter"}):
        assert not any("trust" in text for text in variant(**changes).values())


def test_serve_image_uses_the_digest_of_the_recipe() -> None:
    digest = f"vllm/vllm-tpu@sha256:{'0' * 64}"
    files = variant(f"serve.image={digest}")
    assert f"\nARG BASE_IMAGE={digest}\nFROM ${{BASE_IMAGE}}\n" in files["serve/Dockerfile"]
    # The build downloads nothing, because the image has everything.
    assert not re.search(r"^(RUN|ADD|COPY)\b", files["serve/Dockerfile"], re.MULTILINE)
    assert pod_of(files["serve/k8s.yaml"])["containers"][0]["image"] == digest


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/health"),
        ("::1", "http://[::1]:8000/health"),
        ("0.0.0.0", "http://127.0.0.1:8000/health"),
        ("::", "http://[::1]:8000/health"),
    ],
)
def test_health_check_url_matches_server_host(host: str, url: str) -> None:
    program = served(base(), host=host)
    assert server_of(program).health_url == url
    assert f"urlopen('{url}'" in emit_serve(program)["serve/Dockerfile"]
    assert ("--host", host) in server_of(program).flags


@pytest.mark.parametrize("host", ["0.0.0.0", "tpu.example.com"])
def test_server_on_non_loopback_host_requires_api_key(host: str, tmp_path: Path) -> None:
    files = variant(host=host)
    (key,) = yaml(files["serve/compose.yaml"])["services"]["vllm"]["environment"]
    assert key.startswith("VLLM_API_KEY=${VLLM_API_KEY:?")
    with_model(tmp_path)
    refused = run_script(tmp_path, files["serve/serve.sh"])
    assert refused.status == 1 and refused.words == ()
    assert refused.stderr.startswith(
        f"error: VLLM_API_KEY is not set, and others can reach {host}\n  = help: "
    )
    started = run_script(tmp_path, files["serve/serve.sh"], VLLM_API_KEY="sentinel-of-a-test")
    assert started.environment["VLLM_API_KEY"] == "sentinel-of-a-test"
    assert not any("sentinel" in word for word in started.words)


@pytest.mark.parametrize(("given", "seconds"), [(None, 150), (5, 35), (0, 30)])
def test_requests_in_flight_have_time_to_finish(given: int | None, seconds: int) -> None:
    files = variant(extra_args={} if given is None else {"shutdown_timeout": given})
    assert yaml(files["serve/compose.yaml"])["services"]["vllm"]["stop_grace_period"] == f"{seconds}s"
    assert image_words(files["serve/Dockerfile"]).count("--shutdown-timeout") == 1
    pod = pod_of(files["serve/k8s.yaml"])
    before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == seconds + before


def test_serve_script_refuses_missing_weights_and_missing_vllm(tmp_path: Path) -> None:
    script = variant()["serve/serve.sh"]
    nowhere = str(tmp_path / "nowhere")
    refused = run_script(tmp_path, script, nowhere)
    assert refused.stderr == (
        f"error: {nowhere} holds no config.json\n"
        "  = help: run merge.py first, or name the folder in MODEL_DIR\n"
    )
    refused = run_script(with_model(tmp_path), script, stubs=[])
    assert refused.status == 1
    assert refused.stderr.startswith(
        "error: vllm is not installed\n  = help: in an environment of Python 3.12"
    )


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_serve_script_refuses_port_in_use(host: str, family: int, tmp_path: Path) -> None:
    with socket.socket(family) as taken:
        try:
            taken.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        taken.listen()
        port = taken.getsockname()[1]
        with_model(tmp_path)
        script = variant(host=host, port=port)["serve/serve.sh"]
        refused = run_script(tmp_path, script)
    assert refused.status == 1 and refused.words == ()
    assert refused.stderr.startswith(f"error: port {port} is in use\n")
    assert run_script(tmp_path, script).words


@pytest.mark.parametrize(
    ("accelerator", "label", "topology", "chips", "disk"),
    [
        ("v5e-8", "tpu-v5-lite-podslice", "2x4", 8, None),
        ("v5p-8", "tpu-v5p-slice", "2x2x1", 4, None),
        ("v6e-8", "tpu-v6e-slice", "2x4", 8, "hyperdisk-balanced"),
        ("tpu7x-2", "tpu7x", "1x1x1", 1, "hyperdisk-balanced"),
    ],
)
def test_pods_run_on_nodes_of_the_accelerator(
    accelerator: str, label: str, topology: str, chips: int, disk: str | None
) -> None:
    program = replace(base(), serve_accelerator=from_name(accelerator))
    found = objects(emit_serve(program)["serve/k8s.yaml"])
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {"google.com/tpu": chips}
    assert ("StorageClass" in found) == (disk is not None)
    if disk:
        assert found["StorageClass"]["parameters"] == {"type": disk}


@pytest.mark.parametrize("change", ["lora.rank=512", "lora.init=pissa_niter_4", "merge.dtype=float32"])
def test_each_disk_has_room_for_the_files_on_it(change: str, tmp_path: Path) -> None:
    sets = ["serve.weights=adapter", "serve.env.MODEL_IMPL_TYPE=vllm", "lora.rank=256", change]
    program = program_of(tmp_path, sets)
    files = {"adapter": 4 * program.trainable_parameters, "hub-cache": 2 * program.base_parameters}
    files["adapter"] *= 2 if "init" in change else 1
    claims = objects(emit_serve(program)["serve/k8s.yaml"])["StatefulSet"]["spec"]["volumeClaimTemplates"]
    disks = {one["metadata"]["name"]: one["spec"]["resources"]["requests"]["storage"] for one in claims}
    for name, size in files.items():
        assert int(disks[name].removesuffix("Gi")) * 2**30 > size * 1.1 + 5 * 2**30


def test_cpu_serving_has_no_kubernetes_manifest() -> None:
    program = replace(base(), serve_accelerator=from_name("cpu-8"))
    files = emit_serve(program)
    assert set(files) == {"serve/Dockerfile", "serve/compose.yaml", "serve/serve.sh"}


def test_pods_drop_privileges_and_require_api_key() -> None:
    pod = pod_of(variant()["serve/k8s.yaml"])
    (vllm,) = pod["containers"]
    assert "args" not in vllm and vllm["command"].count("--host") == 1
    assert vllm["command"][vllm["command"].index("--host") + 1] == "0.0.0.0"
    (key,) = [env for env in vllm["env"] if env["name"] == "VLLM_API_KEY"]
    assert key["valueFrom"] == {"secretKeyRef": {"name": "sample-serve", "key": "VLLM_API_KEY"}}
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
    for one in (vllm, *pod["initContainers"]):
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]
    startup = vllm["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 30 * 60


def test_autoscaling_scales_replicas_by_waiting_requests() -> None:
    alone = objects(variant()["serve/k8s.yaml"])
    assert alone["StatefulSet"]["spec"]["replicas"] == 1 and "HorizontalPodAutoscaler" not in alone
    assert alone["PodDisruptionBudget"]["spec"]["minAvailable"] == 1
    sets = ["serve.autoscaling={min_replicas: 2, max_replicas: 5, waiting_requests: 7}"]
    scaled = objects(variant(*sets)["serve/k8s.yaml"])
    assert "replicas" not in scaled["StatefulSet"]["spec"]
    assert scaled["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    scaler = scaled["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == scaled["StatefulSet"]["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 5)
    (metric,) = scaler["metrics"]
    assert metric["pods"]["metric"]["name"] == "prometheus.googleapis.com|vllm:num_requests_waiting|gauge"
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "7"}
    labels = scaled["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert scaled["PodMonitoring"]["spec"]["selector"]["matchLabels"] == labels
    assert scaled["PodMonitoring"]["spec"]["endpoints"][0]["port"] == "http"


def test_long_name_is_shortened_to_fit_pod_names() -> None:
    name = "a-name-that-is-as-long-as-names-may-be-which-is-63-characters-l"
    found = objects(variant(name=name)["serve/k8s.yaml"])
    app = found["StatefulSet"]["metadata"]["name"]
    assert name.startswith(app.removesuffix("-serve")) and len(f"{app}-0123456789") <= 63
    assert app.endswith("-serve") and "--" not in app
    assert name in found["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["command"]


def test_training_and_serving_share_no_object_names(tmp_path: Path) -> None:
    """Check that training and serving share no object name, including the JobSet's service and the secret."""
    files = files_of(tmp_path, ["checkpoint.directory=gs://my-bucket/run"])
    training, serving = (files[path].decode() for path in ("launch/jobset.yaml", "serve/k8s.yaml"))
    names = [{item["metadata"]["name"] for item in objects(text).values()} for text in (training, serving)]
    secrets = [set(re.findall(r"secretKeyRef:\n +name: (\S+)", text)) for text in (training, serving)]
    assert names[0] == {"sample"} == secrets[0]
    assert "sample-serve" in names[1] and secrets[1] == {"sample-serve"} and not names[0] & names[1]


def test_serve_env_value_with_line_break_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    found = lower(load(path, ['serve.env={A: "x\\nRUN rm -rf /"}']))
    assert found.program is None
    assert [d.path for d in found.diagnostics if d.code == "E0618"] == ["serve.env.A"]
