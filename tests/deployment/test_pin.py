"""Tests of `recipe serve pin` with a fake engine behind Docker's own SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipec.compiler import packages
from recipec.compiler.deployment import docker_engine as engines
from recipec.compiler.errors import ArtifactError
from recipec.compiler.vllm.image_name import ImageName
from recipec.spec.language import Serve
from tests.compiler.commands import recipe
from tests.deployment.fake_engine import FakeEngine, fake_engine

OLD, NEW = (f"sha256:{digit * 64}" for digit in "01")
TPU = ["linux/amd64", "linux/arm64"]
DEFAULT = Serve.model_fields["image"].default

RECIPE = """\
# A recipe that is not whole: only its server is.
recipe: 1
serve:
  # What serves it.
  accelerator: v6e-8
  image:   {image}   # from the publisher
  port: 8001
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.chdir(tmp_path)
    with fake_engine() as running:
        monkeypatch.setenv("DOCKER_HOST", running.host)
        yield running


@pytest.mark.parametrize(
    ("image", "asked", "pinned"),
    [
        ("vllm/vllm-tpu:v0.32.0", "vllm/vllm-tpu:v0.32.0", f"vllm/vllm-tpu:v0.32.0@{NEW}"),
        (f'"localhost:5000/a/b:1@{OLD}"', "localhost:5000/a/b:1", f'"localhost:5000/a/b:1@{NEW}"'),
        ("'localhost:5000/a/b'", "localhost:5000/a/b:latest", f"'localhost:5000/a/b:latest@{NEW}'"),
        ("vllm-tpu:v1@sha256:abc", "vllm-tpu:v1", f"vllm-tpu:v1@{NEW}"),
        (f"vllm-tpu@{NEW}", f"vllm-tpu@{NEW}", f"vllm-tpu@{NEW}"),
    ],
)
def test_pin_writes_the_digest_and_changes_nothing_else(
    image: str, asked: str, pinned: str, engine: FakeEngine
) -> None:
    path = Path("a.yaml")
    path.write_bytes(RECIPE.format(image=image).replace("\n", "\r\n").encode())
    engine.registry[asked] = (NEW, TPU)
    current = image == pinned
    assert recipe("serve", "pin", path, "--check")[0] == (0 if current else 1)
    assert recipe("serve", "pin", path)[0] == 0
    text = RECIPE.format(image=pinned).replace("\n", "\r\n").encode()
    assert path.read_bytes() == text
    written = path.stat()
    for words in (("--check",), ()):
        status, out, _ = recipe("serve", "pin", path, *words)
        assert (status, path.read_bytes()) == (0, text)
        assert (
            out == f"a.yaml has image: {pinned.strip(chr(34)).strip(chr(39))}, as the registry has it now\n"
        )
    assert path.stat() == written
    assert engine.requests.count(f"GET /distribution/{asked}/json") == 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("serve: {accelerator: v6e-8}  # x\n", "serve: {image: IMAGE, accelerator: v6e-8}  # x\n"),
        ("serve: {}\n", "serve: {image: IMAGE}\n"),
        (
            "serve:\n  # What serves it.\n  accelerator: v6e-8\n  port: 8001\n",
            "serve:\n  # What serves it.\n  accelerator: v6e-8\n  image: IMAGE\n  port: 8001\n",
        ),
        ("serve:\n    port: 8001", "serve:\n    image: IMAGE\n    port: 8001"),
    ],
)
def test_pin_adds_the_default_image_with_its_digest(before: str, after: str, engine: FakeEngine) -> None:
    Path("a.yaml").write_text(f"recipe: 1\n{before}")
    engine.registry[DEFAULT] = (NEW, [])
    status, out, _ = recipe("serve", "pin", "a.yaml")
    assert (status, out) == (0, f"a.yaml: image: {DEFAULT}@{NEW} (was {DEFAULT})\n")
    assert Path("a.yaml").read_text() == f"recipe: 1\n{after.replace('IMAGE', f'{DEFAULT}@{NEW}')}"


