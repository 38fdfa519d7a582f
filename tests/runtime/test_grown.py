"""Tests of vocabularies that grow, against transformers' resized model, with towers and with a head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime.decoders import make
from tests.runtime.references import grow
from tests.runtime.runs import write_merged


@pytest.mark.parametrize("case", ["gemma3", "phi3"])
def test_merged_grown_vocabulary_matches_transformers_resize(case: str, tmp_path: Path) -> None:
    import torch
    import transformers

    if case == "gemma3":
        model = tiny.make_gemma3(tmp_path / "base", num_hidden_layers=1)
    else:
        model = make(case, tmp_path / "base", num_hidden_layers=1)
    base = HFCheckpoint.open(tmp_path / "base")
    rows = base.architecture.vocab_size + 5
    grow(model, rows)
    wider = base.grown(rows)
    wider.verify()
    (tmp_path / "merged").mkdir()
    write_merged(wider, {}, tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert (config.get("text_config") or config)["vocab_size"] == rows
    assert HFCheckpoint.open(tmp_path / "merged").architecture == wider.architecture
    found = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "merged")
    expected = model.state_dict()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        tokens = torch.tensor([[5, rows - 1, 7]])
        torch.testing.assert_close(found(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="compiled for"):
        base.grown(4)


def test_byte_ranges_of_grown_tensor_match_whole_tensor(tmp_path: Path) -> None:
    make("phi3", tmp_path / "base", num_hidden_layers=1, vocab_size=400)
    wider = HFCheckpoint.open(tmp_path / "base").grown(403)
    whole = wider.read("lm_head.weight")
    own = HFCheckpoint.open(tmp_path / "base").read("lm_head.weight")
    assert np.array_equal(whole[:400], own) and np.array_equal(whole[400], whole[402])
    content = whole.tobytes()
    row = len(content) // 403
    for start, stop in (
        (399 * row - 4, 401 * row + 8),
        (400 * row + 4, 402 * row + 4),
        (402 * row, 403 * row),
    ):
        assert bytes(wider.bytes_of("lm_head.weight", start, stop)) == content[start:stop]
