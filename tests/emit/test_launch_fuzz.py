"""Fuzz tests of launch/ and README.md with hostile values.

Each file's reader must return the values unchanged, and run none of them. The checks refuse values that no
quoting can fix.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emitting import program_of
from launch_shapes import BASE, SHAPES
from markdown_it import MarkdownIt
from ruamel.yaml import YAML

from recipec.compiler.checks import launch, paths
from recipec.compiler.emitters.launch import emit_launch
from recipec.compiler.emitters.readme import emit_readme
from recipec.compiler.lowering.facts import gather
from recipec.compiler.lowering.program import Program
from recipec.compiler.render import code_span
from recipec.spec.diagnostics import has_errors

CASES = 20
RUN = 6
"""How many of them are run: the slowest readers are the shells."""

CANARY = "CANARY"

PIECES = [
    *("a", "-b", "run", " ", "  ", ".", "..", "=", ",", ":", "@", "%", "+", "~", "^", "#", " #", ": ", "- "),
    *("$", "$$", "$(touch CANARY)", "`touch CANARY`", "${HOME}", ";touch CANARY;", "&&touch CANARY", "|"),
    *(">CANARY", '"', "'", '"""', "''", "\\", '\\"', "\\'", "*", "?", "[", "]", "{", "}", "{{", "}}", "{%"),
    *("!", "(", ")", "```", "``", "`", "<b>", "](x)", "|---|", "é", "語", "🙂"),
    *("null", "yes", "1e3", "--flag", "EOF", "!!x", "&a"),
]
"""Texts without line breaks, which the checks refuse, and without outer blanks, which nobody intends."""


def text(found: random.Random) -> str:
    return "a" + "".join(found.choices(PIECES, k=found.randint(1, 5))).replace("CANARY", CANARY) + "z"


def changed(program: Program, found: random.Random) -> Program:
    recipe = program.recipe
    keys = ("project", "zone", "runtime_version", "network", "subnetwork", "service_account", "cluster")
    launched: dict[str, Any] = {key: text(found) for key in keys}
    if found.random() < 0.5:
        launched["reservation"] = text(found)
    launched["image"] = text(found).replace(" ", "")
    log = recipe.train.log.model_copy(update={"wandb_project": text(found)})
    updates = {
        "launch": recipe.launch.model_copy(update=launched),
        "checkpoint": recipe.checkpoint.model_copy(update={"directory": f"gs://bucket/{text(found)}"}),
        "merge": recipe.merge.model_copy(
            update={"output": found.choice(["merged", f"gs://bucket/{text(found)}"])}
        ),
        "model": recipe.model.model_copy(update={"revision": text(found)}),
        "train": recipe.train.model_copy(update={"log": log}),
    }
    return replace(program, recipe=recipe.model_copy(update=updates))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Program, dict[str, str]]]:
    found = random.Random(20261123)
    shapes = [
        program_of(tmp_path_factory.mktemp(shape), [*BASE, *SHAPES[shape]])
        for shape in ("one-host", "four-hosts", "slices-of-four")
    ]
    programs = [changed(shapes[number % len(shapes)], found) for number in range(CASES)]
    return [(program, emit_launch(program) | {"README.md": emit_readme(program)}) for program in programs]


def test_launch_checks_accept_hostile_values(hostile: list[tuple[Program, dict[str, str]]]) -> None:
    for program, _ in hostile:
        facts, diagnostics = gather(program.recipe, program.source)
        diagnostics += [*paths.check(facts), *launch.check(facts)]
        assert not has_errors(diagnostics), diagnostics


def test_jobset_yaml_keeps_hostile_values_and_has_two_objects(
    hostile: list[tuple[Program, dict[str, str]]],
) -> None:
    for program, files in hostile:
        objects = list(YAML(typ="safe", pure=True).load_all(files["launch/jobset.yaml"]))
        assert [one["kind"] for one in objects] == ["ServiceAccount", "JobSet"]
        settings = program.recipe.launch
        account = objects[0]["metadata"]["annotations"]["iam.gke.io/gcp-service-account"]
        (slices,) = objects[1]["spec"]["replicatedJobs"]
        pod = slices["template"]["spec"]["template"]["spec"]
        assert account == settings.service_account
        assert [container["image"] for container in pod["containers"]] == [settings.image]
        assert pod["nodeSelector"].get("cloud.google.com/reservation-name") == settings.reservation
        assert set(pod) <= {
            *("restartPolicy", "serviceAccountName", "automountServiceAccountToken", "nodeSelector"),
            *("tolerations", "hostNetwork", "dnsPolicy", "terminationGracePeriodSeconds"),
            *("initContainers", "containers", "volumes"),
        }


def test_skypilot_job_keeps_hostile_zone_and_has_no_extra_keys(
    hostile: list[tuple[Program, dict[str, str]]],
) -> None:
    for program, files in hostile:
        if "launch/skypilot.yaml" not in files:
            continue
        task = YAML(typ="safe", pure=True).load(files["launch/skypilot.yaml"])
        zone = program.recipe.launch.zone or ""
        region = zone.rpartition("-")[0]
        assert task["resources"]["infra"] == (f"gcp/{region}/{zone}" if region else "gcp")
        assert set(task) <= {
            *("name", "num_nodes", "resources", "envs", "secrets", "file_mounts", "setup", "run")
        }


