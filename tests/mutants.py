"""Plausible mistakes, made in the code one at a time: the tests must catch each of them.

.venv/bin/python -m tests.mutants [NAME ...] [--no-baseline] [--jobs N]

Each mutant replaces one text of the product. The tests that should catch it then run in a copy of the working
tree, so that the checkout never changes. A mutant that no test catches is a mistake that nobody would notice.

A row names no file. Its text occurs once in all of the product, and may move from one module to another. For
the same reason, rows name modules of tests without a folder.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("spec", "compiler", "port", "runtime", "templates")
SECONDS = 1200
"""The limit for the tests of one mutant. pytest itself ends each test much earlier."""


class Mutant(NamedTuple):
    """A mistake.

    Attributes:
        name: what is wrong, for the command line.
        tests: the modules of tests that catch it, and options of pytest.
        text: a text that occurs once in the product.
        wrong: the text that replaces it.
    """

    name: str
    tests: str
    text: str
    wrong: str


# fmt: off
MUTANTS = (
    # The language.
    Mutant("place-of-a-key", "test_golden -k schema-unknown-key",
           "        replace(d, span=sources.span(d.path, d.at_key))",
           "        replace(d, span=sources.span(d.path))"),
    Mutant("column-of-a-value", "test_diagnostics",
           "{number}:{d.span.column}", "{number}:{d.span.column - 1}"),
    Mutant("set-precedence", "test_load -k last_set",
           "overrides.apply(root, sets)", "overrides.apply(root, sets[::-1])"),
    Mutant("extends-order", "test_load",
           "merge(base, document.root)", "merge(found.root, base)"),
    Mutant("secret-shown", "test_strange_recipe -k secret",
           "range(3, len(where) + 1))", "range(len(where), len(where) + 1))"),
    # Checks.
    Mutant("check-mesh-product", "test_golden -k mesh-axes-product",
           "if product == accelerator.devices:", "if product == accelerator.chips:"),
    Mutant("check-heads", "test_golden -k mesh-tp",
           "if count % tp == 0:", "if count >= tp:"),
    Mutant("check-memory", "test_golden -k mesh-weights",
           "* accelerator.devices_per_chip\n    if gib >", "* accelerator.chips\n    if gib >"),
    Mutant("check-hosts", "test_golden -k mesh-hosts",
           "if mesh.hosts in possible:", "if mesh.hosts <= max(possible):"),
    Mutant("sharding-rule-order", "test_specs",
           "spec in compiled if", "spec in compiled[::-1] if"),
    # Written files of each kind.
    Mutant("escape-python", "test_literals",
           'if character in {quote, "\\\\"}:', "if character == quote:"),
    Mutant("escape-shell", "test_serve_fuzz -k script",
           "re.sub(r'([\"\\\\$`])'", "re.sub(r'([\"\\\\$])'"),
    Mutant("escape-yaml", "test_serve_fuzz -k pod_manifest",
           "if character in '\"\\\\':", "if character == '\"':"),
    Mutant("escape-compose", "test_serve_fuzz -k compose",
           "- {{ word | compose }}", "- {{ word | yaml }}"),
    Mutant("escape-kubernetes", "test_serve_fuzz -k pod_manifest",
           "value: {{ value | kubernetes }}", "value: {{ value | yaml }}"),
    Mutant("escape-dockerfile", "test_serve_fuzz -k dockerfile",
           "ENV {{ variable }}={{ value | docker }}", 'ENV {{ variable }}="{{ value }}"'),
    Mutant("escape-json", "test_serve_fuzz -k dockerfile",
           "json.dumps(word, ensure_ascii=False) for", "f'\"{word}\"' for"),
    Mutant("escape-markdown", "test_launch_fuzz -k code_span",
           'fence, blank = "`" * (longest + 1)', 'fence, blank = "`"'),
    Mutant("escape-html", "test_report_run -k text",
           "return html.escape(value, quote=False)", "return value"),
    # The artifact.
    Mutant("build-check-of-the-lock", "test_artifact -k check_reports",
           "for path in {*files, *locked_files(folder)}", "for path in {*files}"),
    Mutant("build-taken-up", "test_whole -k killed_build",
           "if os.path.lexists(staged := folder / STAGING / NEW / path):",
           "if staged := folder / STAGING / NEW / path:"),
    Mutant("build-half-done", "test_whole -k stopped_by_a_full_disk",
           "            if not (staging / JOURNAL).exists():\n    ", ""),
    Mutant("merge-file-not-whole", "test_export_folder",
           "                partial.replace(target)\n                sync(target.parent)",
           "                shutil.copy(partial, target)\n                sync(target.parent)"),
    # Ports.
    Mutant("port-axolotl-devices", "test_port_axolotl -k batch",
           "max(accumulation or 1, 1), processes, shared)", "max(accumulation or 1, 1), 1)"),
    Mutant("port-llamafactory-alpha", "test_port_llamafactory -k plain_llamafactory",
           'keys.default("lora_alpha", 2 * rank, {"lora.alpha": 2 * rank}, note)',
           'keys.default("lora_alpha", 2 * rank, {"lora.alpha": rank}, note)'),
    Mutant("port-torchtune-steps", "test_port_keys -k torchtune",
           '{"train.steps": most * epochs}', '{"train.steps": most}'),
    Mutant("port-peft-rslora", "test_port_keys -k trl",
           "switch use_rslora -> lora.rslora: alpha / sqrt(rank)", "exact use_rslora: alpha / sqrt(rank)"),
    Mutant("port-litgpt-rows", "test_port_keys -k litgpt",
           "accumulation = rows // devices // micro", "accumulation = rows // micro"),
    Mutant("port-trainer-epochs", "test_port_keys -k trainer",
           "whole = math.ceil(epochs)", "whole = int(epochs)"),
    # Plans.
    Mutant("plan-model-flops", "test_bound -k model_flops",
           "+ 2 * layer.trained + 4 * product", "+ 2 * layer.weights + 4 * product"),
    Mutant("plan-kernel-flops", "test_kernels",
           "visited = sum(min(block + 1, most) for block in range(blocks))", "visited = blocks * most"),
    Mutant("plan-budget", "test_budget",
           "elif planned > most:", "elif run.interval.high * planned > most:"),
    Mutant("plan-interval-of-speed", "test_text -k flagship_plan",
           "(value / high, value / low) if inverse", "(value * low, value * high) if inverse"),
    Mutant("plan-exposed-wait", "test_timeline",
           "self.now, end - self.now))\n            self.now = end", "self.now, end - self.now))"),
    Mutant("plan-loops-turns", "test_timeline -k loop",
           "self._again(before, loop.times - 2)", "self._again(before, 1)"),
    Mutant("plan-begun-before-a-loop", "test_timeline -k started_before",
           "self.ends.items() - before.ends.items()", "list(self.ends.items())"),
    Mutant("plan-links-queue", "test_timeline -k queue",
           "start = max([self.now, *(self.busy.get(place, 0.0) for place in transfer.along)])",
           "start = self.now"),
    Mutant("plan-prices-loops-turns", "test_prices -k pricing_adds",
           "of(step.body, times * step.times)", "of(step.body, times)"),
    Mutant("plan-prices-same-products", "test_prices -k closest_match",
           "(self.products, operation.products)", "(self.products, operation.key)"),
    Mutant("plan-memory-elsewhere", "test_prices -k hbm_allocations",
           "if ELSEWHERE.search(about):", "if False:"),
    Mutant("plan-flags-in-name", "test_pool -k flags",
           'outer = os.environ.get(FLAGS, "")', 'outer = ""'),
    Mutant("plan-backward-kernels", "test_kernels -k backward",
           'part = PRODUCTS[splash.phase] / PRODUCTS["bwd"]', "part = 1.0"),
    Mutant("torus-rings", "test_torus",
           "inwards += 2 if ring else 1", "inwards += 2"),
    Mutant("torus-stride", "test_torus -k interleaved",
           "taken = shared * stride * moved", "taken = shared * moved"),
    Mutant("torus-shorter-way", "test_torus -k permutation",
           "ahead <= count / 2 if closed else", "ahead <= count if closed else"),
    Mutant("schedule-cycles", "test_hlo_schedule -k cycles",
           "int(cycles[1]) / self.rates.clock if cycles else None", "None"),
    Mutant("schedule-host-copies", "test_hlo_schedule -k host_lane",
           '("host", self.rates.host) if HOST in spaces', '("host", self.rates.host) if 1 in spaces'),
    Mutant("schedule-loop-count", "test_hlo_schedule -k trip_count",
           "yield Loop(count, tuple(inner), ", "yield Loop(1, tuple(inner), "),
    Mutant("hlo-padded-tiles", "test_hlo_parse",
           "counts = [-(-dimension // size) for", "counts = [dimension // size for"),
    Mutant("hlo-trip-count", "test_hlo_parse -k trip",
           'if direction in ("LE", "GE"):\n        distance += 1',
           'if direction in ("LE", "GE"):\n        distance += 0'),
    Mutant("hlo-reduce-scatter", "test_hlo_schedule",
           'if i.opcode == "dynamic-slice")', 'if i.opcode == "slice")'),
    Mutant("hlo-peak", "test_liveness",
           "change[buffer.last + 1] -= buffer.bytes", "change[buffer.last] -= buffer.bytes"),
    Mutant("server-cache-padding", "test_serving -k fp8_cache",
           "return -(-slots // packing) * packing * lanes * number_bytes",
           "return slots * lanes * number_bytes"),
    Mutant("server-roofline", "test_serving -k hand_counts",
           "4 * (tp - 1) / tp * array", "2 * (tp - 1) / tp * array"),
    Mutant("server-memory-share", "test_golden -k serve-cache",
           "DEFAULT_SHARE = 0.92", "DEFAULT_SHARE = 0.9"),
    # Serving.
    Mutant("flag-of-the-server", "test_serve -k vllm_flags",
           '"max-num-seqs": serve.max_num_seqs', '"max-num-seqs": serve.max_num_batched_tokens'),
    Mutant("flag-switched-off", "test_vllm_flags -k words",
           'return [f"--{flag}" if value else f"--no-{flag}"]', 'return [f"--{flag}"] if value else []'),
    Mutant("bench-cost", "test_bench_report",
           'price.per_million(row["output_tokens_per_s"])', 'price.per_million(row["requests_per_s"])'),
    Mutant("bench-answers-cut-off", "test_bench -k failed_points",
           "wanted, got = prompts * output_length", "wanted, got = output_length"),
    Mutant("evaluation-interval", "test_evaluate_intervals -k wilson",
           "square / (4 * size * size))", "square / (4 * size))"),
    Mutant("evaluation-pass-at-k", "test_evaluate_intervals -k pass_at_k",
           "math.comb(samples - passed, k), math.comb(samples, k)", "(samples - passed) ** k, samples**k"),
    # Views for users.
    Mutant("editor-position", "test_editor -k wide",
           "(self.codec.client_num_units(text[:column]) for column", "(len(text[:column]) for column"),
    Mutant("watch-pace", "test_watch_command -k compiling_first",
           "> 1:\n            times.pop()", "> 1:\n            times.pop(0)"),
    Mutant("watch-cut-line", "test_watch_command -k incomplete",
           "(self.rest + content).split", "content.split"),
    Mutant("report-best-loss", "test_report_run -k golden_file",
           "return min(self.evaluated, key=lambda pair: (cost(pair[1]), pair[0]), default=None)",
           "return max(self.evaluated, key=lambda pair: (cost(pair[1]), pair[0]), default=None)"),
    Mutant("report-thinned", "test_report_metrics -k peak",
           "min(part, key=values.__getitem__), max(part, key=values.__getitem__)", "part[len(part) // 2]"),
    Mutant("cost-of-a-resumed-run", "test_cost -k once",
           "seconds = dict(_step_seconds(content))",
           "seconds = dict(enumerate(value for _, value in _step_seconds(content)))"),
    Mutant("card-batch", "test_export_card",
           "'rows' if data.get('packing') else 'samples'", "'samples' if data.get('packing') else 'rows'"),
    # Training data: these tests and the following ones import JAX.
    Mutant("column-of-another-name", "test_data_formats -k join_their_messages",
           "candidates += [lowered[name] for name in (role, *NAMES[role]) if name in lowered]",
           "candidates += []"),
    Mutant("second-call-not-written", "test_data_masking -k does_not_write_are_listed",
           "sure=not n", "sure=True"),
    Mutant("second-begin-of-sequence", "test_data_trl -k added_tokens",
           "while begin and text.startswith(begin):", "while not begin:"),
    Mutant("mask-generation-prompt", "test_data_masking -k gemma4_answers",
           "messages[:turn], tools, add_generation_prompt=True", "messages[:turn], tools"),
    Mutant("mask-last-answer", "test_data_masking -k last_answer",
           "return turns[-1:] if", "return turns[:1] if"),
    Mutant("mask-of-a-completion", "test_data_masking -k share_a_token",
           "encoding, (start, len(ids))", "encoding, (0, len(ids))"),
    Mutant("truncation", "test_data_prepare -k overlong_samples",
           "first = _part(ids, answer.ranges, 0, most)", "first = _part(ids, answer.ranges, 1, most + 1)"),
    Mutant("new-schedule-from-the-beginning", "test_train_longer -k new_schedule",
           "rates(step - first)", "rates(step)"),
    Mutant("trained-on-not-counted", "test_data_shared -k counted",
           "return int(np.isin(self.fingerprints, others.fingerprints).sum())",
           "return int((self.fingerprints == 0).sum())"),
    Mutant("text-not-continued", "test_data_split_texts",
           "for start in range(0, len(ids), most)]", "for start in range(0, most, most)]"),
    Mutant("packing-positions", "test_data_prepare -k packing",
           "= np.arange(end - start)", "= np.arange(start, end)"),
    Mutant("packing-segments", "test_data_prepare -k packing",
           "segment_ids[r, start:end] = segment", "segment_ids[r, start:end] = 1"),
    Mutant("packing-too-full", "test_data_packing",
           "at = bisect_left(rooms, length)", "at = bisect_left(rooms, length - 1)"),
    Mutant("mean-over-tokens", "test_data_prepare -k norm",
           "return count(step.rows) / self._accumulation", "return float(count(part))"),
    Mutant("accumulation", "test_data_prepare -k norm",
           "return count(step.rows) / self._accumulation", "return float(count(step.rows))"),
    Mutant("mean-of-means", "test_data_prepare -k norm",
           "sum(count(rows) > 0 for rows in parts)", "len(parts)"),
    Mutant("epochs-in-one-order", "test_data_prepare -k new_order",
           "seed=(self._seed + epoch) % 2**32", "seed=self._seed % 2**32"),
    Mutant("steps-of-an-epoch", "test_data_prepare -k transformers",
           "math.ceil(len(epochs.of(0)) / self._window)", "len(epochs.of(0)) // self._window"),
    Mutant("resume-data-position", "test_data_prepare -k resumed",
           "start * self.accumulation, stop", "start, stop"),
    Mutant("held-out-rows", "test_data_splits -k held_out",
           "[mask == self.held_out for mask in", "[mask for mask in"),
    Mutant("evaluation-mean", "test_data_prepare -k evaluation",
           "norm = int(weights.sum()) / sum(map(len, chunks.values()))", "norm = float(weights.sum())"),
    # The schedule, the optimizer, the loss.
    Mutant("schedule-decay", "test_schedule -k transformers",
           '"decay_steps": end,', '"decay_steps": Name(f"{end.text} - {warmup.text}"),'),
    Mutant("clipping", "test_schedule -k adamw",
           '"optax.clip_by_global_norm"', '"optax.clip"'),
    Mutant("weight-decay", "test_schedule -k adamw",
           '{**arguments, "weight_decay": Name("WEIGHT_DECAY")}', "arguments"),
    Mutant("master-weights", "test_optimizers -k accumulate_small",
           "optax.apply_updates(state.master, changes)", "optax.apply_updates(_float32(params), changes)"),
    Mutant("loss-not-shifted", "test_loss -k padded_and_packed",
           "(jnp.roll(tokens, -1, axis=1), counted)", "(tokens, counted)"),
    Mutant("loss-across-samples", "test_loss -k padded_and_packed",
           "mask[:, 1:] & within", "mask[:, 1:]"),
    Mutant("attention-to-the-future", "test_loss -k attention_mask",
           "jnp.tril(jnp.ones((length, length), bool))", "jnp.ones((length, length), bool)"),
    Mutant("attention-across-samples", "test_loss -k attention_mask",
           "return causal & same & ", "return causal & "),
    Mutant("dpo-reference", "test_preference -k loss_and_gradient",
           "stop_gradient(reference(*rows))", "stop_gradient(logps)"),
    Mutant("orpo-averages", "test_preference -k loss_and_gradient",
           "PairLoss(_odds_ratio, mean=True)", "PairLoss(_odds_ratio)"),
    Mutant("simpo-margin", "test_pair_losses",
           "(chosen - rejected) - train.simpo_gamma", "(chosen - rejected - train.simpo_gamma)"),
    # The model and its adapters.
    Mutant("rope-scaling", "test_rope -k frequencies",
           "(1 - kept) * plain / factor + kept * plain",
           "kept * plain / factor + (1 - kept) * plain"),
    Mutant("norm-offset", "test_gemma -k norms",
           "self.w.get_value().astype(jnp.float32) + self.norm.offset",
           "self.w.get_value().astype(jnp.float32)"),
    Mutant("lora-scale", "test_lora_patterns -k scale",
           "(math.sqrt(rank) if self.rslora else rank)\n\n\n@",
           "(rank if self.rslora else math.sqrt(rank))\n\n\n@"),
    Mutant("lora-dropout-rows", "test_lora -k seed_row",
           "index.astype(jnp.uint32) * jnp.uint32(rows)", "index.astype(jnp.uint32)"),
    Mutant("lora-dropout-in-evaluation", "test_lora -k not_evaluation",
           "        finally:\n            self.salts = None", "        finally:\n            pass"),
    Mutant("nf4-table", "test_quantize -k bit_for_bit",
           "for code in range(1, 16):", "for code in range(1, 15):"),
    Mutant("int8-rounding", "test_export_quantized -k int8",
           "jnp.clip(jnp.round(quotient(rows, scales)), -127, 127)",
           "jnp.clip(quotient(rows, scales), -127, 127)"),
    # Checkpoints, merges, adapters of PEFT.
    Mutant("merge-name", "test_merge -k only_adapted",
           "out[source.full_name(base.prefix)] = deltas[adapter.name]",
           'out[source.full_name("model.")] = deltas[adapter.name]'),
    Mutant("merge-transpose", "test_families -k same_delta",
           "(hidden, heads, head_dim), (1, 2, 0))", "(hidden, head_dim, heads), (2, 1, 0))"),
    Mutant("merge-scale", "test_merge_rule -k rounds_once",
           "np.ascontiguousarray(change.b, np.float32) * np.float32(change.scale)",
           "np.ascontiguousarray(change.b, np.float32)"),
    Mutant("merge-rounding", "test_merge_rule -k rounds_once",
           "weight.astype(jnp.float32) + jnp.matmul(high, low, precision=\"highest\")",
           "weight + jnp.matmul(high, low, precision=\"highest\").astype(dtype)"),
    Mutant("peft-export-config", "test_lora_patterns -k exported_adapter_config",
           '"use_rslora": settings.rslora', '"use_rslora": False'),
    Mutant("peft-import-scale", "test_peft_import_refused -k suggests_matching",
           "if config.rslora != settings.rslora:", "if config.rslora and not settings.rslora:"),
    Mutant("peft-import-ranks", "test_peft_import_refused -k patterns_fit",
           "(v for key, v in self.rank_pattern.items() if means(key, module))",
           "(v for key, v in self.rank_pattern.items() if key == module)"),
    Mutant("checksum", "test_damaged_steps -k flipped_bit_in_any",
           "if _digest(folder / name) != recorded[name]:",
           "if len(_digest(folder / name)) != len(recorded[name]):"),
    Mutant("resume-step", "test_trainer -k resumed_run",
           "self._iter_steps = step, step * accumulation", "self._iter_steps = 0, step * accumulation"),
    Mutant("resume-another-recipe", "test_train_run -k check_record",
           'COMPARED = ("recipe", "model",', 'COMPARED = ("model",'),
)
# fmt: on


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named mutants, or all. The exit status is 0 if each of them is caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a mutant; all without one")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests on sound code first")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (1)")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.names} - {mutant.name for mutant in MUTANTS}):
        parser.error(f"there is no mutant {', '.join(unknown)}")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    begun = time.monotonic()

    def said(line: tuple[bool, str]) -> bool:
        print(line[1], flush=True)
        return line[0]

    with copies(options.jobs) as trees, ThreadPoolExecutor(options.jobs) as threads:
        if not options.no_baseline:
            whole = dict.fromkeys(mutant.tests for mutant in chosen)
            if not all([*map(said, threads.map(lambda tests: baseline(trees, tests), whole))]):
                print("the tests fail on sound code, so that they would prove nothing")
                return 1
        caught = sum(map(said, threads.map(lambda mutant: judge(trees, mutant), chosen)))
    print(f"{caught} of {len(chosen)} mutants caught in {time.monotonic() - begun:.0f} s")
    return int(caught < len(chosen))


@contextmanager
def copies(count: int) -> Iterator[Queue[Path]]:
    """Yield a queue of copies of the working tree's tracked files, to take and to give back."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        first = Path(folder) / "0"
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():
                (first / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, first / name, follow_symlinks=False)
        # Check by content, because a mutant may have the same length and time as the original.
        compiling = ["compileall", "-qq", "-j", "0", "--invalidation-mode", "checked-hash"]
        subprocess.run([sys.executable, "-m", *compiling, *PRODUCT], cwd=first, check=True)
        trees: Queue[Path] = Queue()
        trees.put(first)
        for number in range(1, count):
            trees.put(shutil.copytree(first, Path(folder) / str(number), symlinks=True))
        yield trees


