"""Tests from files to micro-batches: contents, order, norms, resumption and errors."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.data.batches import eval_losses, source_names
from recipec.runtime.data.prepare import PreparedData, prepare
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, Source, TrainSettings
from tests.runtime.chats import GEMMA4, chat, tokenizer, write
from tests.runtime.preparing import conversations, pieces, prepared, same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", conversations(53))
    write(tmp_path / "eval.jsonl", conversations(11, seed=1))
    return tmp_path


@pytest.mark.parametrize("packing", [False, True])
def test_micro_batches_have_the_expected_arrays_and_padding(folder: Path, packing: bool) -> None:
    run = prepared(folder, packing=packing)
    for number, batch in enumerate(run.batches()):
        assert {name: (value.dtype.name, value.shape) for name, value in batch.items()} == {
            "tokens": ("int32", (4, 96)),
            "positions": ("int32", (4, 96)),
            "segment_ids": ("int32", (4, 96)),
            "loss_mask": ("bool", (4, 96)),
            "norm": ("float32", ()),
            "index": ("int32", ()),
        }
        assert batch["index"] == number
        for r in range(4):
            segments, positions = batch["segment_ids"][r], batch["positions"][r]
            used = int((segments > 0).sum())
            assert (segments[:used] > 0).all() and not segments[used:].any()  # padded on the right
            assert (np.diff(segments[:used]) >= 0).all() and (np.diff(segments[:used]) <= 1).all()
            starts = np.flatnonzero(np.diff(segments[:used], prepend=0))
            for start, end in pairwise([*starts.tolist(), used]):
                assert positions[start:end].tolist() == list(range(end - start))
            # A sample's first token has no token before it to predict it from.
            assert not batch["loss_mask"][r][starts].any()
            assert not batch["loss_mask"][r][used:].any()
            assert not batch["tokens"][r][used:].any()  # <pad> is 0
            if not packing:
                assert segments.max() <= 1
    assert number + 1 == run.total_steps * run.accumulation


@pytest.mark.parametrize("packing", [False, True])
def test_each_epoch_has_every_sample_once_in_a_new_order(folder: Path, packing: bool) -> None:
    run = prepared(folder, packing=packing)
    alone = prepared(folder, rows=1, batch=1, epochs=1, packing=False)
    expected = Counter(piece for batch in alone.batches() for piece in pieces(batch))
    assert sum(expected.values()) == 53
    epoch = run.steps_per_epoch * run.accumulation
    orders = []
    for e in range(3):
        seen = [piece for i in range(e * epoch, (e + 1) * epoch) for piece in pieces(run.micro_batch(i))]
        assert Counter(seen) == expected
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2]


def test_packing_does_not_change_the_contents_of_a_sample(folder: Path) -> None:
    def contents(run: PreparedData) -> Counter:
        found: Counter = Counter()
        for batch in run.batches():
            for r in range(len(batch["tokens"])):
                for s in range(1, int(batch["segment_ids"][r].max()) + 1):
                    at = batch["segment_ids"][r] == s
                    found[
                        tuple(tuple(batch[k][r][at].tolist()) for k in ("tokens", "positions", "loss_mask"))
                    ] += 1
        return found

    packed, alone = prepared(folder, epochs=1, packing=True), prepared(folder, epochs=1)
    assert contents(packed) == contents(alone)
    assert packed.report.train.rows < alone.report.train.rows
    assert packed.report.train.efficiency > alone.report.train.efficiency
    assert packed.steps_per_epoch < alone.steps_per_epoch


def test_order_is_the_same_on_every_machine(folder: Path) -> None:
    def first(**settings: Any) -> list[str]:
        batch = prepared(folder, **settings).micro_batch(0)
        return [tokenizer().decode(piece).split("\n")[1].split()[0] for piece in pieces(batch)]

    assert first() == ["49", "4", "10", "45"]
    assert first(packing=True)[:4] == ["32", "50", "37", "14"]


def test_resumed_run_gets_the_batches_of_an_uninterrupted_run(folder: Path) -> None:
    run = prepared(folder, packing=True)
    whole = list(run.batches())
    for start in (0, 1, run.steps_per_epoch, run.steps_per_epoch + 1, run.total_steps):
        rest = list(prepared(folder, packing=True).batches(start=start))
        assert len(rest) == len(whole) - start * run.accumulation
        assert all(same(x, y) for x, y in zip(rest, whole[start * run.accumulation :], strict=True))


def test_norm_by_tokens_makes_step_loss_the_mean_over_targets(folder: Path) -> None:
    """Check that the mean of summed loss / norm over a window is the window's mean loss of a target."""
    run = prepared(folder, rows=2, batch=8, packing=True)
    loss = np.random.default_rng(0).random((2, 96))
    for step in range(run.total_steps):
        window = [run.micro_batch(step * 4 + i) for i in range(4)]
        mean = np.mean([(loss * b["loss_mask"]).sum() / b["norm"] for b in window])
        total = sum((loss * b["loss_mask"]).sum() for b in window)
        assert mean == pytest.approx(total / sum(b["loss_mask"].sum() for b in window), rel=1e-6)


