"""A whole probe on virtual CPU devices, and its merged miniature in the real vLLM server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import vllm_cpu
from tests.runtime.probed import build, environment_of, run

pytestmark = pytest.mark.e2e

SERVE = (
    "serve={accelerator: v6e-1, tensor_parallel_size: 1, max_model_len: 256, max_num_seqs: 4, "
    "max_num_batched_tokens: 256, kv_cache_dtype: auto}"
)


@dataclass(frozen=True)
class Probed:
    """A probe that has run.

    Attributes:
        mini: the folder of its merged miniature.
        printed: what it printed.
    """

    artifact: Path
    environment: Mapping[str, str]
    mini: Path
    printed: str

    @property
    def text(self) -> str:
        return (self.artifact / "probe.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Probed:
    folder = tmp_path_factory.mktemp("probed")
    artifact = build(folder, SERVE)
    environment, mini = environment_of(artifact), folder / "mini"
    mini.mkdir()
    ran = run(artifact, environment, "--merged", str(mini))
    assert ran.returncode == 0, ran.stderr
    return Probed(artifact, environment, mini, ran.stdout)


@pytest.fixture(scope="module")
def url(probed: Probed) -> Iterator[str]:
    with vllm_cpu.serve(probed.mini, "probe", "--served-model-name", probed.artifact.name) as server:
        yield server.url


def test_probe_reports_machine_numerics_step_time_and_merge(probed: Probed) -> None:
    found: dict[str, Any] = json.loads(probed.text)
    assert found["machine"]["devices"] == 4 and found["problems"] == []
    places = {(one["where"], one["dtype"]) for one in found["numbers"]}
    named = ("the recipe's mesh", "fsdp 4, tp 1", "another order of the devices")
    assert places == {(where, dtype) for where in named for dtype in ("float32", "bfloat16")}
    assert all("elements" in one for one in found["numbers"])
    # Three layers, three more, and a line through both: eight.
    few, more = found["time"]["depths"]
    assert (few["layers"], more["layers"], found["time"]["layers"]) == (3, 6, 8)
    layer = (more["seconds"] - few["seconds"]) / 3
    assert found["time"]["step_seconds"] == pytest.approx(2 * (more["seconds"] + 2 * layer))
    # The parts of a traced step, along the same line.
    parts = found["time"]["parts"]
    assert few["parts"]["products"] > 0 and few["parts"]["collectives"] > 0
    taken = few["parts"]["other"], more["parts"]["other"]
    assert parts["other"] == pytest.approx(max(0, taken[0] + 5 / 3 * (taken[1] - taken[0])))
    assert "seconds of a micro-batch: products" in probed.printed
    assert more["compiled_bytes"] > few["compiled_bytes"] > 0
    assert 0 < found["merge"]["logits"] <= found["merge"]["logits_allowed"] < found["merge"]["effect"]
    assert "seconds of a step, 8 layers" in probed.printed
    # The report is small, and identifies nobody.
    assert len(probed.text) < 10_000
    for secret in ("confidential", "secret-model", "/", os.uname().nodename):
        assert secret not in probed.text


def test_real_vllm_gives_the_merged_miniatures_answers(probed: Probed, url: str) -> None:
    """All four answers are equal in float32. A damaged answer is reported with its position."""
    ran = run(probed.artifact, probed.environment, "--merged", str(probed.mini), "--server", url)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(probed.text)
    assert told["server"]["answers"] == told["server"]["same"] == 4 and told["problems"] == []
    assert told["server"]["first_token_seconds"] > 0 and told["server"]["token_seconds"] > 0
    assert told["time"]["depths"]  # the first call's figures are kept

    other = probed.mini.with_name("other")
    shutil.copytree(probed.mini, other)
    answers = json.loads((other / "answers.json").read_text(encoding="utf-8"))
    answers["answers"][1]["tokens"][4] += 1
    answers["answers"][1]["leads"][4] = 1.0
    (other / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    ran = run(probed.artifact, probed.environment, "--merged", str(other), "--server", url)
    assert ran.returncode == 1
    assert "the server's answer 2 differs from the merged miniature's at token 5" in ran.stdout
