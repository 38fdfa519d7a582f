"""Tests of train_trl.py's runs on the CPU: pieces, checkpoints, and the adapters that it reads and writes.

Whole runs are in `make e2e`. tests/parity compares a run with train.py number by number.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from recipec.compiler.lowering.backend import Backend
from recipec.runtime.backends.peft_model import labels
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.settings import DataSettings, TrainSettings
from recipec.runtime.training.trace import Trace, count_targets
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.parity.running import Case, Place

STEPS = 6


def case(lora: dict[str, Any] | None, **train: Any) -> Case:
    return Case(
        "meta-llama/Llama-3.1-8B-Instruct",
        ["full_attention"] * 2,
        {
            "remat": {"policy": "decoder"},
            "mesh": {"accelerator": "cpu-2", "axes": {"fsdp": 2, "tp": 1}},
            "lora": lora,
            "data": {"train": ["train.jsonl"], "eval": ["train.jsonl"], "max_length": 64, "packing": True},
            "train": {
                "steps": STEPS,
                "global_batch_size": 8,
                "micro_batch_size": 2,
                "eval_every": 3,
                "optimizer": {"learning_rate": 0.01, "max_grad_norm": 1.0},
                "schedule": {"name": "cosine", "warmup_steps": 1},
                "log": {"every": 2, "tensorboard": False},
                **train,
            },
            "checkpoint": {"directory": "checkpoints", "every_steps": 2, "keep": 2},
        },
    )


LORA = {
    "rank": 4,
    "alpha": 8,
    "rslora": True,
    "dropout": 0.25,
    "targets": ["q_proj", "v_proj", "layers.1.mlp.down_proj"],
    "rank_pattern": {"v_proj": 2},
    "alpha_pattern": {"q_proj": 3},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("trl"), case(LORA))


@pytest.fixture(scope="module")
def whole(place: Place) -> Trace:
    return place.train(Backend.TRL, "whole")


@pytest.mark.e2e
def test_resumed_run_equals_uninterrupted_run(place: Place, whole: Trace) -> None:
    """Compare bit for bit, with recomputation, and with dropout, whose masks differ from step to step."""
    first = place.train(Backend.TRL, "cut", "--steps", "3")
    rest = place.train(Backend.TRL, "cut", "--resume")
    assert rest.about["first_step"] == 4
    assert first.losses + rest.losses == whole.losses
    for name, array in whole.trained.items():
        assert np.array_equal(array, rest.trained[name]), name
    np.testing.assert_equal(rest.initial, first.trained)
    np.testing.assert_equal(first.rows + rest.rows, whole.rows)
    assert rest.gradients.keys() == whole.gradients.keys(), "of the step that it goes on with"
    kept = sorted(path.name for path in (place.folder / "cut" / "checkpoints-trl").glob("checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.e2e
def test_trl_metrics_have_trace_losses_evaluations_and_grad_norm(place: Place, whole: Trace) -> None:
    entries = place.logged("whole")
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    assert [entry["loss"] for entry in steps] == whole.losses
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [0, 3, 6]
    assert {"learning_rate", "grad_norm", "tokens", "tokens_per_second", "step_seconds"} <= set(steps[0])
    squares = sum(float((array.astype(np.float64) ** 2).sum()) for array in whole.gradients.values())
    assert steps[0]["grad_norm"] == pytest.approx(squares**0.5, rel=1e-5)


@pytest.mark.e2e
def test_checkpoint_without_trainer_state_is_ignored(place: Place, whole: Trace) -> None:
    """Use trainer_state.json, which is written last."""
    from recipec.runtime.backends.trl.trl_checkpoints import checkpoints

    directory = place.folder / "whole" / "checkpoints-trl"
    assert list(checkpoints(directory)) == [4, 6]
    state = directory / "checkpoint-6" / "trainer_state.json"
    content = state.read_bytes()
    state.unlink()
    assert list(checkpoints(directory)) == [4]
    state.write_bytes(content)


@pytest.mark.e2e
def test_peft_loads_the_saved_adapter_unchanged(place: Place, whole: Trace) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(place.folder / "model", dtype="float32")
    model: Any = PeftModel.from_pretrained(base, place.folder / "whole" / "adapter")
    prefix = "base_model.model.model."
    seen = 0
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            short = name.removeprefix(prefix).replace(".default.weight", "")
            assert np.array_equal(parameter.detach().numpy(), whole.trained[short]), name
            seen += 1
    assert seen == len(whole.trained) == 2 * 5
    attention = model.get_submodule(f"{prefix}layers.0.self_attn")
    assert attention.q_proj.scaling["default"] == pytest.approx(3 / 4**0.5)
    assert attention.v_proj.scaling["default"] == pytest.approx(8 / 2**0.5)


@pytest.mark.e2e
def test_a_run_begins_with_a_given_adapter(place: Place, whole: Trace) -> None:
    """Compare the evaluation before its first step with the adapter's last one."""
    adapter = place.folder / "whole" / "adapter"
    place.train(Backend.TRL, "onward", "--adapter", adapter, "--steps", "1")

    def evaluations(output: str) -> list[float]:
        return [entry["eval_loss"] for entry in place.logged(output) if "eval_loss" in entry]

    assert evaluations("onward")[0] == pytest.approx(evaluations("whole")[-1], abs=1e-6)