def test_norm_by_micro_batches_makes_step_loss_a_mean_of_means(folder: Path) -> None:
    """Check that a window's mean is the mean of its micro-batches' means. Empty ones do not count."""
    run = prepared(folder, rows=2, batch=16, loss_normalization="micro_batches")
    loss = np.random.default_rng(0).random((2, 96))
    empty = 0
    for step in range(run.total_steps):
        window = [run.micro_batch(step * 8 + i) for i in range(8)]
        mean = np.mean([(loss * b["loss_mask"]).sum() / b["norm"] for b in window])
        full = [b for b in window if b["loss_mask"].any()]
        empty += 8 - len(full)
        assert all(b["norm"] > 0 for b in window)
        assert mean == pytest.approx(np.mean([loss[b["loss_mask"]].mean() for b in full]), rel=1e-6)
    assert empty  # 53 rows in windows of 16 leave three micro-batches of each epoch's last window empty


def test_evaluation_loss_is_the_mean_over_all_targets(folder: Path) -> None:
    for packing in (False, True):
        run = prepared(folder, eval=("eval.jsonl",), packing=packing)
        loss = np.random.default_rng(0).random((4, 96))
        mean = np.mean([(loss * b["loss_mask"]).sum() / b["norm"] for b in run.eval_batches])
        total = sum((loss * b["loss_mask"]).sum() for b in run.eval_batches)
        targets = sum(int(b["loss_mask"].sum()) for b in run.eval_batches)
        assert mean == pytest.approx(total / targets, rel=1e-6)
        assert run.report.eval is not None and run.report.eval.targets == targets
        assert sum(len(pieces(b)) for b in run.eval_batches) == 11
        assert all(b["tokens"].shape == (4, 96) for b in run.eval_batches)
    assert prepared(folder).eval_batches == []


def test_evaluation_of_several_sources_reports_a_loss_for_each(folder: Path) -> None:
    """Give each token its own loss, at any place in packed rows too."""
    table = np.random.default_rng(0).random(2000)
    (folder / "more").mkdir()
    write(folder / "more" / "eval.jsonl", conversations(23, seed=2))

    def summed(run: PreparedData) -> list[float]:
        return [float((table[b["tokens"]] * b["loss_mask"]).sum() / b["norm"]) for b in run.eval_batches]

    for packing in (False, True):
        sources = ["eval.jsonl", "more/eval.jsonl"]
        run = prepared(folder, eval=tuple(sources), packing=packing)
        found = eval_losses(summed(run), run.eval_parts)
        alone = [prepared(folder, eval=(source,), packing=packing) for source in sources]
        assert [one.eval_parts for one in alone] == [(), ()]
        weights = [one.report.eval.targets for one in alone if one.report.eval]
        own = [float(np.mean(summed(one))) for one in alone]
        assert own[0] != pytest.approx(own[1], rel=1e-3)
        assert [found[source] for source in sources] == pytest.approx(own, rel=1e-6)
        assert found["loss"] == pytest.approx(np.average(own, weights=weights), rel=1e-6)
        assert list(found) == ["loss", *sources]


