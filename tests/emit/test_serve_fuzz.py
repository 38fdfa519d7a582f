"""Fuzz tests: hostile texts in a recipe reach the server unchanged, in every file of serve/, and run nothing.

A fixed seed combines texts that are special to a shell, YAML, Docker, docker compose or Kubernetes. The real
tools then read the files: bash with stubs that record their arguments, docker compose, and two YAML readers.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml
from emitting import BIN
from ruamel.yaml import YAML
from serve_programs import base, expanded, image_environment, image_words, run_script, served, server_of

from recipec.compiler.artifacts.runtime import requirement, wheel_file
from recipec.compiler.checks import server_flags as serve_flags
from recipec.compiler.emitters.server import (
    CONTAINER_PLACES,
    emit_bench,
    emit_evaluate,
    emit_serve,
    emit_smoke,
    serving_name,
)
from recipec.compiler.lowering.facts import gather
from recipec.compiler.lowering.program import Program
from recipec.compiler.vllm.container import Container
from recipec.spec.diagnostics import has_errors, render_text

CASES = 80
RUN = 20
"""How many of them a shell runs, which is slow."""

CANARY = "canary-of-a-test"

PIECES = [
    *("$(touch CANARY)", "`touch CANARY`", "; touch CANARY;", "&& touch CANARY", "| touch CANARY"),
    *("> CANARY", "$HOME", "${HOME}", "${X:-y}", "$$", "$", "$(HOME)", "$$(HOME)", "${", "}"),
    *("{{ name }}", "{% raw %}"),
    *('"', "'", "\\", "\\n", '\\"', "''", '""', "`", "!", "!!", "*", "?", "[", "]", "~", "^", "|", "&"),
    *("#", " #", ": ", ":", "- ", "-", "--", "&a", "*a", "!!python/object", "%", "@", ">", "|-", ", ", "? "),
    *(" ", "  ", "a", "Z", "9", "0x1", "1e3", "null", "yes", "on"),
    *("=", "+", "/", ".", ",", "(", ")", "<", ";"),
    *("ü", "日本", "\U0001f600", "é", "\u00a0", "\u2028", "\ufeff", "\u200b", "ß"),
    *("FROM scratch", "RUN touch CANARY", "EOF", "ENV A=b", "privileged: true", "image: evil"),
]

BREAKS = ["\n", "\t", "\r\n", "\n\n", "\nRUN touch CANARY\n", "\n  - evil", "\x1b[2J", "\x7f", "\x85"]
"""Line breaks and control characters, for flags and folders, where the language accepts them."""


@dataclass(frozen=True)
class Case:
    program: Program
    server: Container
    files: dict[str, str]


def text(random: random.Random, breaks: bool = False, longest: int = 6) -> str:
    pieces = PIECES + BREAKS if breaks else PIECES
    return "".join(random.choices(pieces, k=random.randint(1, longest))).replace("CANARY", CANARY)


def printable(random: random.Random) -> str:
    return "".join(c for c in text(random) if c.isprintable())


def folder(random: random.Random) -> str:
    """Return a folder below the artifact's. merge.py accepts any name that the file system accepts."""
    name = text(random, breaks=True).strip("/").replace("/", "_").replace("..", "_")
    return f"m{name}" if random.random() < 0.5 else f"runs/{name or 'm'}."


RUNS = {"smoke": "smoke", "bench": "bench", "eval": "evaluate"}
"""The modules that the client scripts run."""

IMAGES = ["vllm/vllm-tpu:v0.32.0", "a:1", "registry.example.com:5000/a/b@sha256:" + "0" * 64]


def changes(random: random.Random) -> dict[str, Any]:
    """Return a serve section, and a few keys of other sections."""
    out: dict[str, Any] = {
        "name": random.choice(["sample", "on", "null", "y", "e1", "a-b-c"]),
        "merge__output": folder(random),
        "model__revision": text(random, breaks=True),
        "weights": random.choice(["merged", "adapter"]),
        "host": random.choice(["127.0.0.1", "localhost", "0.0.0.0"]),
        "image": random.choice(IMAGES),
        "smoke_prompts": [text(random, breaks=True) for _ in range(random.randint(1, 3))],
        "evaluate__prompts": text(random, breaks=True),
        "evaluate__tasks": ["t" + text(random), "gsm8k"],
        "env": {f"NAME_{i}": printable(random) for i in range(random.randint(0, 3))} | {"EMPTY": ""},
        "extra_args": {
            "chat_template": "c" + text(random, breaks=True),
            "ignore_patterns": ["m" + text(random, breaks=True), "n" + text(random)],
            "hf_overrides": {text(random, breaks=True): [text(random, breaks=True), None, 1.5]},
        },
    }
    place = random.random()
    if place < 0.2:
        out["model"] = "gs://" + text(random, breaks=True)
    elif place < 0.4:
        out["model"] = random.choice(["./", "~/", "-", ""]) + "m" + text(random).replace("..", "_")
    elif place < 0.5:
        out["model"] = "google/gemma-4-31B-it"
    return out


