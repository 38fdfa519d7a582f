"""generated/ is what recipes/ gives, and every kind of emitted file passes the linters of its language."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from emitting import BIN, compiled, files_of, program_of, tool

from recipec.compiler.artifacts import artifact
from recipec.compiler.emitters.backends import others
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering import catalog

EVERYTHING = {
    "plain": ["serve=null"],
    "rules": [
        "sharding.rules=[{match: '.*mlp.down_proj.*', spec: [tp, fsdp]}, {match: 'final.*', spec: [null]}]",
        "mesh.axes={fsdp: 2, tp: 2}",
        "lora.layers=20-59",
        "model.revision=main",
    ],
    "lists": [
        "lora.layers=[0, 5, 11]",
        "lora.targets=['layers.[0-9]+.self_attn.q_proj', 'o_proj']",
        "data.train=[a.jsonl, gs://bucket/b.jsonl, a-rather-long-folder-name/a-rather-long-file-name.jsonl]",
        "data.eval=[eval.jsonl]",
        "data.fields={messages: conversation}",
        "checkpoint.directory=gs://a-bucket-with-a-long-name/some-rather-long-folder-name/another-folder/run-1",
    ],
    "constant": ["train.schedule={name: constant}", "train.steps=10", "train.optimizer.max_grad_norm=1.0"],
    "constant-warmup": ["train.schedule={name: constant, warmup_steps: 7}"],
    "linear": ["train.schedule={name: linear, final_ratio: 0.1}"],
    "linear-warmup": ["train.schedule={name: linear, warmup_steps: 3}", "train.steps=9"],
    "linear-ratio": ["train.schedule={name: linear, warmup_ratio: 0.03}"],
    "cosine": ["train.schedule={name: cosine}", "train.optimizer.learning_rate=2.5e-5"],
    "cosine-ratio": ["train.schedule={name: cosine, warmup_ratio: 0.1}"],
    "template": [
        'data.chat_template="{% for m in messages %}<|turn>{{ m.role }} {{ m.content }}<turn|>{% endfor %}"',
        "data.shuffle_seed=null",
    ],
    "template-file": ["data.chat_template=templates/a-folder-of-templates/a-template-with-a-long-name.jinja"],
    "served": [
        "serve.extra_args={max_log_len: 10, disable_log_stats: true, async_scheduling: false, "
        'ignore_patterns: [a b, c], limit_mm_per_prompt: {image: 0}, chat_template: "it\'s \\"$HOME\\""}',
        'serve.env={GREETING: \'say "hi" for $5 \\ now\', EMPTY: ""}',
        "serve.tool_call_parser=gemma4",
        "serve.tensor_parallel_size=4",
        "serve.data_parallel_size=2",
        "serve.quantization=fp8",
        "serve.prefix_caching=false",
        "serve.port=9000",
        "merge.output='merged weights'",
    ],
    "adapter": [
        "serve.weights=adapter",
        "serve.env={MODEL_IMPL_TYPE: vllm}",
        "serve.model=./base",
        "serve.autoscaling={max_replicas: 3}",
    ],
    "adapter-of-the-hub": [
        "serve.weights=adapter",
        "serve.env={MODEL_IMPL_TYPE: vllm}",
        "model.revision=main",
    ],
    "bucket": [
        "serve.model=gs://bucket/merged",
        "serve.host=0.0.0.0",
        "serve.autoscaling={min_replicas: 2, max_replicas: 4}",
    ],
    "adapter-in-a-bucket": [
        "serve.weights=adapter",
        "serve.env={MODEL_IMPL_TYPE: vllm}",
        "merge.output=gs://bucket/merged",
        "serve.host='::'",
    ],
    "hub": ["serve.model=somebody/merged", "serve.decode_block_sizes=[1, 1024, 1, 1024]"],
    "elsewhere": ["serve.model=~/models/merged", 'serve.smoke_prompts=["What\'s $HOME?"]'],
    "copied-by-hand": ["merge.output=s3://bucket/merged"],
    "evaluated": ["evaluate.tasks=[gsm8k]"],
    "v5e": ["serve.accelerator=v5e-8", "serve.kv_cache_dtype=auto"],
    "cpu": ["mesh={accelerator: cpu-8, axes: {fsdp: 4, tp: 2}}", "name=on", "model.dtype=float32"],
    "tpu7x": [
        "mesh={topology: 'tpu7x:1x1x1', axes: {fsdp: 2, tp: 1}}",
        "serve.accelerator=tpu7x-2",
        "serve.tensor_parallel_size=2",
    ],
    "long-name": ["name=a-name-that-is-as-long-as-names-may-be-which-is-63-characters-l"],
}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of artifacts that between them use every branch of the emitters."""
    folder = tmp_path_factory.mktemp("variants")
    artifacts: dict[str, Mapping[str, bytes]] = {}
    for name, sets in EVERYTHING.items():
        settled = sets if any(item.startswith("name=") for item in sets) else [f"name={name}", *sets]
        settled = [item.replace("name=on", "name='on'") for item in settled]
        template = folder / "recipes" / name / "templates/a-folder-of-templates"
        template.mkdir(parents=True)
        (template / "a-template-with-a-long-name.jinja").write_text("<|turn>{{ messages }}<turn|>")
        program = program_of(folder / "recipes" / name, settled)
        artifacts[program.name] = emit(program)
    artifact.write(folder / "generated", artifacts)
    return folder / "generated"


