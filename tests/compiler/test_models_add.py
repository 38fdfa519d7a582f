"""Tests of `recipe models add`, and of `recipe new` with an id that no catalog has, with a fake hub."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import catalog
from recipec.compiler.errors import ArtifactError
from recipec.runtime.weights.safetensors_files import encode_header, prefix
from tests.compiler import commands
from tests.compiler.added_models import COMMIT, CONFIG, FOLDER, ID, checkpoint
from tests.compiler.commands import command
from tests.compiler.hub_server import (
    CUT,
    CUT_ONCE,
    OLDER,
    WHOLE,
    Hub,
    Repository,
    reached_by,
    serving,
)

BROUGHT = {
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "tensors.json", "model.lock.json"),
}
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return a repository's files: weights in two files, and files that nobody needs."""
    found = checkpoint(tmp_path_factory.mktemp("repository") / "model")
    return {
        **found,
        "README.md": b"# A model",
        "modeling_evil.py": b"raise SystemExit",
        "pytorch.bin": b"\0" * 99,
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Set up the hub with one model, an empty folder, and no pause between retries."""
    server.models = {ID: Repository(dict(files))}
    server.requests.clear()
    server.cut.clear()
    reached_by(server, monkeypatch.setattr, str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return server


def recipe(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the command: exit status, stdout and stderr, with errors as the command prints them."""
    try:
        return commands.recipe(*arguments)
    except ArtifactError as error:
        return 1, "", f"error: {error}\n  = help: {error.help}\n"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_models_add_downloads_every_needed_file_except_weights(hub: Hub, files: dict[str, bytes]) -> None:
    status, out, errors = recipe("models", "add", ID)
    assert status == 0, errors
    assert out == (
        f"models/somebody--Qwen3-tiny: {ID} at commit {COMMIT}, 6 files; "
        "24 tensors of 2 files with 0.0 GB listed\n"
    )
    assert names(FOLDER) == BROUGHT
    lock = json.loads((FOLDER / "model.lock.json").read_bytes())
    assert {key: lock[key] for key in ("lock", "id", "revision", "commit")} == {
        "lock": 1,
        "id": ID,
        "revision": None,
        "commit": COMMIT,
    }
    for name, sha256 in lock["files"].items():
        content = (FOLDER / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == sha256
        assert name == "tensors.json" or content == files[name]
    assert lock["files"].keys() == BROUGHT - {"model.lock.json"}


def test_model_that_no_family_describes_is_added(hub: Hub) -> None:
    shapes = {"model.embed_tokens.weight": (64, 8), "model.layers.0.self_attn.q_proj.weight": (8, 8)}
    config = {"model_type": "helium", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    tensors, end = {}, 0
    for name, (rows, columns) in shapes.items():
        offsets = [end, end := end + 2 * rows * columns]
        tensors[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": offsets}
    head = json.dumps(tensors).encode()
    weights = len(head).to_bytes(8, "little") + head + bytes(end)
    repository = {"config.json": json.dumps(config).encode(), "model.safetensors": weights}
    hub.models["somebody/helium-tiny"] = Repository(repository)
    status, out, errors = recipe("models", "add", "somebody/helium-tiny")
    assert (status, errors.startswith("next: ")) == (0, True), errors
    assert "2 tensors of 1 file" in out
    found = catalog.find("somebody/helium-tiny", Path())
    assert not found.family.tunix and found.architecture.num_layers == 1


def test_models_add_reads_only_the_headers_of_weight_files(hub: Hub, files: dict[str, bytes]) -> None:
    from safetensors import deserialize

    recipe("models", "add", ID)
    listed = json.loads((FOLDER / "tensors.json").read_bytes())
    assert listed == {
        file: {name: [tensor["dtype"], tensor["shape"]] for name, tensor in deserialize(files[file])}
        for file in (FIRST, SECOND)
    }
    shards = [request for request in hub.requests if request[2].endswith(".safetensors")]
    assert {headers["range"] for *_, headers in shards} == {"bytes=0-7", "bytes=0-100000"}
    assert not [path for path in hub.asked("hub") if path.endswith((".bin", ".py", ".md"))]


def test_hf_endpoint_and_hf_token_are_used_and_the_cdn_gets_no_token(hub: Hub, tmp_path: Path) -> None:
    """Run in a new process, which reads the variables as usual. The CDN never gets the token."""
    hub.models[ID].gated = True
    given = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    done = command("models", "add", ID, HF_TOKEN=hub.token, **given)
    assert done.returncode == 0, done.stderr
    assert names(FOLDER) == BROUGHT and not done.stderr.count("Traceback")
    assert not [1 for server, *_, headers in hub.requests if server == "cdn" and "authorization" in headers]


def test_lock_records_the_requested_revision_and_its_commit(hub: Hub) -> None:
    assert recipe("models", "add", ID, "--revision", "v1", "-o", "elsewhere/models")[0] == 0
    lock = json.loads((Path("elsewhere") / FOLDER / "model.lock.json").read_bytes())
    assert (lock["revision"], lock["commit"]) == ("v1", OLDER)


def test_hub_file_names_that_leave_the_folder_are_ignored(hub: Hub) -> None:
    hub.models[ID].files |= {f"additional_chat_templates/{name}.jinja": b"x" for name in ("a", "../../../b")}
    recipe("models", "add", ID)
    assert names(Path()) == {f"{FOLDER}/{name}" for name in BROUGHT | {"additional_chat_templates/a.jinja"}}


def test_slow_tokenizer_is_downloaded_if_no_fast_tokenizer_exists(hub: Hub) -> None:
    hub.models[ID].files["tokenizer.model"] = b"sentencepiece"
    del hub.models[ID].files["tokenizer.json"]
    recipe("models", "add", ID)
    assert names(FOLDER) == BROUGHT - {"tokenizer.json"} | {"tokenizer.model"}


Broken = Callable[[Repository], None]


def lies(fields: dict[str, Any] | bytes, length: int | None = None) -> Broken:
    """Return a fault that adds a second file with this header."""

    def change(repository: Repository) -> None:
        raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        start = (len(raw) if length is None else length).to_bytes(8, "little")
        repository.files[SECOND] = start + raw + b"\0" * 8

    return change


def entry(**changed: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changed}


def config(**changed: Any) -> Broken:
    def change(repository: Repository) -> None:
        repository.files["config.json"] = json.dumps(copy.deepcopy(CONFIG) | changed).encode()

    return change


def gone(name: str) -> Broken:
    return lambda repository: repository.files.pop(name) and None


def holds(name: str, content: bytes) -> Broken:
    return lambda repository: repository.files.__setitem__(name, content)


def fault(name: str, what: str) -> Broken:
    return lambda repository: repository.faults.__setitem__(name, what)


def index(weight_map: Any) -> Broken:
    return holds(INDEX, json.dumps({"weight_map": weight_map}).encode())


REFUSED: dict[str, tuple[Broken, str]] = {
    "gated": (lambda r: setattr(r, "gated", True), "its terms have to be accepted on the hub"),
    "private": (lambda r: setattr(r, "private", True), "the hub has no such model, or it is private"),
    "cut for good": (fault("tokenizer.json", CUT), "the connection to"),
    "a size that lies": (lambda r: r.sizes.update({"tokenizer.json": 5}), "tokenizer.json"),
    "a file that is too large": (lambda r: r.sizes.update({"tokenizer.json": 1 << 40}), "more than the"),
    "a header cut for good": (fault(SECOND, CUT), "the connection to"),
    "whole files for parts": (
        fault(FIRST, WHOLE),
        f"a part of {FIRST} was requested, but the whole file was sent",
    ),
    "a header longer than all": (lies(b"{}", 1 << 62), f"the header of {SECOND}"),
    "a shape below zero": (lies(entry(shape=[-2])), "a size or an offset is not a whole number"),
    "a shape without its bytes": (lies(entry(shape=[3])), "bytes that do not fit its shape"),
    "a file that is not there": (gone(SECOND), f"names {SECOND}, which does not exist"),
    "an index of another folder": (index({"a": "../a"}), "not one of the repository's folder"),
    "an index that is none": (holds(INDEX, b"\xff"), "has no weight_map"),
    "an index of other tensors": (index({"a": FIRST, "b": SECOND}), f"names a in {FIRST}"),
    "no weights": (gone(INDEX), "neither model.safetensors nor"),
    "no config": (gone("config.json"), "it has no config.json"),
    "a config that is none": (holds("config.json", b"[1]"), "is not a JSON object"),
    "another kind of model": (config(model_type="t5"), "cannot be trained by this version"),
    "its own code": (
        config(model_type="evil", auto_map={"AutoConfig": "modeling_evil.Config"}),
        "(modeling_evil.Config): such code is never run",
    ),
    "stored by AWQ": (config(quantization_config={"quant_method": "awq"}), "stored quantized (AWQ)"),
    "heads that do not divide": (config(num_key_value_heads=3), "does not divide"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_failed_models_add_gives_one_error_and_leaves_no_files(kind: str, hub: Hub) -> None:
    change, said = REFUSED[kind]
    change(hub.models[ID])
    status, out, errors = recipe("models", "add", ID)
    assert (status, out) == (1, ""), errors
    assert errors.startswith("error: `somebody/Qwen3-tiny`") and said in errors and "\n  = help: " in errors
    assert not names(Path()) and not Path("models").exists()


@pytest.mark.parametrize("kind", ["a file that is not there", "a header cut for good"])
def test_failed_models_add_keeps_the_existing_folder(kind: str, hub: Hub) -> None:
    recipe("models", "add", ID)
    before = {name: (FOLDER / name).read_bytes() for name in names(FOLDER)}
    hub.models[ID].revisions = {"main": OLDER}
    REFUSED[kind][0](hub.models[ID])
    assert recipe("models", "add", ID)[0] == 1
    assert {name: (FOLDER / name).read_bytes() for name in names(FOLDER)} == before


def test_models_add_of_another_commit_replaces_the_files(hub: Hub) -> None:
    recipe("models", "add", ID)
    hub.models[ID].revisions = {"main": OLDER}
    del hub.models[ID].files["chat_template.jinja"]
    assert recipe("models", "add", ID)[0] == 0
    assert json.loads((FOLDER / "model.lock.json").read_bytes())["commit"] == OLDER
    assert names(Path("models")) == {f"{FOLDER.name}/{name}" for name in BROUGHT - {"chat_template.jinja"}}


def test_models_add_does_not_replace_files_of_the_user(hub: Hub) -> None:
    FOLDER.mkdir(parents=True)
    (FOLDER / "config.json").write_text("mine")
    status, _, errors = recipe("models", "add", ID)
    assert status == 1 and f"{FOLDER} exists, and `recipe models add` did not write it" in errors
    assert (FOLDER / "config.json").read_text() == "mine" and names(Path()) == {f"{FOLDER}/config.json"}


@pytest.mark.parametrize("name", ["tokenizer.json", FIRST])
def test_models_add_retries_after_a_broken_connection(name: str, hub: Hub) -> None:
    hub.models[ID].faults[name] = CUT_ONCE
    status, _, errors = recipe("models", "add", ID)
    assert status == 0 and name in hub.cut, errors
    assert names(FOLDER) == BROUGHT


@pytest.mark.parametrize("size", [None, [128, 128]])
def test_model_with_fp8_weights_is_added(size: Any, hub: Hub) -> None:
    config(quantization_config={"quant_method": "fp8", "weight_block_size": size})(hub.models[ID])
    status, _, errors = recipe("models", "add", ID)
    assert status == 0 and names(FOLDER) == BROUGHT, errors


@pytest.mark.parametrize("wrong", ["", "a b/c", "../x", "x" * 200])
def test_invalid_model_id_gives_an_error(wrong: str, hub: Hub) -> None:
    status, out, errors = recipe("models", "add", wrong)
    assert (status, out) == (1, "") and errors.startswith("error: `") and not names(Path())


def test_without_huggingface_hub_it_says_what_to_install(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipec.compiler.hub.fetch.missing_packages", lambda names: [*names])
    status, _, errors = recipe("models", "add", ID)
    assert status == 1 and "[hub]" in errors
    assert "huggingface_hub, which asks the hub, is not installed" in errors


def test_large_safetensors_header_takes_a_second_range_request(hub: Hub) -> None:
    entries = {f"model.layers.{i}.x" + "y" * 200: ("F32", (1,), 4) for i in range(600)}
    data = prefix(encode_header(entries, {})) + b"\0" * 2400
    hub.models[ID].files["model.safetensors"] = data
    assert recipe("models", "add", ID)[0] == 0
    assert sum(map(len, json.loads((FOLDER / "tensors.json").read_bytes()).values())) == 600
    ranges = [headers["range"] for *_, path, headers in hub.requests if path.endswith("//model.safetensors")]
    assert ranges[0] == "bytes=0-7" and len(ranges) == 3


NEW = ("new", "demo", "--model", ID, "--accelerator", "v6e-1")


def test_recipe_new_adds_a_model_missing_from_the_catalog(hub: Hub) -> None:
    status, out, errors = recipe(*NEW)
    assert status == 0, errors
    assert names(Path()) == {
        *("recipes/demo.yaml", "recipes/recipe.schema.json"),
        *(f"recipes/{FOLDER}/{name}" for name in BROUGHT),
    }
    assert out.startswith(f"recipes/{FOLDER}: {ID} at commit {COMMIT}")
    assert f" id: {ID} " in Path("recipes/demo.yaml").read_text()
    hub.models.clear()
    assert recipe("check", "recipes/demo.yaml")[0] == 0
    assert recipe("new", "other", *NEW[2:])[0] == 0  # which sends no request to a hub


def test_recipe_new_on_a_terminal_asks_again_for_an_unknown_model(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipec.compiler.new.ask.possible", lambda: True)
    answers = f"nobody/nothing\n{ID}\nv6e-1\nhere.jsonl\nnone\n"
    Path("here.jsonl").write_text('{"text": "a"}\n')
    result = commands.RUNNER.invoke(commands.cli.app, ["new", "demo"], input=answers)
    assert result.exit_code == 0, result.output
    assert "`nobody/nothing`: the hub has no such model, or it is private" in result.output
    assert names(Path()) == {
        *("demo.yaml", "recipe.schema.json", "here.jsonl"),
        *(f"{FOLDER}/{name}" for name in BROUGHT),
    }


@pytest.mark.parametrize(
    ("change", "said", "way_out"),
    [
        (
            ("HF_HUB_OFFLINE", True),
            "and HF_HUB_OFFLINE is set, so the hub is not used",
            "unset HF_HUB_OFFLINE",
        ),
        (
            ("ENDPOINT", "http://127.0.0.1:9"),
            "and the hub was not reached at http://127.0.0.1:9 (",
            "check the network, HF_ENDPOINT and proxies",
        ),
    ],
)
def test_recipe_new_without_a_hub_gives_the_reason_and_help(
    change: tuple[str, Any], said: str, way_out: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"huggingface_hub.constants.{change[0]}", change[1])
    status, _, errors = recipe(*NEW)
    assert status == 1 and errors.startswith(f"error: `{ID}` is not in the catalog, {said}")
    assert f"help: {way_out}; or run `recipe models add`" in errors and not names(Path())


def test_recipe_new_suggests_a_similar_id_for_an_unknown_model(hub: Hub) -> None:
    status, _, errors = recipe("new", "demo", "--model", "google/gemma4-31b-it", "--accelerator", "v5p-8")
    assert status == 1 and "the hub has no such model" in errors
    assert "did you mean `google/gemma-4-31B-it`?" in errors and not names(Path())


def test_port_adds_the_model_that_the_catalog_lacks(hub: Hub) -> None:
    Path("config.yaml").write_text(
        f"model_name_or_path: {ID}\ndataset_name: some/rows\nassistant_only_loss: true\n"
        "use_peft: true\nlora_target_modules: all-linear\n"
    )
    Path("out").mkdir()
    arguments = ("port", "config.yaml", "--devices", "1", "-o", "out/recipe.yaml")
    code, _, errors = recipe(*arguments)
    assert code == 1 and "E0801" in errors and "--add-model" in errors and not hub.requests
    code, _, errors = recipe(*arguments, "--add-model")
    assert code == 0, errors
    assert "E0801" not in errors and Path("out/models").is_dir()
    assert "gate_proj" in Path("out/recipe.yaml").read_text()
    assert recipe("check", "out/recipe.yaml")[0] == 0