def cases() -> Iterator[Case]:
    found = random.Random(20261121)
    program = base()
    for _ in range(CASES):
        one = served(program, **changes(found))
        yield Case(one, server_of(one), emit_serve(one))


@pytest.fixture(scope="module")
def hostile() -> list[Case]:
    return list(cases())


def test_serve_checks_accept_hostile_values(hostile: list[Case], tmp_path: Path) -> None:
    facts, found = gather(base().recipe, tmp_path / "recipe.yaml")
    assert not has_errors(found)
    for case in hostile:
        given = replace(facts, recipe=case.program.recipe)
        found = list(serve_flags.check(given))
        assert not has_errors(found), render_text(found)


def test_dockerfile_keeps_hostile_command_and_environment(hostile: list[Case]) -> None:
    instructions = {"ARG", "FROM", "ENV", "EXPOSE", "HEALTHCHECK", "CMD", "ENTRYPOINT"}
    for case in hostile:
        dockerfile = case.files["serve/Dockerfile"]
        assert tuple(image_words(dockerfile)) == case.server.entrypoint
        assert image_environment(dockerfile) == case.server.environment
        # In a Dockerfile, only \n ends a line.
        starts = {line.split(" ")[0] for line in dockerfile.split("\n") if line and line[0] not in "# "}
        assert starts <= instructions, starts


@pytest.mark.parametrize("version", ["1.1", "1.2"])
def test_pod_manifest_keeps_hostile_command_and_environment(version: str, hostile: list[Case]) -> None:
    # The YAML 1.2 reader is slow.
    for case in hostile if version == "1.1" else hostile[:20]:
        manifest = case.files["serve/k8s.yaml"]
        if version == "1.1":
            objects = [*pyyaml.load_all(manifest, pyyaml.CSafeLoader)]
        else:
            objects = [*YAML(typ="safe", pure=True).load_all(manifest)]
        (stateful,) = [item for item in objects if item and item["kind"] == "StatefulSet"]
        assert stateful["metadata"]["name"] == serving_name(case.server.name)
        pod = stateful["spec"]["template"]["spec"]
        (vllm,) = pod["containers"]
        environment = {"HOME": "evil"} | {env["name"]: env.get("value", "evil") for env in vllm["env"]}
        # The service connects to the pod by the pod's own address.
        words = [*case.server.entrypoint]
        words[words.index("--host") + 1] = "0.0.0.0"
        assert [expanded(word, environment) for word in vllm["command"]] == words
        assert (
            case.server.environment.items()
            <= {name: expanded(value, environment) for name, value in environment.items()}.items()
        )
        assert vllm["image"] == case.server.base_image
        copies = [c["command"] for c in pod.get("initContainers", []) if c["name"].startswith("fetch-")]
        assert [tuple(expanded(word, {"HOME": "evil"}) for word in copy) for copy in copies] == [
            fetch.command for fetch in case.server.fetches
        ]


def test_docker_compose_keeps_hostile_mounts_and_copy_commands(hostile: list[Case], tmp_path: Path) -> None:
    given = {"MODEL_DIR": "/given/$HOME", "ADAPTER_DIR": "/given/a"}
    for case, services in composed(hostile, tmp_path, **given):
        vllm = services["vllm"]
        assert vllm["image"] == case.server.name and vllm["privileged"] is True
        assert [(v["type"], v["target"], v["source"]) for v in vllm["volumes"]] == [
            (v.kind, v.target, given[v.variable] if v.variable else v.source) for v in case.server.volumes
        ]
        assert [tuple(services[fetch.name]["command"]) for fetch in case.server.fetches] == [
            fetch.command for fetch in case.server.fetches
        ]


def test_docker_compose_resolves_hostile_folder_names(hostile: list[Case], tmp_path: Path) -> None:
    # A default ends at the first } and at the line's end, so that compose.yaml requires such a folder.
    demanding = [case for case in hostile if any(set(v.source) & {"}", "\n"} for v in case.server.volumes)]
    assert demanding and all("_DIR:?the folder of " in case.files["serve/compose.yaml"] for case in demanding)
    chosen = [case for case in hostile if case not in demanding]
    assert len(chosen) > CASES / 3
    for i, (case, services) in enumerate(composed(chosen, tmp_path, HOME="/home/$x")):
        binds = {v["target"]: v["source"] for v in services["vllm"]["volumes"] if v["type"] == "bind"}
        places = {v.target: v.source for v in case.server.volumes if v.kind == "bind"}
        assert binds == {
            target: os.path.normpath(
                f"/home/$x{place[1:]}" if place[:2] == "~/" else tmp_path / str(i) / place
            )
            for target, place in places.items()
        }


