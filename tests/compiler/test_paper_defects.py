"""Tests of the ten defects of the reference run: `recipe check` finds each, or none can be written."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable

from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering.lower import Lowered
from recipec.compiler.lowering.program import Program

Lower = Callable[..., Lowered]


def only(lowered: Lowered, code: str) -> str:
    """Return the message of the only diagnostic with that code."""
    found = [d for d in lowered.diagnostics if d.code == code]
    assert len(found) == 1, [d.code for d in lowered.diagnostics]
    return found[0].message


def files(lowered: Lowered) -> dict[str, str]:
    assert lowered.program is not None, lowered.diagnostics
    return {path: content.decode() for path, content in emit(lowered.program).items()}


def keywords(source: str, function: str) -> dict[str, object]:
    """Return the constant keyword arguments of a call in a generated script."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            return {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg and _is_literal(k.value)}
    raise AssertionError(f"no call of {function}")


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def program(lowered: Lowered) -> Program:
    assert lowered.program is not None, lowered.diagnostics
    return lowered.program


def test_1_targets_regex_of_fused_names_names_the_missed_layers(lowered: Lower) -> None:
    run = lowered('lora.targets=[".*(q_einsum|kv_einsum|attn_vec_einsum|gate_proj|up_proj|down_proj)"]')
    assert run.program is None
    message = only(run, "E0301")
    assert "10 layers of Gemma 4 31B (5, 11, 17, 23, 29, 35, 41, 47, 53, 59)" in message
    adapted = {name for a in program(lowered()).adapters for name in (part.name for part in a.projections)}
    assert {f"layers.{i}.self_attn.k_proj" for i in range(60)} <= adapted


def test_2_another_familys_tokenizer_or_turn_markup_is_an_error(lowered: Lower) -> None:
    run = lowered("model.tokenizer=google/gemma-3-27b-it")
    assert "is a tokenizer of Gemma 3" in only(run, "E0403")
    run = lowered("data.chat_template='<start_of_turn>{{ messages[0].content }}<end_of_turn>'")
    assert "`<|turn>` ... `<turn|>`" in only(run, "E0406")


def test_3_error_names_the_kv_heads_that_tp_8_does_not_divide(lowered: Lower) -> None:
    run = lowered("mesh.accelerator=v6e-8", "mesh.axes={fsdp: 1, tp: 8}")
    assert run.program is None
    assert "Gemma 4 31B has 4 key/value heads in its 10 global layers" in only(run, "E0203")
    help = next(d.help for d in run.diagnostics if d.code == "E0203")
    assert help == "axes: {fsdp: 8, tp: 1}, {fsdp: 4, tp: 2} or {fsdp: 2, tp: 4}"


def test_4_train_script_states_bfloat16_and_float32_gives_a_warning(lowered: Lower) -> None:
    assert keywords(files(lowered())["train.py"], "ModelSettings")["dtype"] == "bfloat16"
    assert "W0807" in {d.code for d in lowered("model.dtype=float32").diagnostics}


def test_5_padding_warning_estimates_the_share_from_local_data(lowered: Lower, tmp_path) -> None:
    assert "every sample is padded to max_length 3,072" in only(lowered("data.packing=false"), "W0407")
    text = "x" * (4 * 922)
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n"
    )
    message = only(lowered("data.packing=false", "data.train=[train.jsonl]"), "W0407")
    assert "about 741 to 1,487 tokens on average, by their characters" in message
    assert "about 64% of the work is padding" in message


def test_6_micro_batch_of_one_sample_under_tp_gives_a_note(lowered: Lower) -> None:
    run = lowered("mesh.axes={fsdp: 1, tp: 4}", "train.micro_batch_size=1")
    assert "share one sample at a time" in only(run, "N0218")
    assert "N0218" not in {d.code for d in lowered().diagnostics}


def test_7_loss_on_all_tokens_is_warned_about(lowered: Lower) -> None:
    assert "not comparable" in only(lowered("data.loss_on=all"), "W0408")
    assert keywords(files(lowered())["train.py"], "DataSettings")["loss_on"] == "assistant"


def test_8_adapters_are_float32_and_bfloat16_is_warned_about(lowered: Lower) -> None:
    assert keywords(files(lowered())["train.py"], "LoraSettings")["dtype"] == "float32"
    assert "PEFT keeps them in float32" in only(lowered("lora.dtype=bfloat16"), "W0308")


def test_9_merge_takes_no_rank_or_alpha(lowered: Lower) -> None:
    from recipec.runtime.merging import merge

    source = files(lowered("lora.rank=32"))["merge.py"]
    assert "rank" not in {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert not any(
        keyword.arg in ("rank", "alpha")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )
    options = inspect.getsource(merge)
    assert '"--rank"' not in options and '"--alpha"' not in options


def test_10_lock_and_train_script_record_the_hyperparameters(lowered: Lower) -> None:
    run = lowered("train.optimizer.learning_rate=3e-4", "lora.rank=32")
    lock = json.loads(files(run)["recipe.lock.json"])
    assert lock["recipe"]["train"]["optimizer"] == program(run).recipe.train.optimizer.model_dump()
    assert lock["recipe"]["lora"]["rank"] == 32
    assert lock["recipe"]["train"]["optimizer"]["learning_rate"] == 3e-4
    assert "LEARNING_RATE = 3e-4\n" in files(run)["train.py"]