def test_source_names_are_short_and_unique() -> None:
    assert source_names(["a/chat.jsonl.gz", Source("hf://owner/code")]) == ["chat", "code"]
    assert source_names(["a/chat.jsonl", "b/chat.jsonl"]) == ["a/chat.jsonl", "b/chat.jsonl"]
    assert source_names(["a/loss.jsonl", "chat.jsonl"]) == ["a/loss.jsonl", "chat.jsonl"]
    assert source_names([Source("hf://a/b"), Source("hf://a/b")]) == ["hf://a/b 1", "hf://a/b 2"]


@pytest.mark.parametrize(
    ("batch", "epochs", "steps", "per_epoch", "total"),
    [(8, 1, None, 7, 7), (8, 3, None, 7, 21), (53, 2, None, 1, 2), (64, 1, None, 1, 1), (8, None, 30, 7, 30)],
)
def test_step_counts_follow_transformers_rules(
    folder: Path, batch: int, epochs: int | None, steps: int | None, per_epoch: int, total: int
) -> None:
    run = prepared(folder, rows=1, batch=batch, epochs=epochs, steps=steps)
    assert (run.steps_per_epoch, run.total_steps) == (per_epoch, total)
    if per_epoch > 1:
        assert len(list(run.batches())) == total * batch
        assert len(list(run.batches(2))) == 2 * batch


def test_overlong_samples_are_dropped_cut_or_refused_as_the_recipe_says(folder: Path) -> None:
    long = [chat("hello", "the fox " * 90), chat("hello " * 90, "the fox"), chat("hello", "the fox")]
    name = write(folder / "long.jsonl", long)
    dropped = prepared(folder, train=(name,), overlong="drop").report.train
    assert (dropped.kept, dropped.overlong.count, dropped.truncated) == (1, 2, 0)
    assert dropped.overlong.first[0].origin == "long.jsonl:1"
    run = prepared(folder, train=(name,), overlong="truncate", rows=1, batch=1, epochs=1)
    cut = run.report.train
    # The second row's targets are behind the cut.
    assert (cut.kept, cut.overlong.count, cut.truncated, cut.longest) == (2, 1, 1, 96)
    assert "no target is left" in cut.overlong.first[0].reason
    assert max(len(piece) for batch in run.batches() for piece in pieces(batch)) == 96
    whole = prepared(folder, train=(name,), max_length=1000, rows=1, batch=1, epochs=1)
    assert run.samples[0].tokens.tolist() == whole.samples[0].tokens[:96].tolist()
    assert run.samples[0].targets.tolist() == whole.samples[0].targets[:96].tolist()
    with pytest.raises(UserError, match=r"long.jsonl:1 has \d+ tokens, and data.max_length is 96"):
        prepared(folder, train=(name,), overlong="error")


def test_report_counts_read_rows_kept_rows_and_targets(folder: Path) -> None:
    run = prepared(folder, eval=("eval.jsonl",), packing=True)
    report = run.report
    targets = sum(int(run.micro_batch(i)["loss_mask"].sum()) for i in range(run.steps_per_epoch * 2))
    assert (report.train.read, report.train.kept, report.train.targets) == (53, 53, targets)
    assert report.train.rows == math.ceil(report.train.tokens / report.train.efficiency / 96 - 1e-9)
    assert json.loads(json.dumps(report.to_dict()))["train"]["kept"] == 53
    text = report.text()
    assert text.startswith("train: 53 of 53 samples kept; ")
    assert "\neval: 11 of 11 samples kept; " in text and f"\nsteps: {run.steps_per_epoch} an epoch" in text