COMMANDS = {
    "tpu-vm.sh": [["--dry-run", command] for command in ("up", "stage", "logs", "merge", "fetch")]
    + [["--dry-run", "fetch", "merged"]],
    "xpk.sh": [["create"], ["status"]],
    "host.sh": [["stage"]],
}
"""Commands that together use every value of the scripts."""


def scripts(files: dict[str, str], here: Path) -> Iterator[Path]:
    for name, content in files.items():
        if name.endswith(".sh"):
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_text(content)
            yield here / name


def test_launch_scripts_pass_hostile_values_unexecuted(
    hostile: list[tuple[Program, dict[str, str]]], tmp_path: Path, root: Path
) -> None:
    """Check that gcloud, xpk and hf receive the values unchanged; stubs record their arguments."""
    for number, (program, files) in enumerate(hostile[:RUN]):
        here = tmp_path / str(number)
        name, settings = program.name, program.recipe.launch
        (stubs := here / "stubs").mkdir(parents=True)
        (here / "venv/bin").mkdir(parents=True)
        (here / "runtime").symlink_to(root / "runtime")
        for stub in (stubs / "xpk", stubs / "gcloud", here / "venv/bin/hf"):
            stub.write_text(
                '#!/bin/sh\nprintf "%s\\n" "$@" >> "$WORDS"\n[ "$1" != config ] || echo "a b$(echo)@x"\n'
            )
            stub.chmod(0o755)
        (here / name).mkdir()
        for file in ("recipe.lock.json", "requirements-train.txt"):
            (here / name / file).write_text("{}\n")
        (stubs / "df").write_text("#!/bin/sh\necho 99999999\n")  # free MiB
        (stubs / "df").chmod(0o755)
        subprocess.run(["tar", "czf", f"{name}.tar.gz", "--files-from=/dev/null"], cwd=here, check=True)
        environment = {
            **{"PATH": f"{stubs}:/usr/bin:/bin", "HOME": str(here), "WORDS": str(here / "words")},
            **{"WEIGHTS": str(here / "weights"), "POLL_SECONDS": "0"},
        }
        said = ""
        for script in scripts({f"{name}/{path}": content for path, content in files.items()}, here):
            subprocess.run(["bash", "-n", script], check=True)
            for arguments in COMMANDS[script.name]:
                done = subprocess.run(
                    ["bash", script, *arguments],
                    cwd=here,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                said += done.stdout
        assert not [path for path in here.rglob("*") if path.is_file() and CANARY in path.name]
        words = (here / "words").read_text().splitlines()
        assert f"--cluster={settings.cluster}" in words and f"--base-docker-image={settings.image}" in words
        assert f"--zone={settings.zone}" in words and f"--project={settings.project}" in words
        assert program.recipe.model.revision in words
        # Read the output of --dry-run as a shell does.
        shown = subprocess.run(
            ["bash", "-c", 'while IFS= read -r line; do eval "set -- $line"; printf "%s\\n" "$@"; done'],
            input="\n".join(line for line in said.splitlines() if line.startswith("gcloud")),
            capture_output=True,
            text=True,
            cwd=here,
        ).stdout.splitlines()
        assert {f"--network={settings.network}", f"--service-account={settings.service_account}"} <= set(
            shown
        )


def test_hostile_values_add_no_blocks_or_headings_to_readme(
    hostile: list[tuple[Program, dict[str, str]]], tmp_path: Path
) -> None:
    """Check that all code blocks are code, and that all headings are those of every README.md."""
    for program, files in hostile[:RUN]:
        page = files["README.md"]
        blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert page.count("\n```") == 2 * len(blocks)
        for block in blocks:
            subprocess.run(["bash", "-n"], input=block, text=True, check=True)
        assert re.findall(r"^#+ (.*)$", re.sub(r"^```sh\n.*?^```$", "", page, flags=re.M | re.S), re.M) == [
            *(program.name, "The run", "Verified", "Launch", "Probe", "Base weights"),
            *("Train", "Merge", "Clean up"),
        ]
        prose = re.sub(r"(`+)( ?).*?\2\1(?!`)", "", re.sub(r"^```sh\n.*?^```$", "", page, flags=re.M | re.S))
        assert CANARY not in prose and "<b>" not in prose


def test_code_span_renders_hostile_text_unchanged() -> None:
    found = random.Random(20261124)
    for written in ("`", "``a", "a`", *(text(found) for _ in range(200))):
        (inline,) = [token for token in MarkdownIt().parse(f"in {code_span(written)}.") if token.children]
        shown = [(token.type, token.content) for token in inline.children or ()]
        assert shown == [("text", "in "), ("code_inline", written.replace("|", "\\|")), ("text", ".")]
