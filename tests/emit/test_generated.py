"""Tests that generated/ is up to date, and that every kind of emitted file passes its language's linters."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from emitting import BIN, EVERYTHING, compiled, files_of, tool

from recipec.compiler import catalog
from recipec.compiler.artifacts import artifact
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering.backend import Backend, others


def recipes(root: Path) -> list[Path]:
    found = sorted((root / "recipes").glob("*.yaml"))
    assert found
    return found


def unlike(paths: Iterable[Path]) -> list[Path]:
    """Return one of the files that differ only in words and numbers."""
    shapes = {re.sub(r"[\w./-]+", "x", path.read_text(encoding="utf-8")): path for path in sorted(paths)}
    assert shapes
    return list(shapes.values())


def test_generated_folder_is_up_to_date_with_the_recipes(root: Path, tmp_path: Path, update: bool) -> None:
    shutil.copytree(root / "recipes", tmp_path / "elsewhere")
    artifacts = {}
    for path in recipes(root):
        program = compiled(tmp_path / "elsewhere" / path.name)
        committed = root / "generated" / program.name
        program = replace(program, notebook=artifact.has_notebook(committed))
        backends = others(artifact.backends_of(committed))
        artifacts[program.name] = emit(program, backends)
    if update:
        artifact.write(root / "generated", artifacts)
    assert artifact.check(root / "generated", artifacts) == []
    folders = {path.name for path in (root / "generated").iterdir() if path.is_dir()}
    assert folders == {*artifacts}


def test_artifact_recipe_rebuilds_the_same_artifact(variants: Path) -> None:
    folders = [one for one in sorted(variants.iterdir()) if one.is_dir() and one.name != "runtime"]
    assert len(folders) == len(EVERYTHING)
    for folder in folders:
        found = {path: (folder / path).read_bytes() for path in artifact.locked_files(folder)}
        assert emit(compiled(folder / "recipe.yaml")) == found


def test_a_script_without_its_packages_says_how_to_install_them(root: Path, tmp_path: Path) -> None:
    program = compiled(root / "recipes" / "llama31-8b-v6e8.yaml")
    artifact.write(tmp_path, {"llama": emit(program, [Backend.TRL, Backend.TORCHAX])})
    for script, requirements in {
        tmp_path / "llama/train.py": "requirements-train.txt",
        tmp_path / "llama/merge.py": "requirements-train.txt",
        tmp_path / "llama/train_torchax.py": "requirements-torchax.txt",
        tmp_path / "llama/baseline/train_trl.py": "requirements-trl.txt",
        root / "generated/llama31-8b-v6e8/probe.py": "requirements-train.txt",
    }.items():
        done = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True, timeout=60)
        line = r"No module named '\w+': (pip install -r) (.*/)?" + re.escape(requirements)
        assert done.returncode == 1
        assert re.fullmatch(line, done.stderr.strip()), done.stderr


@pytest.mark.parametrize("which", ["committed", "variants"])
def test_generated_python_compiles_and_passes_ruff(which: str, root: Path, variants: Path) -> None:
    folder = root / "generated" if which == "committed" else variants
    scripts = sorted(folder.glob("*/*.py"))
    scripts = [path for path in scripts if path.parent.name != "runtime"]
    assert scripts
    for path in scripts:
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    # Next to runtime/, with ruff's defaults and with this project's rules.
    rules = "E4,E7,E9,F,I,UP,B,SIM,RUF"
    assert tool("ruff", "format", "--isolated", "--no-cache", "--check", "--diff", *scripts, cwd=folder) == ""
    assert tool("ruff", "check", "--isolated", "--no-cache", *scripts, cwd=folder) == ""
    assert tool("ruff", "check", "--isolated", "--no-cache", "--select", rules, *scripts, cwd=folder) == ""


def test_shell_scripts_pass_shellcheck(root: Path, variants: Path) -> None:
    scripts = [*variants.glob("*/**/*.sh"), *(root / "generated").glob("*/**/*.sh")]
    assert all(path.stat().st_mode & 0o111 for path in scripts)
    assert tool("shellcheck", "--severity=style", *unlike(scripts)) == ""


def test_dockerfiles_pass_hadolint(root: Path, variants: Path) -> None:
    files = [*variants.glob("*/serve/Dockerfile"), *(root / "generated").glob("*/serve/Dockerfile")]
    assert tool("hadolint", "--failure-threshold", "style", *unlike(files)) == ""


def test_compose_files_are_valid(root: Path, variants: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MODEL_DIR", "ADAPTER_DIR"):
        monkeypatch.setenv(variable, "/srv/model")
    monkeypatch.setenv("VLLM_API_KEY", "the key of a test")
    files = [*variants.glob("*/serve/compose.yaml"), *(root / "generated").glob("*/serve/compose.yaml")]
    for path in unlike(files):
        assert tool("docker-compose", "--file", path, "config", "--quiet") == ""


def test_kubernetes_manifests_are_valid(root: Path, variants: Path) -> None:
    files = [*variants.glob("*/serve/k8s.yaml"), *(root / "generated").glob("*/serve/k8s.yaml")]
    assert tool("kubernetes-validate", "--strict", *unlike(files)) == ""


def test_artifacts_contain_no_local_paths_or_index_urls(variants: Path, root: Path) -> None:
    for path in (*variants.rglob("*"), *(root / "generated").rglob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            assert str(root) not in text and str(variants) not in text, path
            assert "index-url" not in text


def test_readme_commands_pass_shellcheck(root: Path, variants: Path, tmp_path: Path) -> None:
    readmes = [*variants.glob("*/README.md"), *(root / "generated").glob("*/README.md")]
    for path in unlike(readmes):
        text = path.read_text(encoding="utf-8")
        assert "\n\n\n" not in text and not text.endswith("\n\n"), path
        blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert len(blocks) >= 3
        script = tmp_path / f"{path.parent.name}.sh"
        script.write_text("set -e\n" + "\n".join(blocks), encoding="utf-8")
    assert tool("shellcheck", "--shell=bash", *sorted(tmp_path.glob("*.sh"))) == ""


def test_special_characters_in_recipe_do_not_break_scripts(tmp_path: Path) -> None:
    folder = tmp_path / 'a"""b\\d'
    folder.mkdir()
    entry = catalog.entries()["google/gemma-4-31B-it"]
    (folder / "config.json").write_text(json.dumps(entry["config"]))
    files = files_of(tmp_path, [f"model.id={json.dumps('./' + folder.name)}", 'launch.zone="a\'b $c"'])
    for name in ("train.py", "merge.py"):
        (tmp_path / name).write_bytes(files[name])
        module = ast.parse(files[name])
        assert './a"""b\\d' in str(ast.get_docstring(module))
        assert tool("ruff", "format", "--isolated", "--no-cache", "--check", tmp_path / name) == ""
    assert '--zone="a\'b \\$c"' in files["README.md"].decode()


def test_build_is_the_same_for_any_hash_seed_locale_and_folder(root: Path, tmp_path: Path) -> None:
    recipe = root / "recipes" / "gemma4-31b-v5p8.yaml"
    trees = []
    for seed, locale, folder in (("1", "C", tmp_path), ("2", "C.UTF-8", root)):
        out = tmp_path / f"out-{seed}"
        environment = {"PYTHONHASHSEED": seed, "LC_ALL": locale, "PATH": "/usr/bin:/bin", "TZ": f"UTC{seed}"}
        command = [BIN / "recipe", "build", recipe, "-o", out]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=60)
        trees.append({p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()})
    assert trees[0] == trees[1]