def test_report_names_malformed_and_overlong_rows(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write("nonsense\n" * 7)
        file.writelines([json.dumps({"messages": chat("hello", "the <turn|>" * 200)}) + "\n"] * 9)
    with pytest.raises(UserError, match=r"7 of 69 rows .* the first: train.jsonl:54: malformed") as error:
        prepared(folder)
    assert "max_invalid_ratio" in error.value.message
    assert "repair those rows" in (error.value.help or "")
    text = prepared(folder, max_invalid_ratio=0.12).report.text()
    assert "53 of 69 samples kept (7 malformed, 9 too long for 96 tokens)" in text
    assert "train.jsonl:54: malformed: not JSON" in text and "... and 2 more, malformed" in text
    assert "train.jsonl:61: too long: " in text


def test_data_without_a_usable_row_is_refused_with_the_reason(folder: Path) -> None:
    with pytest.raises(UserError, match=r"none of the 53 rows of data.train can be used") as error:
        prepared(folder, max_length=3)
    assert "max_length" in (error.value.help or "")
    unclear = "{% for m in messages %}{{ m.content + m.content }}{% endfor %}"
    unclear += "{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(UserError, match=r"can be used: train.jsonl:1: unclear targets") as error:
        prepared(folder, chat_template=unclear)
    assert "generation" in (error.value.help or "")
    refusing = "{{ raise_exception('never') }}"
    with pytest.raises(UserError, match="the chat template refuses it: never"):
        prepared(folder, chat_template=refusing)


def test_too_many_rows_with_keys_that_the_template_ignores_are_refused(folder: Path) -> None:
    thought = [{**message, "reasoning_content": "hm"} for message in chat("a", "b")]
    write(folder / "train.jsonl", [chat("a", "b"), chat("c", "d"), thought])
    with pytest.raises(
        UserError, match=r"1 of 3 rows .* would not see.*: reasoning_content in 1; .*train.jsonl:3"
    ):
        prepared(folder)
    report = prepared(folder, max_invalid_ratio=0.5).report
    assert report.train.kept == 3 and "reasoning_content in 1" in report.text()


@pytest.mark.parametrize(
    ("format", "row"),
    [
        (
            "chat",
            {
                "conversations": [
                    {"from": r, "value": v} for r, v in (("system", "s"), ("human", "a"), ("gpt", "b"))
                ]
            },
        ),
        ("instruction", {"instruction": "a", "output": "b", "system": "s"}),
    ],
)
def test_suggested_transform_for_system_messages_works(
    folder: Path, format: str, row: dict[str, Any]
) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + GEMMA4
    (folder / "train.jsonl").write_text(f"{json.dumps(row)}\n")
    loss_on = "assistant" if format == "chat" else "completion"
    settings = {"chat_template": refusing, "format": format, "loss_on": loss_on}
    with pytest.raises(UserError) as refused:
        prepared(folder, **settings)
    assert refused.value.help is not None and 'data.transform: "fold.py:fold"' in refused.value.help
    (folder / "fold.py").write_text(refused.value.help.partition("\n")[2])
    made = prepared(folder, transform="fold.py:fold", **settings)
    assert "s\n\na<turn|>" in tokenizer().decode(made.samples[0].tokens)


def test_labeled_prompt_completion_rows_are_refused_with_working_help(folder: Path) -> None:
    rows = [{"prompt": "a", "completion": " b", "label": label} for label in (True, False)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"format": "prompt_completion", "loss_on": "completion"}
    with pytest.raises(UserError, match="judged answer, which KTO") as refused:
        prepared(folder, **settings)
    assert refused.value.help is not None and "liked.py:liked" in refused.value.help
    (folder / "liked.py").write_text(refused.value.help.partition("\n")[2])
    train = prepared(folder, transform="liked.py:liked", **settings).report.train
    assert (train.kept, train.removed) == (1, 1)


def test_too_many_rows_with_unclear_targets_are_refused(folder: Path) -> None:
    unless_short = "{% for m in messages %}{{ m.content + ('' if messages | length > 3 else m.content) }}"
    unless_short += "<turn|>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(UserError, match=r"35 of 53 rows .* the first: train.jsonl:2: unclear targets"):
        prepared(folder, chat_template=unless_short)
    report = prepared(folder, chat_template=unless_short, max_invalid_ratio=1.0).report.train
    assert (report.kept, report.inconsistent.count, report.invalid) == (18, 35, 35)


def test_batch_size_not_divisible_into_micro_batches_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="8 rows cannot be made of micro-batches of 3"):
        prepared(folder, rows=3)