def composed(cases: list[Case], folder: Path, **environ: str) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield each case's compose.yaml as docker compose reads it.

    Docker compose starts slowly. So all files are parts of one file, with the case's number after each
    service.
    """
    for i, case in enumerate(cases):
        names = ("vllm", *(fetch.name for fetch in case.server.fetches))
        lines = [
            f"{line[:-1]}-{i}:" if line.strip(" :") in names else line
            for line in case.files["serve/compose.yaml"].split("\n")
        ]
        (folder / f"{i}/serve").mkdir(parents=True)
        (folder / f"{i}/serve/compose.yaml").write_text("\n".join(lines), encoding="utf-8")
    parts = [f"{i}/serve/compose.yaml" for i in range(len(cases))]
    (folder / "all.yaml").write_text(json.dumps({"name": "all", "include": parts}))
    command = [BIN / "docker-compose", "--file", folder / "all.yaml", "config", "--format", "json"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "VLLM_API_KEY": "k", **environ}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not any(folder.rglob(CANARY))
    # The output is a file for docker compose, so that it doubles every $.
    found = json.loads(done.stdout.replace("$$", "$"))["services"]
    for i, case in enumerate(cases):
        ending = f"-{i}"
        yield case, {name.removesuffix(ending): one for name, one in found.items() if name.endswith(ending)}


def test_serve_script_passes_hostile_arguments_unexecuted(hostile: list[Case], tmp_path: Path) -> None:
    for i, case in enumerate(hostile[:RUN]):
        here = tmp_path / str(i)
        places = {}
        for name, weights in (("model", case.server.model), ("adapter", case.server.adapter)):
            if weights is None or not weights.local:
                continue
            if weights.kind == "bucket":
                places[name] = f"{here}/.cache/{case.server.name}/{name}"
                continue
            home = weights.address.startswith("~/")
            places[name] = f"{here}{weights.address[1:]}" if home else f"{here}/serve/../{weights.address}"
            (here / "serve").mkdir(parents=True, exist_ok=True)
            Path(places[name]).mkdir(parents=True, exist_ok=True)
            for file in ("config.json", "adapter_config.json", "generation_config.json"):
                (Path(places[name]) / file).write_text("{}")
        here.mkdir(exist_ok=True)
        ran = run_script(here, case.files["serve/serve.sh"], VLLM_API_KEY="k")
        assert ran.status == 0, ran.stderr
        own = f"{places.get('adapter')}"
        expected = [word.replace("=/adapter", f"={own}") for word in case.server.entrypoint]
        expected = [own if word == "/adapter" else word for word in expected]
        expected[2] = places.get("model", expected[2])
        assert list(ran.words) == expected
        passed = {
            name: value for name, value in case.server.environment.items() if name not in CONTAINER_PLACES
        }
        assert passed.items() <= ran.environment.items()
        assert [words[3] for words in ran.copied] == [fetch.command[-2] for fetch in case.server.fetches]
        assert not any(path.name == CANARY for path in here.rglob(CANARY) if path.is_file())


def test_client_scripts_pass_hostile_arguments_unexecuted(hostile: list[Case], tmp_path: Path) -> None:
    for i, case in enumerate(hostile[: RUN // 2]):
        recipe, program = case.program.recipe, case.program
        assert recipe.serve is not None and recipe.evaluate.prompts is not None
        files = {**emit_smoke(program), **emit_bench(program), **emit_evaluate(program)}
        (here := tmp_path / str(i)).mkdir()
        (here / "requirements-train.txt").write_text(f"{requirement()}\n")
        (tmp_path / wheel_file()).touch()
        words = {
            name: run_script(here, files[f"serve/{name}.sh"], stubs=["python3"]).client
            for name in ("smoke", "bench", "eval")
        }
        assert [name for name in words if words[name][:2] == ("-m", "runtime.clients." + RUNS[name])] == [
            *RUNS
        ]
        assert [w for w in words["smoke"] if w.startswith("--must-differ=")] == [
            f"--must-differ={prompt}" for prompt in recipe.serve.smoke_prompts
        ]
        assert f"{here}/serve/../{recipe.evaluate.prompts}" in words["eval"]
        assert set(recipe.evaluate.tasks) <= set(words["eval"])
        assert not any(path.is_file() for path in here.rglob(CANARY))