def refused(place: Place, capfd: pytest.CaptureFixture[str], output: str, *options: str) -> str:
    """Return stderr of a run that ends with status 1."""
    with pytest.raises(AssertionError, match="ended with 1"):
        place.train(Backend.TRL, output, *options)
    return capfd.readouterr().err


@pytest.mark.e2e
def test_existing_checkpoints_are_refused_without_resume(
    place: Place, whole: Trace, capfd: pytest.CaptureFixture[str]
) -> None:
    errors = refused(place, capfd, "whole")
    assert "already holds checkpoints, the newest of step 6" in errors and "help: --resume" in errors


@pytest.mark.e2e
def test_resume_refuses_changed_data(place: Place, whole: Trace, capfd: pytest.CaptureFixture[str]) -> None:
    data = place.folder / "train.jsonl"
    text = data.read_text()
    data.write_text(text + text.splitlines()[0] + "\n")
    try:
        errors = refused(place, capfd, "whole", "--resume")
    finally:
        data.write_text(text)
    assert "was trained on other data: fingerprint was" in errors


@pytest.mark.e2e
def test_missing_adapter_and_adapter_with_resume_are_refused(
    place: Place, whole: Trace, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    errors = refused(place, capfd, "none", "--adapter", str(tmp_path))
    assert "no adapter_config.json" in errors
    with pytest.raises(SystemExit) as ended:
        from recipec.runtime.backends.trl.trl_run import parse

        parse("train_trl.py", tmp_path, ["--resume", "--adapter", "x"])
    assert ended.value.code == 2


def test_start_from_adapter_is_resolved_in_the_data_dir(tmp_path: Path) -> None:
    from recipec.runtime.backends.backend_arguments import parse_arguments as parse

    lora = LoraSettings(rank=1, alpha=1.0, dropout=0.0, targets=("q_proj",))
    given = parse("train_trl.py", tmp_path, ["--data-dir", str(tmp_path / "data")])
    places = {"first": tmp_path / "data" / "first", "gs://b/first": "gs://b/first", None: None}
    assert {place: given.start_from(replace(lora, start_from=place)) for place in places} == places
    other = parse("train_trl.py", tmp_path, ["--adapter", "other"])
    assert other.start_from(replace(lora, start_from="first")) == Path("other")


@pytest.mark.e2e
def test_sigterm_ends_run_after_current_step_with_a_checkpoint(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that its checkpoint is kept, and that the status is the signal's."""
    from runtime.backends.trl.pieces import Pieces

    build = Pieces.of

    def interrupted(self: Pieces, number: int) -> Any:
        if number == 2 * self.per_step + 1:
            signal.raise_signal(signal.SIGTERM)
        return build(self, number)

    monkeypatch.setattr(Pieces, "of", interrupted)
    with pytest.raises(AssertionError, match=f"ended with {128 + signal.SIGTERM}"):
        place.train(Backend.TRL, "stopped")
    kept = {path.name for path in (place.folder / "stopped" / "checkpoints-trl").glob("checkpoint-*")}
    assert kept == {"checkpoint-2", "checkpoint-3"}


@pytest.mark.e2e
def test_full_fine_tuning_saves_the_trained_model(tmp_path: Path) -> None:
    place = Place(tmp_path, case(None, steps=2, schedule={"name": "constant"}))
    trace = place.train(Backend.TRL, "full")
    base, trained = HFCheckpoint.open(tmp_path / "model"), HFCheckpoint.open(tmp_path / "full" / "model")
    trained.verify()
    assert trained.tensors.keys() == base.tensors.keys()
    assert trace.initial == {} and len(trace.rows) == 2, "it begins with the base's tensors"
    for name, array in trace.trained.items():
        assert np.array_equal(trained.read(name), array), name
        assert not np.array_equal(base.read(name), array), name
    assert trained.side_files == base.side_files

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "full" / "model", dtype="float32")
    assert np.array_equal(
        model.get_output_embeddings().weight.detach().numpy(), trace.trained["lm_head.weight"]
    )


@pytest.mark.parametrize("normalization", ["tokens", "micro_batches"])
@pytest.mark.parametrize(("processes", "rows"), [(1, 2), (2, 2), (4, 2), (8, 1)])
def test_any_number_of_processes_computes_the_same_step(
    place: Place, normalization: str, processes: int, rows: int
) -> None:
    """Check that each row comes once, in order, with train.py's factor, also in a short last step."""
    from recipec.runtime.backends.trl.pieces import Pieces

    train = TrainSettings(epochs=2, global_batch_size=8, micro_batch_size=2, loss_normalization=normalization)
    settings = DataSettings(train=("train.jsonl",), eval=("train.jsonl",), max_length=64, packing=True)
    data = place.prepared(settings, train)
    train = TrainSettings(epochs=2, global_batch_size=8, micro_batch_size=rows)
    made = [Pieces(data, train, process, processes) for process in range(processes)]
    for step in range(data.total_steps):
        batches = [data.micro_batch(step * data.accumulation + part) for part in range(data.accumulation)]
        tokens = np.concatenate([batch["tokens"] for batch in batches])
        counted = sum(
            (labels(batch["tokens"], batch["segment_ids"], batch["loss_mask"]) != -100).sum()
            / float(batch["norm"])
            / data.accumulation
            for batch in batches
        )
        pieces = [one.of(step * one.per_step + part) for part in range(made[0].per_step) for one in made]
        assert np.array_equal(np.concatenate([piece["input_ids"] for piece in pieces]), tokens)
        weighed = sum(float(((piece["labels"] != -100).sum(1) * piece["weights"]).sum()) for piece in pieces)
        assert weighed == pytest.approx(counted, rel=1e-6)
        targets = sum(int((piece["labels"] != -100).sum()) for piece in pieces)
        assert targets == sum(map(count_targets, batches))
    held_out = [one.evaluation() for one in made]
    assert len({len(pieces) for pieces in held_out}) == 1
    weighed = sum(
        float(((piece["labels"] != -100).sum(1) * piece["weights"]).sum())
        for pieces in held_out
        for piece in pieces
    )
    assert weighed == pytest.approx(1.0, rel=1e-6)


@pytest.mark.e2e
def test_early_stopped_run_does_not_continue_on_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stop by transformers' own callback. A resumed run stops at the same step."""
    early = case(LORA, eval_every=1, early_stopping={"patience": 2, "min_delta": 100.0})
    early.recipe["data"]["eval"] *= 2
    place = Place(tmp_path, early, [Backend.TUNIX, Backend.TRL])
    place.train(Backend.TRL, "whole")
    why = "(early stopping after step 3: no progress in 2 evaluations; eval_loss was lowest, "
    assert capfd.readouterr().out.startswith("done: steps=3 ")
    place.train(Backend.TRL, "cut", "--steps", "2")
    for _ in range(2):
        place.train(Backend.TRL, "cut", "--resume")
        said = capfd.readouterr()
        assert why in said.out and why[1:] in said.err
    for output in ("whole", "cut"):
        folder = tmp_path / output / "checkpoints-trl"
        state = json.loads((folder / "state.json").read_text())
        assert (state["state"], state["total"]) == ("done", STEPS) and why[1:] in state["reason"]
        losses = [entry for entry in place.logged(output) if "eval_loss" in entry]
        assert [entry["step"] for entry in losses] == [0, 1, 2, 3]
        for entry in losses:
            both = [value for name, value in entry.items() if name.startswith("eval/")]
            assert both == pytest.approx([entry["eval_loss"]] * 2, rel=1e-6)