def recipes(root: Path) -> list[Path]:
    found = sorted((root / "recipes").glob("*.yaml"))
    assert found
    return found


def test_generated_is_what_the_recipes_give(root: Path, update: bool) -> None:
    artifacts = {}
    for path in recipes(root):
        program = compiled(path)
        backends = others(artifact.backends_of(root / "generated" / program.name))
        artifacts[program.name] = emit(program, backends)
    if update:
        artifact.write(root / "generated", artifacts)
    assert artifact.check(root / "generated", artifacts) == ""
    committed = {path.name for path in (root / "generated").iterdir() if path.is_dir()}
    assert committed == {*artifacts, "runtime"}


def test_a_rebuild_elsewhere_gives_the_same_bytes(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "recipes", tmp_path / "elsewhere")
    for path in recipes(root):
        assert emit(compiled(tmp_path / "elsewhere" / path.name)) == emit(compiled(path))


def test_an_artifacts_own_recipe_gives_the_artifact(variants: Path) -> None:
    folders = [one for one in sorted(variants.iterdir()) if one.is_dir() and one.name != "runtime"]
    assert len(folders) == len(EVERYTHING)
    for folder in folders:
        found = {path: (folder / path).read_bytes() for path in artifact.locked_files(folder)}
        assert emit(compiled(folder / "recipe.yaml")) == found


def test_the_runtime_is_copied_verbatim(variants: Path, root: Path) -> None:
    copied = {
        path: (variants / "runtime" / path).read_bytes() for path in artifact.modules(variants / "runtime")
    }
    assert copied == artifact.runtime_files()
    assert {path.suffix for path in (variants / "runtime").rglob("*") if path.is_file()} == {".py", ".sh"}


@pytest.mark.parametrize(
    ("script", "requirements"),
    [
        ("train.py", "requirements-train.txt"),
        ("merge.py", "requirements-train.txt"),
        ("train_torchax.py", "requirements-torchax.txt"),
        ("baseline/train_trl.py", "requirements-trl.txt"),
    ],
)
def test_a_script_without_its_packages_says_how_to_install_them(
    script: str, requirements: str, root: Path
) -> None:
    path = root / "generated" / "llama31-8b-v6e8" / script
    done = subprocess.run([sys.executable, "-S", path], capture_output=True, text=True, timeout=60)
    line = r"No module named '\w+': pip install -r (.*/)?" + re.escape(requirements)
    assert done.returncode == 1
    assert re.fullmatch(line, done.stderr.strip()), done.stderr


@pytest.mark.parametrize("which", ["committed", "variants"])
def test_python_is_compiled_formatted_and_linted(which: str, root: Path, variants: Path) -> None:
    folder = root / "generated" if which == "committed" else variants
    scripts = sorted(folder.glob("*/*.py"))
    scripts = [path for path in scripts if path.parent.name != "runtime"]
    assert scripts
    for path in scripts:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    # Where runtime/ is beside them; with ruff's defaults, and with this project's rules.
    rules = "E4,E7,E9,F,I,UP,B,SIM,RUF"
    assert tool("ruff", "format", "--isolated", "--no-cache", "--check", "--diff", *scripts, cwd=folder) == ""
    assert tool("ruff", "check", "--isolated", "--no-cache", *scripts, cwd=folder) == ""
    assert tool("ruff", "check", "--isolated", "--no-cache", "--select", rules, *scripts, cwd=folder) == ""


UNLIKE = ("generated/gemma3-4b-full-v6e8", "generated/qwen3-8b-dpo-v5e8", "variants/lists")
"""Artifacts whose scripts differ most: without adapters, of preferences, of LoRA with every list written."""