def test_token_ids_that_the_model_does_not_have_are_refused(folder: Path) -> None:
    data = DataSettings(train=("train.jsonl",), max_length=96, packing=False)
    train = TrainSettings(epochs=1, global_batch_size=8, micro_batch_size=1)
    with pytest.raises(UserError, match="the model has 6 embeddings"):
        prepare(data, train, 4, tokenizer(), folder, vocabulary=6)


def test_template_as_text_and_as_file_give_the_same_batch(folder: Path) -> None:
    other = GEMMA4.replace("<|turn>", "<|im_start|>").replace("<turn|>", "<|im_end|>")
    (folder / "chat.jinja").write_text(other)
    a, b = prepared(folder, chat_template=other), prepared(folder, chat_template="chat.jinja")
    assert same(a.micro_batch(0), b.micro_batch(0))
    assert "<|im_end|>" in tokenizer().decode(a.micro_batch(0)["tokens"][0])
    with pytest.raises(UserError, match=r"chat template .*none.jinja cannot be read"):
        prepared(folder, chat_template="none.jinja")


@pytest.mark.parametrize("shares", [[(0, 2), (1, 3)], [(0, 1), (0, 1), (2, 3), (2, 3)]])
def test_rows_of_all_processes_make_up_the_whole_micro_batch(
    folder: Path, shares: list[tuple[int, ...]]
) -> None:
    """Let each process build only its own rows. Processes that share a sharded weight build the same rows."""
    run = prepared(folder, packing=True, eval=("eval.jsonl",))
    assert run.rows == 4
    own = [list(run.batches(rows=share)) for share in shares]
    held_out = [run.evaluation(share) for share in shares]
    for batches, of_each in ((list(run.batches()), own), (run.eval_batches, held_out)):
        for index, whole in enumerate(batches):
            for share, mine in zip(shares, of_each, strict=True):
                part = mine[index]
                expected = {
                    name: value[list(share)] if value.ndim else value for name, value in whole.items()
                }
                assert same(part, expected), (index, share)
    tokens = [int(np.count_nonzero(batch["segment_ids"])) for batch in run.batches()]
    assert [run.tokens_of(index) for index in range(len(tokens))] == tokens


def test_data_state_fingerprint_changes_with_data_and_settings(folder: Path) -> None:
    run = prepared(folder)
    state = run.state(3)
    assert json.loads(json.dumps(state)) == state
    assert state["rows"] == 3 * run.schedule.rows_per_step and state["fingerprint"] == run.fingerprint
    assert prepared(folder).fingerprint == run.fingerprint
    # Another micro-batch size visits the same samples in the same order.
    assert prepared(folder, rows=2).state(3) == state
    for other in ({"max_length": 95}, {"shuffle_seed": 1}, {"packing": True}, {"loss_on": "all"}):
        assert prepared(folder, **other).fingerprint != run.fingerprint
    write(folder / "train.jsonl", conversations(53, seed=9))
    assert prepared(folder).fingerprint != run.fingerprint