def baseline(trees: Queue[Path], tests: str) -> tuple[bool, str]:
    """Return whether tests pass on correct code, and a line about it."""
    tree = trees.get()
    try:
        done, seconds = run(tree, tests)
    finally:
        trees.put(tree)
    if done.returncode == 0:
        return True, f"passes    {tests} ({seconds:.0f} s)"
    return False, f"FAILS     {tests}\n{last(done)}"


def product(tree: Path) -> dict[Path, str]:
    """Return the product's files that mutants change, with their texts."""
    files = [file for folder in PRODUCT for file in sorted((tree / folder).rglob("*.*"))]
    files = [file for file in files if file.suffix in (".py", ".sh", ".j2", ".json") and file.is_file()]
    return {file: file.read_text(encoding="utf-8") for file in files}


def judge(trees: Queue[Path], mutant: Mutant) -> tuple[bool, str]:
    """Return whether a mutant is caught, and a line about it."""
    tree = trees.get()
    try:
        found = {file: text for file, text in product(tree).items() if mutant.text in text}
        times = sum(text.count(mutant.text) for text in found.values())
        if times != 1:
            return False, f"STALE     {mutant.name}: its text stands {times} times in the product"
        ((file, text),) = found.items()
        file.write_text(text.replace(mutant.text, mutant.wrong), encoding="utf-8")
        try:
            done, seconds = run(tree, mutant.tests)
        finally:
            file.write_text(text, encoding="utf-8")
        where = f"{mutant.name} ({file.relative_to(tree)})"
    finally:
        trees.put(tree)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return False, f"SURVIVED  {where}: {mutant.tests} ({seconds:.0f} s)"
    if done.returncode != 1 or failed is None:
        return False, f"BROKEN    {where}: {mutant.tests}\n{last(done)}"
    if "Timeout (>" in done.stdout:
        return False, f"TIMED OUT {where}: {failed[1]}"
    return True, f"caught    {where}: {failed[1]} ({seconds:.0f} s)"


def run(tree: Path, tests: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run tests in a copy of the working tree, and return the result and the seconds."""
    words = []
    for word in shlex.split(tests):
        modules = [*tree.glob(f"tests/**/{word}.py")] if word.startswith("test_") else []
        words += [str(module.relative_to(tree)) for module in modules] or [word]
    # Before installed packages, because an editable installation's path leads to the checkout.
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, -1, f"not done after {SECONDS} s", "")
    return done, time.monotonic() - begun


def last(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of pytest's output."""
    return "\n".join(f"    {line}" for line in (done.stdout + done.stderr).splitlines()[-15:])


if __name__ == "__main__":
    sys.exit(main())