def test_image_of_another_file_is_told_with_its_place(engine: FakeEngine) -> None:
    Path("base.yaml").write_text(RECIPE.format(image="x:1"))
    Path("a.yaml").write_text("recipe: 1\nextends: base.yaml\nserve: {port: 1}\n")
    status, _, errors = recipe("serve", "pin", "a.yaml")
    assert status == 1 and errors == (
        "error[E0667]: `serve.image` is not in a.yaml: it comes from base.yaml, line 6\n"
        " --> base.yaml:6:12\n"
        "  |\n"
        "6 |   image:   x:1   # from the publisher\n"
        "  |            ^^^\n"
        "  = help: recipe serve pin base.yaml; or write serve.image into this recipe\n"
        "\n"
        "1 error\n"
    )
    engine.registry["x:1"] = (NEW, TPU)
    assert recipe("serve", "pin", "base.yaml")[0] == 0
    Path("base.yaml").write_text("recipe: 1\nserve: {accelerator: v6e-8}\n")
    Path("a.yaml").write_text("recipe: 1\nextends: base.yaml\n")
    assert (
        "E0667]: `serve` is not in a.yaml: it comes from base.yaml, line 2"
        in recipe("serve", "pin", "a.yaml")[2]
    )
    assert Path("a.yaml").read_text() == "recipe: 1\nextends: base.yaml\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("recipe: 1\nname: x\n", "E0667]: the recipe has no section serve, and thus no image"),
        (
            "recipe: 1\nserve:\n  image:\n    base:1\n    @sha256\n".replace("\n    @", "@\n    "),
            "E01",
        ),
        ("recipe: 1\nserve: {image: 'a\\'\n", "E00"),
        ("recipe: 1\nserve: {image: [1]}\n", "E01"),
    ],
)
def test_recipe_without_a_place_for_the_digest_is_not_changed(
    text: str, code: str, engine: FakeEngine
) -> None:
    Path("a.yaml").write_text(text)
    status, _, errors = recipe("serve", "pin", "a.yaml")
    assert status == 1 and errors.startswith(f"error[{code}"), errors
    assert Path("a.yaml").read_text() == text and engine.requests == []


def refusal() -> str:
    """Return why a recipe is not pinned, and what helps."""
    with pytest.raises(ArtifactError) as caught:
        recipe("serve", "pin", "a.yaml")
    return f"{caught.value}\n{caught.value.help}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            (404, "manifest unknown"),
            "docker.io has no image x:1 for this user: manifest unknown\ncheck the name and the tag; "
            "for a private registry: docker login docker.io",
        ),
        (
            (500, "dial tcp: lookup registry-1.docker.io: no such host"),
            "the engine got no answer about x:1 from docker.io: dial tcp: lookup "
            "registry-1.docker.io: no such host\ncheck the network of the engine's machine",
        ),
        (
            (NEW, ["linux/arm64"]),
            "x:1 has linux/arm64, and TPU machines are linux/amd64\nname an image for that platform",
        ),
    ],
)
def test_registry_without_the_image_gives_one_sentence(
    answer: tuple[object, object], error: str, engine: FakeEngine
) -> None:
    text = RECIPE.format(image="x:1")
    Path("a.yaml").write_text(text)
    engine.registry["x:1"] = answer
    assert refusal() == error
    assert Path("a.yaml").read_text() == text


def test_missing_engine_and_missing_sdk_name_a_way_out(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.yaml").write_text(RECIPE.format(image="x:1"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert refusal() == (
        "recipe serve pin needs a Docker engine, and none answers at unix:///nowhere.sock: No such file or "
        "directory\nstart it (sudo systemctl start docker), or name another one in DOCKER_HOST; or copy the "
        "digest from the registry's page, and write image: x:1@sha256:DIGEST"
    )
    monkeypatch.setattr(engines, "missing_packages", list)
    assert refusal() == (
        f"recipe serve pin needs Docker's SDK, which is not installed\n{packages.install('serve')}"
    )


@pytest.mark.parametrize(
    ("text", "parts", "registry"),
    [
        ("a", ("a", "", ""), "docker.io"),
        ("vllm/vllm-tpu:v1", ("vllm/vllm-tpu", "v1", ""), "docker.io"),
        ("localhost/a:1", ("localhost/a", "1", ""), "localhost"),
        ("h:5000/a/b", ("h:5000/a/b", "", ""), "h:5000"),
        (f"h.x/a:1@{NEW}", ("h.x/a", "1", NEW), "h.x"),
    ],
)
def test_image_name_is_split_at_its_last_colon(text: str, parts: tuple[str, ...], registry: str) -> None:
    name = ImageName.read(text)
    assert (name.repository, name.tag, name.digest) == parts
    assert (str(name), name.registry, name.valid_digest) == (text, registry, bool(parts[2]))