def test_origins_name_the_source_row_of_each_sample_in_a_micro_batch(folder: Path) -> None:
    run = prepared(folder, packing=True)
    lines = (folder / "train.jsonl").read_text().splitlines()
    for index in range(run.steps_per_epoch * run.accumulation):
        batch = run.micro_batch(index)
        origins = run.origins(index)
        assert len(origins) == len(pieces(batch))
        for origin, piece in zip(origins, pieces(batch), strict=True):
            path, number = origin.split(":")
            first = json.loads(lines[int(number) - 1])["messages"][0]["content"]
            assert path == "train.jsonl" and f"user\n{first}<" in tokenizer().decode(piece)


def drawn(run: PreparedData, epoch: int) -> Counter:
    """Count the source lines of an epoch."""
    size = run.steps_per_epoch * run.accumulation
    return Counter(o for i in range(epoch * size, (epoch + 1) * size) for o in run.origins(i))


@pytest.mark.parametrize("packing", [False, True])
def test_source_weight_sets_how_often_its_rows_are_drawn(folder: Path, packing: bool) -> None:
    sources = (Source("train.jsonl", 2.0), Source("eval.jsonl", 0.5))
    run = prepared(folder, train=sources, packing=packing, epochs=6)
    other = []
    for epoch in range(6):
        counts = drawn(run, epoch)
        assert {n for o, n in counts.items() if o.startswith("train")} == {2}
        assert sum(o.startswith("train") for o in counts) == 53
        part = {o for o in counts if o.startswith("eval")}
        assert all(counts[o] == 1 for o in part)
        # Half of 11 samples, without those that do not fit into as many rows as the first epoch's.
        assert len(part) == 6 if not packing else 4 <= len(part) <= 6
        other.append(part)
    assert len(set(map(frozenset, other))) > 1
    assert drawn(prepared(folder, train=sources, packing=packing, epochs=6), 3) == drawn(run, 3)
    assert run.total_steps == 6 * run.steps_per_epoch == len(list(run.batches())) // run.accumulation
    if not packing:
        assert run.report.train.rows == 2 * 53 + 6


def test_source_weights_that_draw_no_sample_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="draws none of the 53 samples"):
        prepared(folder, train=(Source("train.jsonl", 0.001),))


def test_only_conversations_need_a_chat_template(tmp_path: Path) -> None:
    plain = copy.deepcopy(tokenizer())
    plain.chat_template = None
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "the fox"}) + "\n")
    data = DataSettings(train=("t.jsonl",), max_length=16, format="text", loss_on="all", packing=False)
    train = TrainSettings(epochs=1, global_batch_size=1, micro_batch_size=1)
    run = prepare(data, train, 1, plain, tmp_path)
    assert pieces(run.micro_batch(0)) == [tuple(tokenizer().encode("the fox<eos>"))]
    talk = {"prompt": chat("a"), "completion": [{"role": "assistant", "content": "b"}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(talk) + "\n")
    data = DataSettings(
        train=("t.jsonl",), max_length=16, format="prompt_completion", loss_on="completion", packing=False
    )
    with pytest.raises(UserError, match=r"t.jsonl:1 is a conversation, and the tokenizer has no chat"):
        prepare(data, train, 1, plain, tmp_path)


def test_instructions_are_rendered_with_the_chat_template(tmp_path: Path) -> None:
    row = {"instruction": "Greet.", "input": "the fox", "output": "hello"}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    for loss_on, learned in (("completion", "hello<turn|>\n"), ("assistant", "hello<turn|>")):
        run = prepared(tmp_path, train=("t.jsonl",), format="instruction", loss_on=loss_on, rows=1, batch=1)
        batch = run.micro_batch(0)
        assert tokenizer().decode(batch["tokens"][batch["loss_mask"]]) == learned
        assert "user\nGreet.\n\nthe fox<turn|>" in tokenizer().decode(pieces(batch)[0])