@pytest.mark.parametrize("which", ["unlike", pytest.param("all", marks=pytest.mark.nightly)])
def test_python_is_typed(which: str, root: Path, variants: Path, tmp_path: Path) -> None:
    # Scripts of several artifacts have the same names: mypy is given them under different ones.
    for kind, folder in (("generated", root / "generated"), ("variants", variants)):
        for path in folder.glob("*/*.py"):
            chosen = which == "all" or f"{kind}/{path.parent.name}" in UNLIKE
            if chosen and path.parent.name != "runtime":
                name = f"{path.parent.name}_{path.stem}".replace("-", "_")
                shutil.copy(path, tmp_path / f"script_{name}.py")
    # In the repository, whose runtime/ is what the copies beside the scripts are.
    scripts = sorted(tmp_path.glob("script_*.py"))
    assert len(scripts) >= 2 * len(UNLIKE)
    assert tool("mypy", *scripts, cwd=root) == ""


def test_shell_scripts_pass_shellcheck(root: Path, variants: Path) -> None:
    scripts = [*variants.glob("*/serve/*.sh"), *(root / "generated").glob("*/**/*.sh")]
    assert scripts
    assert all(path.stat().st_mode & 0o111 for path in scripts)
    assert tool("shellcheck", "--severity=style", *scripts) == ""


def test_dockerfiles_pass_hadolint(root: Path, variants: Path) -> None:
    files = [*variants.glob("*/serve/Dockerfile"), *(root / "generated").glob("*/serve/Dockerfile")]
    assert files
    assert tool("hadolint", "--failure-threshold", "style", *files) == ""


def test_compose_files_are_valid(root: Path, variants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MODEL_DIR", "ADAPTER_DIR"):
        monkeypatch.setenv(variable, "/srv/model")
    monkeypatch.setenv("VLLM_API_KEY", "the key of a test")
    files = [*variants.glob("*/serve/compose.yaml"), *(root / "generated").glob("*/serve/compose.yaml")]
    assert files
    for path in files:
        assert tool("docker-compose", "--file", path, "config", "--quiet") == ""


def test_manifests_are_those_of_kubernetes(root: Path, variants: Path) -> None:
    files = [*variants.glob("*/serve/k8s.yaml"), *(root / "generated").glob("*/serve/k8s.yaml")]
    assert files
    assert tool("kubernetes-validate", "--strict", *files) == ""


def test_nothing_of_the_machine_is_in_an_artifact(variants: Path, root: Path) -> None:
    for path in (*variants.rglob("*"), *(root / "generated").rglob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert str(root) not in text and str(variants) not in text, path
            assert "index-url" not in text


def test_without_serve_there_is_no_serve_folder(tmp_path: Path) -> None:
    assert not any(path.startswith("serve/") for path in files_of(tmp_path, ["serve=null"]))


def test_commands_in_the_readme_are_shell(root: Path, variants: Path, tmp_path: Path) -> None:
    readmes = [*variants.glob("*/README.md"), *(root / "generated").glob("*/README.md")]
    for path in readmes:
        text = path.read_text(encoding="utf-8")
        assert "\n\n\n" not in text and not text.endswith("\n\n"), path
        blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert len(blocks) >= 3
        script = tmp_path / f"{path.parent.name}.sh"
        script.write_text("set -e\n" + "\n".join(blocks), encoding="utf-8")
    assert tool("shellcheck", "--shell=bash", *sorted(tmp_path.glob("*.sh"))) == ""


def test_odd_texts_do_not_break_the_scripts(tmp_path: Path) -> None:
    folder = tmp_path / 'a"""b\\d'
    folder.mkdir()
    entry = json.loads(catalog.DATA.read_text())[
        "google/gemma-4-31B-it"
    ]
    (folder / "config.json").write_text(json.dumps(entry["config"]))
    files = files_of(tmp_path, [f"model.id={json.dumps('./' + folder.name)}", 'launch.zone="a\'b $c"'])
    for name in ("train.py", "merge.py"):
        (tmp_path / name).write_bytes(files[name])
        module = ast.parse(files[name])
        assert './a"""b\\d' in str(ast.get_docstring(module))
        assert tool("ruff", "format", "--isolated", "--no-cache", "--check", tmp_path / name) == ""
    assert '--zone="a\'b \\$c"' in files["README.md"].decode()


def test_the_bytes_do_not_depend_on_the_process(root: Path, tmp_path: Path) -> None:
    recipe = root / "recipes" / "gemma4-31b-v5p8.yaml"
    trees = []
    for seed, locale, folder in (("1", "C", tmp_path), ("2", "C.UTF-8", root)):
        out = tmp_path / f"out-{seed}"
        environment = {"PYTHONHASHSEED": seed, "LC_ALL": locale, "PATH": "/usr/bin:/bin", "TZ": f"UTC{seed}"}
        command = [BIN / "recipe", "build", recipe, "-o", out]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=60)
        trees.append({p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()})
    assert trees[0] == trees[1]
